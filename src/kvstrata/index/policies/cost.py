"""Cost-aware: what is cheap to compute again and unlikely to be asked for goes first."""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.keys import BlockIds
from kvstrata.index.order import Order
from kvstrata.index.policies.base import MayLeave, search

Costs = Callable[[BlockIds], NDArray[np.floating]]

_LEVELS: Final = 64  # queues, in a ring
_AVERAGE_STEPS: Final = 16  # levels that a block of average value is above the worst
_MOST_USES: Final = 255
_LIKELIHOOD: Final[NDArray[np.float64]] = 1.0 + np.log2(1.0 + np.arange(_MOST_USES + 1))  # by uses
_MEMORY: Final = 1e-5  # share of one block in the average value


class PrefillCost:
    """What it takes to compute a block again, in units of a first block's.

    Attention makes a block dearer the more blocks are before it: twice as dear after
    *doubling_blocks*. Depths are read from the index when costs are asked for.
    """

    def __init__(self, depth: NDArray[np.int32], doubling_blocks: int) -> None:
        self._depth = depth
        self._doubling_blocks = doubling_blocks

    def __call__(self, ids: BlockIds) -> NDArray[np.float64]:
        return 1.0 + self._depth[ids] / self._doubling_blocks


class CostAware:
    """An ``EvictionPolicy`` of the GreedyDual family.

    A block's value is the fourth root of its cost, times one more than the logarithm of how often it
    was used; blocks of one tier are of one size. It ranks as high as its value above the block that
    left last, so that every block comes down with time, the dear ones later. A rank is a time to
    wait, and the chance of being asked for falls with it: what is worth twice as much is to wait
    longer, and by far not twice as long. bench/policies.py compares. A block ranks no lower than those that continue from it and
    were used with it. Ranks are quantised: blocks of one rank leave in the order of their use.

    13 bytes for each id at most, and 32 KiB for each of the ranks.
    """

    def __init__(self, capacity_ids: int, costs: Costs) -> None:
        self._order = Order(capacity_ids, queues=_LEVELS)
        self._uses = np.zeros(capacity_ids, np.uint8)
        self._costs = costs
        self._lowest = 0  # the level that blocks leave from
        self._average = 0.0  # value

    def __len__(self) -> int:
        return len(self._order)

    @property
    def nbytes(self) -> int:
        return self._order.nbytes + self._uses.nbytes

    def admit(self, ids: BlockIds) -> None:
        self._uses[ids] = 0
        self._place(ids)

    def touch(self, ids: BlockIds) -> None:
        inside = self._order.contains(ids)
        ids = ids if inside.all() else ids[inside]
        uses = self._uses[ids]
        self._uses[ids] = uses + (uses < _MOST_USES)
        self._place(ids)

    def remove(self, ids: BlockIds) -> None:
        self._order.remove(ids)

    def victims(self, count: int, may_leave: MayLeave) -> BlockIds:
        if not len(self):
            return np.empty(0, np.int32)
        while not self._order.length(self._lowest):
            self._lowest = (self._lowest + 1) % _LEVELS
        climb = _Climb(self._order, self._lowest)
        refused: list[BlockIds] = []
        victims = search(len(self), count, may_leave, climb.following, refused.append)
        for ids in refused:  # after the search, which so meets each block once
            self._order.spread(ids, self._levels(self._values(ids)))
        return victims

    def check(self) -> None:
        self._order.check()

    def _place(self, ids: BlockIds) -> None:
        """Rank *ids*, used together in prompt order."""
        if not len(ids):
            return
        values = self._values(ids)[::-1]
        share = min(1.0, _MEMORY * len(ids)) if self._average else 1.0
        self._average += share * (float(values.mean()) - self._average)
        self._order.spread(ids[::-1], self._levels(np.maximum.accumulate(values)))

    def _values(self, ids: BlockIds) -> NDArray[np.floating]:
        values: NDArray[np.floating] = np.sqrt(np.sqrt(self._costs(ids)))
        return values * _LIKELIHOOD[self._uses[ids]]

    def _levels(self, values: NDArray[np.floating]) -> NDArray[np.uint8]:
        steps = np.clip(values * (_AVERAGE_STEPS / self._average), 1, _LEVELS - 1)
        return ((self._lowest + steps.astype(np.int64)) % _LEVELS).astype(np.uint8)


class _Climb:
    """One search from the lowest level up."""

    def __init__(self, order: Order, lowest: int) -> None:
        self._order = order
        self._levels = [(lowest + step) % _LEVELS for step in range(_LEVELS)]
        self._scan = order.scan(lowest)

    def following(self, count: int) -> BlockIds:
        parts = [np.empty(0, np.int32)]
        missing = count
        while missing:
            parts.append(self._scan.next(missing))
            missing -= len(parts[-1])
            if missing and len(self._levels) == 1:
                break
            if missing:
                self._levels.pop(0)
                self._scan = self._order.scan(self._levels[0])
        return np.concatenate(parts)
