"""Blocks that an operator keeps from leaving, for a time."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kvstrata.core.errors import LimitExceeded
from kvstrata.core.keys import BlockIds, KeyArray
from kvstrata.core.types import NamespaceId
from kvstrata.index.places import DISK, HOST
from kvstrata.manager.decisions import Decision
from kvstrata.manager.prompts import path_to
from kvstrata.manager.report import PinReport
from kvstrata.manager.residency import Residency, leading

_MOST_SHARE: Final = 2  # of a tier: a half can be pinned at most
_MOST_PINS: Final = 1024


@dataclass(frozen=True, slots=True)
class _Pin:
    namespace: NamespaceId
    ids: BlockIds
    deadline: float  # monotonic seconds


class Pins:
    """Leases without a task. Needs the manager's lock."""

    def __init__(self, cache: Residency, blocks: int) -> None:
        """At most half of *blocks*, those of the smallest tier, are pinned at a time."""
        self._cache = cache
        self._room = blocks // _MOST_SHARE
        self._pins: dict[int, _Pin] = {}
        self._next = 1
        self._first_deadline = math.inf  # of all pins; or an earlier one

    @property
    def blocks(self) -> int:
        """Pinned now; one that is pinned twice counts twice."""
        return sum(len(pin.ids) for pin in self._pins.values())

    def add(self, namespace: NamespaceId, keys: KeyArray, seconds: float) -> tuple[int, int]:
        """Pin the leading *keys* that are in host memory or on disk; number and blocks of the pin.

        Both are 0 if the first of them is nowhere. Raises ``LimitExceeded`` if some are there, and
        no more may be pinned.
        """
        ids = self._cache.index.longest_prefix(namespace, keys)
        return self._add(namespace, ids[: leading(self._cache.has(ids, HOST | DISK))], seconds)

    def add_request(self, decisions: Sequence[Decision], seconds: float) -> tuple[int, int]:
        """Pin the prompt of the latest of *decisions* whose last block is known, as ``add`` does.

        Its blocks that are nowhere now are passed over.
        """
        for decision in reversed(decisions):
            namespace = bytes.fromhex(decision.namespace)
            index = self._cache.index
            ids = path_to(index, namespace, bytes.fromhex(decision.last_block), index.capacity)
            if len(ids):
                return self._add(namespace, ids[self._cache.has(ids, HOST | DISK)], seconds)
        return 0, 0

    def remove(self, number: int) -> bool:
        """End a pin before its time; whether there was one of that number."""
        pin = self._pins.pop(number, None)
        if pin is not None:
            self._cache.unlease(pin.ids)
        return pin is not None

    def give_up(self, ids: BlockIds) -> None:
        """*ids* are pinned no longer: there is a doubt about their bytes."""
        for number, pin in self._pins.items():
            doubted = np.isin(pin.ids, ids)
            if doubted.any():
                self._pins[number] = replace(pin, ids=pin.ids[~doubted])
                self._cache.unlease(pin.ids[doubted])

    def forget(self, namespace: NamespaceId) -> None:
        """End the pins of *namespace*, whose blocks nobody is to find any more."""
        for number in [n for n, pin in self._pins.items() if pin.namespace == namespace]:
            self.remove(number)

    def expire(self) -> None:
        now = time.monotonic()
        if now < self._first_deadline:
            return
        for number in [n for n, pin in self._pins.items() if pin.deadline < now]:
            self.remove(number)
        self._first_deadline = min((p.deadline for p in self._pins.values()), default=math.inf)

    def report(self) -> list[PinReport]:
        """The pins whose time is not up, in the order in which they were made."""
        self.expire()
        now = time.monotonic()
        return [
            PinReport(number, pin.namespace.hex(), len(pin.ids), max(0.0, pin.deadline - now))
            for number, pin in self._pins.items()
        ]

    def _add(self, namespace: NamespaceId, ids: BlockIds, seconds: float) -> tuple[int, int]:
        """Pin as many of *ids* as may be, the leading ones."""
        self.expire()
        if not len(ids):
            return 0, 0
        left = self._room - self.blocks
        if left < 1 or len(self._pins) >= _MOST_PINS:
            raise LimitExceeded(
                f"no more may be pinned: {self.blocks:,} blocks are, in {len(self._pins):,} pins, "
                f"and at most {self._room:,} can be (half of the smaller tier), in {_MOST_PINS:,}",
                hint="end a pin with kvstrata unpin: kvstrata inspect lists them",
            )
        ids = np.unique(ids[:left])
        self._cache.lease(ids)
        number, self._next = self._next, self._next + 1
        self._pins[number] = pin = _Pin(namespace, ids, time.monotonic() + seconds)
        self._first_deadline = min(self._first_deadline, pin.deadline)
        return number, len(ids)
