"""Which server holds which key: one server, the master that sentinels name, or a cluster.

Imports the optional package.
"""

import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from valkey.crc import VALKEY_CLUSTER_HASH_SLOTS, key_slot
from valkey.exceptions import ValkeyError

from kvstrata.storage.remote.valkey.address import Address, Target
from kvstrata.storage.remote.valkey.batch import Routes
from kvstrata.storage.remote.valkey.deadline_socket import remaining_seconds
from kvstrata.storage.remote.valkey.links import Dialer, Link, Links, Session
from kvstrata.storage.remote.valkey.resp import ErrorReply, NotRespError

__all__ = ["open_routes"]

_SLOTS: Final = VALKEY_CLUSTER_HASH_SLOTS
_ASKED_SERVERS: Final = 5  # at most, for one map of a cluster


def open_routes(target: Target) -> tuple[Links, Routes]:
    """No I/O: the first call connects."""
    dial = Dialer(target.login, target.database, target.tls)
    secrets = [target.login.password, target.sentinel_login.password]
    if target.sentinel is not None:
        ask = Dialer(target.sentinel_login, 0, target.tls)
        master = _SentinelDialer(ask, dial, target.addresses)
        return Links(target.name, master, *secrets), OneServer(Address(target.sentinel, 0))
    links = Links(target.name, dial, *secrets)
    if target.cluster:
        return links, Cluster(links, target.addresses)
    return links, OneServer(target.addresses[0])


class OneServer:
    """It holds everything."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def masters(self, session: Session) -> list[Address]:
        return [self._address]

    def groups(self, names: Sequence[bytes], session: Session) -> dict[Address, list[int]]:
        return {self._address: list(range(len(names)))} if names else {}

    def redirect(self, name: bytes, reply: ErrorReply, asked: Address) -> tuple[Address, bool]:
        raise reply


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
            except (ValkeyError, ErrorReply, NotRespError, OSError) as e:
                fault = e
                continue
            if found is None:
                fault = ErrorReply(f"the sentinel {sentinel} knows no master {name!r}")
                continue
            self._sentinels = [sentinel, *(each for each in sentinels if each != sentinel)]
            return _address(found)
        raise fault or ErrorReply("there is no sentinel")


class Cluster:
    """Each of the cluster's masters holds some of its hash slots.

    The map of slots is asked for by the first call, by the next after a redirect for good, and by
    the next after a call that failed. Thread-safe.
    """

    def __init__(self, links: Links, seeds: Sequence[Address]) -> None:
        self._links = links
        self._seeds = set(seeds)
        self._lock = threading.Lock()  # held while the map is asked for
        self._masters: list[Address | None] = [None] * _SLOTS  # of each slot
        self._is_stale = True
        self._failed_calls = 0  # of the links, as of the map

    def masters(self, session: Session) -> list[Address]:
        return sorted({each for each in self._map(session) if each is not None})

    def groups(self, names: Sequence[bytes], session: Session) -> dict[Address, list[int]]:
        masters = self._map(session) if names else []
        groups: dict[Address, list[int]] = {}
        for position, name in enumerate(names):
            slot = key_slot(name)
            master = masters[slot]
            if master is None:
                raise ErrorReply(f"CLUSTERDOWN no server of the cluster holds slot {slot}")
            groups.setdefault(master, []).append(position)
        return groups

    def redirect(self, name: bytes, reply: ErrorReply, asked: Address) -> tuple[Address, bool]:
        if reply.code not in {"MOVED", "ASK"}:
            raise reply
        host, _, port = reply.text.rpartition(" ")[2].rpartition(":")
        if not port.isdigit():
            raise NotRespError(f"the redirect {reply.text!r}")
        address = Address(host.strip("[]") or asked.host, int(port))
        if reply.code == "MOVED":
            self._masters[key_slot(name)] = address
            self._is_stale = True
        return address, reply.code == "ASK"

    def _map(self, session: Session) -> list[Address | None]:
        if self._is_outdated():
            if not self._lock.acquire(timeout=remaining_seconds(session.deadline)):
                raise TimeoutError("another call still asks who holds what")
            try:
                if self._is_outdated():
                    failed_calls = self._links.failed_calls
                    self._masters = self._ask_some(session)
                    self._failed_calls, self._is_stale = failed_calls, False
            finally:
                self._lock.release()
            self._links.keep_only({each for each in self._masters if each is not None})
        return self._masters

    def _is_outdated(self) -> bool:
        return self._is_stale or self._failed_calls != self._links.failed_calls

    def _ask_some(self, session: Session) -> list[Address | None]:
        """Ask a few servers, chosen at random: one that is cut off from the others may be wrong."""
        known = list(self._seeds.union(each for each in self._masters if each is not None))
        some = random.sample(known, min(_ASKED_SERVERS, len(known)))
        fault: Exception | None = None
        for number, address in enumerate(some):
            share = remaining_seconds(session.deadline) / (len(some) - number + 1)
            try:
                link = session.link(address, time.monotonic() + share)
                slots = _masters_of_slots(link.command("CLUSTER", "SLOTS"), address)
            except (ValkeyError, ErrorReply, NotRespError, OSError) as e:
                session.lose(address)
                fault = e
                continue
            link.stream.deadline = session.deadline
            return slots
        raise fault or ErrorReply("CLUSTERDOWN no server of the cluster is known")


def _masters_of_slots(answer: object, asked: Address) -> list[Address | None]:
    """What CLUSTER SLOTS says: first slot, last slot, master, replicas, for each range."""
    masters: list[Address | None] = [None] * _SLOTS
    if not isinstance(answer, list):
        raise NotRespError(f"slots {answer!r}")
    for entry in answer:
        match entry:
            case [int() as first, int() as last, master, *_] if 0 <= first <= last < _SLOTS:
                masters[first : last + 1] = [_address(master, asked.host)] * (last + 1 - first)
            case _:
                raise NotRespError(f"slots {entry!r}")
    return masters


def _address(answer: object, default_host: str = "") -> Address:
    """Host and port, as sentinels and clusters give them; a cluster may leave the host out."""
    match answer:
        case [bytes() | None as host, bytes() | int() as port, *_] if host or default_host:
            with suppress(ValueError):  # of bytes that are no name or no number
                return Address(host.decode() if host else default_host, int(port))
    raise NotRespError(f"the address {answer!r}")
