"""A cluster: which of its servers holds which key, and which of them are left alone.

Imports the optional package.
"""

import logging
import math
import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Final

from valkey.crc import VALKEY_CLUSTER_HASH_SLOTS, key_slot

from kvstrata.storage.remote.valkey.address import Address
from kvstrata.storage.remote.valkey.deadline_socket import remaining_seconds
from kvstrata.storage.remote.valkey.links import FAULTS, Links, Session
from kvstrata.storage.remote.valkey.pauses import Pauses
from kvstrata.storage.remote.valkey.resp import ErrorReply, NotRespError

__all__ = ["Cluster", "Holders", "address_in", "everywhere"]

Holders = Sequence[Address]  # of a slot, the master first; none: nobody holds it

_log = logging.getLogger(__name__)

_SLOTS: Final = VALKEY_CLUSTER_HASH_SLOTS
_ASKED_SERVERS: Final = 5  # at most, for one map of a cluster
_PAUSE_SECONDS: Final = 5.0  # as between two probes of the breaker
_MAP_SECONDS: Final = 30.0  # after which replicas that are there again are found


class Cluster:
    """Each of the cluster's masters holds some of its hash slots.

    * The map of slots is asked for by the first call, by the next after a redirect for good, and by
      the next after a server has failed; with replicas also now and then, and if nobody answers
      then, the old one holds.
    * A server that fails is left alone for some seconds; then one call tries it. Where none is left
      that did not fail, all are asked: the fault is the tier's then, and is raised.
    * What may lag is asked of a master or of one of its replicas, if there are *replicas*.
    * Thread-safe.
    """

    def __init__(self, links: Links, seeds: Sequence[Address], *, replicas: bool = False) -> None:
        self._links = links
        self._seeds = frozenset(seeds)
        self._pauses = Pauses(_PAUSE_SECONDS)
        self._lock = threading.Lock()  # held while the map is asked for
        self._replicas = replicas
        self._holders: list[Holders] = [()] * _SLOTS  # of each slot
        self._servers: frozenset[Address] = frozenset()  # all of them
        self._doubts = 0  # reasons that there have been to ask for another map
        self._doubts_of_map = -1  # as of the map, with calls that have failed
        self._good_until = math.inf  # the map, of time.monotonic

    def masters(self, session: Session) -> list[Address]:
        self._update(session)
        return sorted({holders[0] for holders in self._holders if holders})

    def groups(
        self, names: Sequence[bytes], session: Session, *, may_lag: bool
    ) -> dict[Address, list[int]]:
        groups: dict[Address, list[int]] = {}
        if names:
            self._update(session)
        turn = random.randrange(_SLOTS)
        for position, name in enumerate(names):
            holders = self._holders[key_slot(name)]
            if may_lag and len(holders) > 1:
                holders = self._pauses.due(holders) or holders
                holders = holders[turn % len(holders) :]
            if holders:
                groups.setdefault(holders[0], []).append(position)
        return groups

    def redirect(
        self, name: bytes, reply: ErrorReply, asked: Address
    ) -> tuple[Address, bool] | None:
        if reply.code not in {"MOVED", "ASK"}:
            return None
        host, _, port = reply.text.rpartition(" ")[2].rpartition(":")
        if not port.isdigit():
            raise NotRespError(f"the redirect {reply.text!r}")
        address = Address(host.strip("[]") or asked.host, int(port))
        if reply.code == "MOVED":
            self._holders[key_slot(name)] = (address,)
            self._doubts += 1
        return address, reply.code == "ASK"

    def pause_of(self, address: Address) -> Exception | None:
        fault = self._pauses.of(address)
        return fault if fault is not None and self._pauses.spared(self._servers) else None

    def failed(self, address: Address, fault: Exception) -> None:
        self._doubts += 1
        is_news = self._pauses.begin(address, fault)
        if not self._pauses.spared(self._servers):
            raise fault
        if is_news:
            _log.warning(
                "%s goes on without %s, which is tried every %g s: %s",
                self._links.name,
                address,
                _PAUSE_SECONDS,
                self._links.fault_of(fault),
            )

    def answered(self, address: Address) -> None:
        if self._pauses.end(address):
            _log.info("%s: %s answers again", self._links.name, address)

    def _update(self, session: Session) -> None:
        """Ask for the map if it may be out of date."""
        if self._is_good():
            return
        if not self._lock.acquire(timeout=remaining_seconds(session.deadline)):
            raise TimeoutError("another call still asks who holds what")
        try:
            if not self._is_good():
                self._renew(session)
        finally:
            self._lock.release()
        if not self._servers:
            raise ErrorReply("CLUSTERDOWN no server of the cluster holds any slot")
        self._links.keep_only(set(self._servers))
        self._pauses.keep_only(set(self._servers | self._seeds))

    def _is_good(self) -> bool:
        return self._doubts_of_map == self._all_doubts() and time.monotonic() < self._good_until

    def _renew(self, session: Session) -> None:
        doubts = self._all_doubts()
        if self._replicas:
            self._good_until = time.monotonic() + _MAP_SECONDS
        try:
            self._holders = self._ask_map(session)
        except FAULTS:
            if self._doubts_of_map != doubts:
                raise
            return
        self._servers = frozenset(chain.from_iterable(set(self._holders)))
        self._doubts_of_map = doubts

    def _all_doubts(self) -> int:
        return self._doubts + self._links.failed_calls

    def _ask_map(self, session: Session) -> list[Holders]:
        """Ask a few servers, chosen at random: one that is cut off from the others may be wrong."""
        known = self._seeds | self._servers
        some = self._pauses.spared(known) or list(known)
        some = random.sample(some, min(_ASKED_SERVERS, len(some)))
        fault: Exception | None = None
        for number, address in enumerate(some):
            share = remaining_seconds(session.deadline) / (len(some) - number + 1)
            try:
                link = session.link(address, time.monotonic() + share)
                slots = _holders_of_slots(link.command("CLUSTER", "SLOTS"), address)
            except FAULTS as e:
                session.lose(address)
                self._pauses.begin(address, e)
                fault = e
                continue
            link.stream.deadline = session.deadline
            return slots if self._replicas else [holders[:1] for holders in slots]
        raise fault or ErrorReply("CLUSTERDOWN no server of the cluster is known")


def _holders_of_slots(answer: object, asked: Address) -> list[Holders]:
    """What CLUSTER SLOTS says: first slot, last slot, master, replicas, for each range."""
    slots: list[Holders] = [()] * _SLOTS
    if not isinstance(answer, list):
        raise NotRespError(f"slots {answer!r}")
    for entry in answer:
        match entry:
            case [int() as first, int() as last, _, *_] if 0 <= first <= last < _SLOTS:
                holders = tuple(address_in(each, asked.host) for each in entry[2:])
                slots[first : last + 1] = [holders] * (last + 1 - first)
            case _:
                raise NotRespError(f"slots {entry!r}")
    return slots


def everywhere(holders: Holders) -> list[Holders]:
    """The map of a cluster whose slots are all with the same."""
    return [holders] * _SLOTS


def address_in(answer: object, default_host: str = "") -> Address:
    """Host and port, as sentinels and clusters give them; a cluster may leave the host out."""
    match answer:
        case [bytes() | None as host, bytes() | int() as port, *_] if host or default_host:
            with suppress(ValueError):  # of bytes that are no name or no number
                return Address(host.decode() if host else default_host, int(port))
    raise NotRespError(f"the address {answer!r}")
