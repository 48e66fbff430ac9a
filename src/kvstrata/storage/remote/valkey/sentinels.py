"""A master that sentinels name, and the replicas that follow it.

Imports the optional package.
"""

import time
from collections.abc import Sequence
from typing import Final

from kvstrata.storage.remote.valkey.address import Address
from kvstrata.storage.remote.valkey.cluster import Cluster, Holders, address_in, everywhere
from kvstrata.storage.remote.valkey.deadline_socket import remaining_seconds
from kvstrata.storage.remote.valkey.links import FAULTS, Dialer, Link, Links, Session
from kvstrata.storage.remote.valkey.resp import ErrorReply, NotRespError

__all__ = ["MasterAndReplicas", "MasterDialer", "Sentinels"]

_GONE: Final = (b"s_down", b"o_down")  # flags of what does not answer the sentinels


class Sentinels:
    """Whom the sentinels name under one name at that moment. Thread-safe."""

    def __init__(self, ask: Dialer, sentinels: Sequence[Address], name: str) -> None:
        self._dial = ask
        self._sentinels = list(sentinels)  # who answered last comes first; replaced, not changed
        self._name = name

    def holders(self, deadline: float, *, replicas: bool) -> Holders:
        """The master and, where they are wanted, its *replicas* that answer a sentinel."""
        sentinels = self._sentinels
        fault: Exception | None = None
        for number, sentinel in enumerate(sentinels):
            share = remaining_seconds(deadline) / (len(sentinels) - number + 1)
            try:
                found = self._ask(sentinel, time.monotonic() + share, replicas=replicas)
            except FAULTS as e:
                fault = e
                continue
            self._sentinels = [sentinel, *(each for each in sentinels if each != sentinel)]
            return found
        raise fault or ErrorReply("there is no sentinel")

    def _ask(self, sentinel: Address, deadline: float, *, replicas: bool) -> Holders:
        link = self._dial(sentinel, deadline)
        try:
            master = link.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._name)
            if master is None:
                raise ErrorReply(f"the sentinel {sentinel} knows no master {self._name!r}")
            known = link.command("SENTINEL", "REPLICAS", self._name) if replicas else []
        finally:
            link.disconnect()
        first = address_in(master)
        return first, *(each for each in _replicas_in(known) if each != first)


class MasterDialer:
    """Connects to whatever server the sentinels name as the master at that moment.

    Idle connections to a former master end by themselves: sentinels make it close them.
    """

    def __init__(self, sentinels: Sentinels, dial: Dialer) -> None:
        self._sentinels = sentinels
        self._dial = dial

    def __call__(self, _: Address, deadline: float) -> Link:
        (master,) = self._sentinels.holders(deadline, replicas=False)
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


class MasterAndReplicas(Cluster):
    """As a cluster in which one master holds all slots. Who that is, sentinels say.

    A master that is one no more refuses what is to be written, and they are asked anew.
    """

    def __init__(self, links: Links, sentinels: Sentinels) -> None:
        super().__init__(links, (), replicas=True)
        self._sentinels = sentinels

    def _ask_map(self, session: Session) -> list[Holders]:
        return everywhere(self._sentinels.holders(session.deadline, replicas=True))


def _replicas_in(answer: object) -> list[Address]:
    """Those that are there, of what SENTINEL REPLICAS says: names and values by turns, of each."""
    if not isinstance(answer, list):
        raise NotRespError(f"replicas {answer!r}")
    found = []
    for entry in answer:
        if not isinstance(entry, list) or len(entry) % 2:
            raise NotRespError(f"the replica {entry!r}")
        said = dict(zip(entry[::2], entry[1::2], strict=True))
        flags = bytes(said.get(b"flags", b"")).split(b",")
        if not any(flag in _GONE for flag in flags):
            found.append(address_in([said.get(b"ip"), said.get(b"port")]))
    return found
