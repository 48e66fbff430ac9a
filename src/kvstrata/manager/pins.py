"""Blocks that an operator keeps from leaving, for a time."""

import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstrata.core.keys import BlockIds, KeyArray
from kvstrata.core.types import NamespaceId
from kvstrata.index.places import DISK, HOST
from kvstrata.manager.residency import Residency, leading

_MOST_SHARE: Final = 2  # of the index: a half can be pinned at most


@dataclass(frozen=True, slots=True)
class _Pin:
    ids: BlockIds
    deadline: float  # monotonic seconds


class Pins:
    """Leases without a task. Needs the manager's lock."""

    def __init__(self, cache: Residency, blocks: int) -> None:
        """At most half of *blocks* are pinned at a time."""
        self._cache = cache
        self._room = blocks // _MOST_SHARE
        self._pins: dict[int, _Pin] = {}
        self._next = 1

    @property
    def blocks(self) -> int:
        """Pinned now; one that is pinned twice counts twice."""
        return sum(len(pin.ids) for pin in self._pins.values())

    def add(self, namespace: NamespaceId, keys: KeyArray, seconds: float) -> tuple[int, int]:
        """Pin the leading *keys* that are in host memory or on disk; number and blocks of the pin."""
        self.expire()
        ids = self._cache.index.longest_prefix(namespace, keys)
        ids = ids[: leading(self._cache.has(ids, HOST | DISK))]
        ids = np.unique(ids[: max(0, self._room - self.blocks)])
        if not len(ids):
            return 0, 0
        self._cache.lease(ids)
        number, self._next = self._next, self._next + 1
        self._pins[number] = _Pin(ids, time.monotonic() + seconds)
        return number, len(ids)

    def remove(self, number: int) -> bool:
        """End a pin before its time; whether there was one of that number."""
        pin = self._pins.pop(number, None)
        if pin is not None:
            self._cache.unlease(pin.ids)
        return pin is not None

    def expire(self) -> None:
        now = time.monotonic()
        for number in [n for n, pin in self._pins.items() if pin.deadline < now]:
            self.remove(number)
