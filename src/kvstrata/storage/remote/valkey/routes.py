"""Which server holds which key: one server, the master that sentinels name, or a cluster.

Imports the optional package.
"""

from collections.abc import Sequence

from kvstrata.storage.remote.valkey.address import Address, Target
from kvstrata.storage.remote.valkey.batch import Routes
from kvstrata.storage.remote.valkey.cluster import Cluster
from kvstrata.storage.remote.valkey.links import Dialer, Links, Session
from kvstrata.storage.remote.valkey.resp import ErrorReply
from kvstrata.storage.remote.valkey.sentinels import MasterAndReplicas, MasterDialer, Sentinels

__all__ = ["open_routes"]


def open_routes(target: Target) -> tuple[Links, Routes]:
    """No I/O: the first call connects."""
    in_cluster = target.cluster and target.replicas
    dial = Dialer(target.login, target.database, target.tls, replicas=in_cluster)
    secrets = [target.login.password, target.sentinel_login.password]
    if target.sentinel is not None:
        ask = Dialer(target.sentinel_login, 0, target.tls)
        sentinels = Sentinels(ask, target.addresses, target.sentinel)
        if target.replicas:
            links = Links(target.name, dial, *secrets)
            return links, MasterAndReplicas(links, sentinels)
        links = Links(target.name, MasterDialer(sentinels, dial), *secrets)
        return links, OneServer(Address(target.sentinel, 0))
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
