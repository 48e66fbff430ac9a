"""Which server holds which key: one server, the master that sentinels name, or a cluster.

Imports the optional package.
"""

import time
from collections.abc import Sequence

from kvstrata.storage.remote.valkey.address import Address, Target
from kvstrata.storage.remote.valkey.batch import Routes
from kvstrata.storage.remote.valkey.cluster import Cluster, address_in
from kvstrata.storage.remote.valkey.deadline_socket import remaining_seconds
from kvstrata.storage.remote.valkey.links import FAULTS, Dialer, Link, Links, Session
from kvstrata.storage.remote.valkey.resp import ErrorReply

__all__ = ["open_routes"]


def open_routes(target: Target) -> tuple[Links, Routes]:
    """No I/O: the first call connects."""
    dial = Dialer(target.login, target.database, target.tls, replicas=target.replicas)
    secrets = [target.login.password, target.sentinel_login.password]
    if target.sentinel is not None:
        ask = Dialer(target.sentinel_login, 0, target.tls)
        master = _SentinelDialer(ask, dial, target.addresses)
        return Links(target.name, master, *secrets), OneServer(Address(target.sentinel, 0))
    links = Links(target.name, dial, *secrets)
    if target.cluster:
        return links, Cluster(links, target.addresses, replicas=target.replicas)
    return links, OneServer(target.addresses[0])


class OneServer:
    """It holds everything."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def masters(self, session: Session) -> list[Address]:
        return [self._address]

    def groups(
        self, names: Sequence[bytes], session: Session, *, may_lag: bool
    ) -> dict[Address, list[int]]:
        return {self._address: list(range(len(names)))} if names else {}

    def redirect(self, name: bytes, reply: ErrorReply, asked: Address) -> None:
        return None

    def pause_of(self, address: Address) -> None:
        """The breaker of the tier is there for that."""
        return

    def failed(self, address: Address, fault: Exception) -> None:
        raise fault

    def answered(self, address: Address) -> None:
        pass


class _SentinelDialer:
    """Connects to whatever server the sentinels name as the master at that moment.

    Idle connections to a former master end by themselves: sentinels make it close them.
    """

    def __init__(self, ask: Dialer, dial: Dialer, sentinels: Sequence[Address]) -> None:
        self._ask = ask
        self._dial = dial
        self._sentinels = list(sentinels)  # who answered last comes first; replaced, not changed

    def __call__(self, address: Address, deadline: float) -> Link:
        master = self._master(address.host, deadline)
        link = self._dial(master, deadline)
        role: object = None
        try:
            role = link.command("ROLE")
        finally:
            is_master = isinstance(role, list) and role[:1] == [b"master"]
            if not is_master:
                link.disconnect()
        if not is_master:
            raise ErrorReply(f"READONLY {master} is not yet the master that sentinels name")
        return link

    def _master(self, name: str, deadline: float) -> Address:
        sentinels = self._sentinels
        fault: Exception | None = None
        for number, sentinel in enumerate(sentinels):
            share = remaining_seconds(deadline) / (len(sentinels) - number + 1)
            try:
                link = self._ask(sentinel, time.monotonic() + share)
                try:
                    found = link.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name)
                finally:
                    link.disconnect()
            except FAULTS as e:
                fault = e
                continue
            if found is None:
                fault = ErrorReply(f"the sentinel {sentinel} knows no master {name!r}")
                continue
            self._sentinels = [sentinel, *(each for each in sentinels if each != sentinel)]
            return address_in(found)
        raise fault or ErrorReply("there is no sentinel")
