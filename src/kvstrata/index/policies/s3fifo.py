"""S3-FIFO: most blocks are used once, and leave by a small queue before they cost others theirs."""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.keys import BlockIds
from kvstrata.index.ghost import Ghosts
from kvstrata.index.order import Order
from kvstrata.index.policies.base import SEARCH_LIMIT, MayLeave, search

Fingerprints = Callable[[BlockIds], NDArray[np.uint64]]

_SMALL, _MAIN = 0, 1
_SMALL_SHARE: Final = 0.1  # of the tier
_MOST_USES: Final = 3  # that are counted
_USES_TO_STAY: Final = (2, 1)  # at the end of each queue
_AHEAD: Final = 16  # blocks looked at together when the first ones stay
_LEAVING: Final = 128  # flag beside the uses: the block was named as a victim


class S3FIFO:
    """An ``EvictionPolicy`` of three first-in first-out queues (Yang et al., SOSP 2023).

    New blocks enter a small queue, a tenth of the tier. What was used twice when it reaches the
    end goes on to the main queue; the rest leaves, and is remembered for as many departures as
    the main queue is long: what comes back in that time enters the main queue at once. At the
    end of the main queue a block that was used starts again, with one use less.

    13 bytes for each id at most, and eleven for each block of the tier.
    """

    def __init__(self, capacity_ids: int, tier_blocks: int, fingerprints: Fingerprints) -> None:
        """*fingerprints* names blocks independently of their ids: ``PrefixIndex.fingerprints``."""
        self._order = Order(capacity_ids, queues=2)
        self._uses = np.zeros(capacity_ids, np.uint8)
        small = int(tier_blocks * _SMALL_SHARE)
        self._small_blocks = small
        self._main_blocks = tier_blocks - small
        self._ghosts = Ghosts(self._main_blocks)
        self._fingerprints = fingerprints
        self._was_full = False

    def __len__(self) -> int:
        return len(self._order)

    @property
    def nbytes(self) -> int:
        return self._order.nbytes + self._uses.nbytes + self._ghosts.nbytes

    def admit(self, ids: BlockIds) -> None:
        ids = ids[::-1]
        self._uses[ids] = 0
        queues = np.where(self._ghosts.take(self._fingerprints(ids)), _MAIN, _SMALL)
        if not self._was_full:  # what the small queue has no room for yet would be wasted
            room = max(0, self._small_blocks - self._order.length(_SMALL))
            queues[np.flatnonzero(queues == _SMALL)[room:]] = _MAIN
        self._order.spread(ids, queues.astype(np.uint8))

    def touch(self, ids: BlockIds) -> None:
        uses = self._uses[ids] & np.uint8(_MOST_USES)
        self._uses[ids] = np.minimum(uses + np.uint8(1), np.uint8(_MOST_USES))

    def remove(self, ids: BlockIds) -> None:
        if not len(ids):
            return
        leaving = self._order.contains(ids) & (self._uses[ids] >= _LEAVING)
        leaving &= self._order.queue_of(ids) == _SMALL
        self._ghosts.add(self._fingerprints(ids[leaving]))
        self._order.remove(ids)

    def victims(self, count: int, may_leave: MayLeave) -> BlockIds:
        self._was_full = True
        course = _Course(self._order, self._uses, self._main_blocks)
        refused: list[BlockIds] = []
        victims = search(len(self), count, may_leave, course.following, refused.append)
        for ids in refused:  # after the search, which so meets each block once
            self._order.spread(ids, self._order.queue_of(ids).astype(np.uint8))
        self._uses[victims] |= np.uint8(_LEAVING)
        self._order.tidy(course.moved + len(victims))
        return victims

    def check(self) -> None:
        self._order.check()


class _Course:
    """One search from the old ends of both queues, which meets each block once."""

    def __init__(self, order: Order, uses: NDArray[np.uint8], main_blocks: int) -> None:
        self.moved = 0
        self._order = order
        self._uses = uses
        self._main_blocks = main_blocks
        self._scans = [order.scan(_SMALL), order.scan(_MAIN)]
        self._ahead = [order.length(_SMALL), order.length(_MAIN)]  # blocks not met yet

    def following(self, count: int) -> BlockIds:
        """The next *count* blocks that would leave, fewer when all were met.

        For a single one this is S3-FIFO to the letter. Of several, half of those still missing
        leave by the small queue at a time, before the length of the main one is looked at again.
        """
        parts = [np.empty(0, np.int32)]
        missing = count
        while missing and (self._ahead[_SMALL] or self._ahead[_MAIN]):
            excess = self._ahead[_MAIN] - self._main_blocks
            if not self._ahead[_SMALL]:
                parts.append(self._leaving(_MAIN, missing))
            elif excess > 0:
                parts.append(self._leaving(_MAIN, min(missing, excess)))
            else:
                parts.append(self._leaving(_SMALL, -(-missing // 2)))
            missing -= len(parts[-1])
        return np.concatenate(parts)

    def _leaving(self, queue: int, count: int) -> BlockIds:
        """The next *count* blocks that leave by *queue*; those between that stay go to the main one."""
        scan, parts = self._scans[queue], [np.empty(0, np.int32)]
        missing, size = count, count
        while missing and self._ahead[queue]:
            ids = scan.next(size)
            uses = self._uses[ids] & np.uint8(_MOST_USES)
            stays = uses >= _USES_TO_STAY[queue]
            if self.moved >= SEARCH_LIMIT:  # a search has to end
                stays[:] = False
            leaves = np.flatnonzero(~stays)[:missing]
            if len(leaves) == missing and leaves[-1] + 1 < len(ids):
                end = int(leaves[-1]) + 1
                scan.back_to(int(ids[end]))
                ids, uses, stays = ids[:end], uses[:end], stays[:end]
            staying = ids[stays]
            self._uses[staying] = uses[stays] - np.uint8(1) if queue == _MAIN else 0
            self._order.move(staying, _MAIN)
            self.moved += len(staying)
            self._ahead[queue] -= len(ids)
            self._ahead[_MAIN] += len(staying)
            parts.append(ids[~stays])
            missing -= len(parts[-1])
            size = max(_AHEAD, 2 * size)
        return np.concatenate(parts)
