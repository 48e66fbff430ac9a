"""Blocks on their way up: from which tier each is read, into which host slot, and for whom."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.keys import BlockIds
from kvstrata.core.types import NamespaceId, Read, StoreKey
from kvstrata.index.places import ARRIVING, DISK, HOST, REMOTE, WRITING
from kvstrata.manager.residency import Residency, Slots
from kvstrata.manager.tasks import GetTask
from kvstrata.manager.writes import LowerTier
from kvstrata.transfer.finder import Found

__all__ = ["FINDABLE", "TIERS", "Arrival", "Lower", "Reads"]

TIERS: Final[tuple[LowerTier, ...]] = ("disk", "remote")
FINDABLE: Final = HOST | DISK | ARRIVING
_PLACES: Final = np.arange(256)  # every value of ``PrefixIndex.where``
# A block that is being saved again has a host slot, which nothing else may be read into.
_IS_FINDABLE: Final[NDArray[np.bool_]] = ((_PLACES & FINDABLE) != 0) & ((_PLACES & WRITING) == 0)
_IS_FINDABLE_WITHOUT_DISK: Final[NDArray[np.bool_]] = _IS_FINDABLE & (
    (_PLACES & (FINDABLE | REMOTE)) != DISK
)


class Lower(Protocol):
    """A tier below host memory, as lookups see it: a ``Cascade``."""

    def promote(
        self,
        keys: Sequence[StoreKey],
        slots: Sequence[int],
        done: Callable[[int, Sequence[Read | None]], None],
        begin: Callable[[int, int], bool],
    ) -> None: ...

    @property
    def search_seconds(self) -> float: ...

    def is_off(self) -> bool: ...

    def relieve(self) -> None: ...

    def find(self, keys: Sequence[StoreKey], done: Callable[[Found], None], asker: str) -> None: ...

    def ask(
        self, keys: Sequence[StoreKey], done: Callable[[list[bool]], None], asker: str
    ) -> None: ...

    def owes_drop(self, namespace: NamespaceId) -> bool: ...


@dataclass(slots=True, eq=False)
class Arrival:
    """Blocks of one tier that are being read into their host slots, for *tasks* to wait for."""

    source: LowerTier
    ids: BlockIds
    keys: list[StoreKey]
    slots: list[int]
    tasks: set[GetTask] = field(default_factory=set)
    began_at: float = field(default_factory=time.monotonic)


class Reads:
    """What is being read into host memory. Needs the manager's lock."""

    def __init__(self, cache: Residency, lower: Mapping[LowerTier, Lower]) -> None:
        self.arrivals: dict[int, Arrival] = {}  # by block id, while it is being read
        self._cache = cache
        self._lower = lower

    def findable(self) -> NDArray[np.bool_]:
        """Of each value of ``PrefixIndex.where``: whether such a block need not be searched for.

        What is on a disk that is switched off has to be, where there is a remote tier.
        """
        return _IS_FINDABLE_WITHOUT_DISK if self._does_without_disk() else _IS_FINDABLE

    def told(self, ids: BlockIds) -> None:
        """The remote tier has *ids*, says a search: what had to be searched for comes from there."""
        index = self._cache.index
        index.set_where(ids[~self.findable().take(index.where.take(ids))], REMOTE)

    def sources(self, ids: BlockIds) -> NDArray[np.uint8]:
        """For each block 0 if it is in host memory or on the way there, else 1 + its tier's index."""
        here = self._cache.has(ids, HOST | ARRIVING)
        on_disk = self._cache.has(ids, DISK)
        if self._does_without_disk():
            on_disk &= ~self._cache.has(ids, REMOTE)
        return np.where(here, 0, np.where(on_disk, 1, 2)).astype(np.uint8)

    def usable(self, sources: NDArray[np.uint8]) -> int:
        """How many of ``sources`` come before the first of a tier that is switched off.

        Nobody leaves host memory for what could not be read anyway.
        """
        usable = len(sources)
        for number, tier in enumerate(TIERS, 1):
            here = sources == number
            if here.any() and self._lower[tier].is_off():
                usable = min(usable, int(here.argmax()))
        return usable

    def count(self, task: GetTask, ids: BlockIds, sources: NDArray[np.uint8]) -> None:
        """*task* gets *ids*, whose ``sources`` are these; what arrives counts as its tier's."""
        arriving = self._cache.has(ids, ARRIVING)
        sources = sources.copy()
        sources[arriving] = [
            1 + TIERS.index(self.arrivals[block].source) for block in ids[arriving].tolist()
        ]
        task.disk_blocks += int(np.count_nonzero(sources == 1))
        task.remote_blocks += int(np.count_nonzero(sources == 2))

    def reserve(self, ids: BlockIds, sources: NDArray[np.uint8], slots: Slots) -> list[Arrival]:
        """*ids* are about to be read into *slots*."""
        self._cache.reserve(ids, slots, ARRIVING)
        arrivals = []
        for number, tier in enumerate(TIERS, 1):
            here = sources == number
            if not here.any():
                continue
            if tier == "remote":
                self._cache.index.set_where(ids[here], REMOTE)
            keys = self._cache.index.store_keys(ids[here])
            arrivals.append(Arrival(tier, ids[here], keys, slots[here].tolist()))
            self.arrivals.update(dict.fromkeys(ids[here].tolist(), arrivals[-1]))
        return arrivals

    def awaited(self, ids: BlockIds) -> set[Arrival]:
        """The reads that some of *ids* come from."""
        arriving = ids[self._cache.has(ids, ARRIVING)]
        return {self.arrivals[block] for block in arriving.tolist()}

    def is_waiting(self, task: GetTask) -> bool:
        """Whether some of what *task* goes for is on its way."""
        _, somewhere = self._cache.places(task.goal)
        return bool(somewhere & ARRIVING)

    def _does_without_disk(self) -> bool:
        """Whether the disk is switched off, and the remote tier may have what is on it."""
        return self._lower.keys() >= set(TIERS) and self._lower["disk"].is_off()
