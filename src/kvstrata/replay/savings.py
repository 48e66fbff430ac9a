"""The most prefill seconds that any cache of a size could save on a trace: an upper bound.

MIN has the most hits, and may have others than those that save most. What saves most would be found
by choosing, of the times between two uses of a block, which to keep it for, never more at once than
there is room. The bound comes from a price: whoever keeps a block for a while pays for the room, in
seconds for each block of traffic that goes by. Then no cache has more than what its dearest choices
leave after paying, and the price of all the room there is. That is so at every price; the least over
all prices is taken. (It is the dual of the linear program, with one price for the whole trace.)
"""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstrata.replay.reuse import NEVER, Reuse
from kvstrata.replay.spool import Spool

__all__ = ["most_saved_seconds"]

_USES_A_PIECE: Final = 1 << 18
_BINS_AN_OCTAVE: Final = 32
_LEAST_OCTAVE: Final = -80  # seconds for one block kept during one block of traffic, log 2
_OCTAVES: Final = 120


def most_saved_seconds(
    spool: Spool, reuse: Reuse, capacity_blocks: int, seconds: Callable[[int, int], float]
) -> float:
    """No cache of *capacity_blocks* saves more; *seconds* is what blocks first to end take to compute.

    Memory grows with the requests, by 12 bytes each, not with their blocks.
    """
    starts, firsts = spool.starts()
    by_depth = _SecondsByDepth(seconds)
    saved = np.zeros(_OCTAVES * _BINS_AN_OCTAVE)  # seconds, by what a price would be just paid for
    kept = np.zeros(len(saved))  # blocks times blocks of traffic
    next_needs = reuse.open()
    try:
        for begin in range(0, spool.blocks, _USES_A_PIECE):
            needs = next_needs.take(min(_USES_A_PIECE, spool.blocks - begin))
            uses = begin + np.flatnonzero(needs != NEVER)
            needs = needs[needs != NEVER]
            used_in = np.searchsorted(starts, uses, "right") - 1
            needed_in = np.searchsorted(starts, needs, "right") - 1
            gains = by_depth.of(firsts[needed_in] + needs - starts[needed_in])
            spans = (starts[needed_in] - starts[used_in]).astype(np.float64)
            bins = _bins(gains / spans)
            saved += np.bincount(bins, gains, len(saved))
            kept += np.bincount(bins, spans, len(kept))
    finally:
        next_needs.close()
    return _least(saved, kept, float(capacity_blocks) * spool.blocks)


def _least(saved: NDArray[np.float64], kept: NDArray[np.float64], room: float) -> float:
    """The bound at the best price. What lies in a bin is worth at least its lower edge as price."""
    gains = np.cumsum(saved[::-1])[::-1]
    spans = np.cumsum(kept[::-1])[::-1]
    prices = 2.0 ** (_LEAST_OCTAVE + np.arange(len(saved)) / _BINS_AN_OCTAVE)
    bounds = gains - prices * spans + prices * room
    return float(min(gains[0], bounds[1:].min()))  # the first bin has all that is worth less


def _bins(values: NDArray[np.float64]) -> NDArray[np.int64]:
    octaves = np.log2(np.maximum(values, 2.0**_LEAST_OCTAVE)) - _LEAST_OCTAVE
    bins: NDArray[np.int64] = (octaves * _BINS_AN_OCTAVE).astype(np.int64)
    return bins.clip(max=_OCTAVES * _BINS_AN_OCTAVE - 1)


class _SecondsByDepth:
    """What one block takes to compute, by the blocks before it."""

    def __init__(self, seconds: Callable[[int, int], float]) -> None:
        self._seconds = seconds
        self._known: NDArray[np.float64] = np.empty(0)

    def of(self, depths: NDArray[np.int64]) -> NDArray[np.float64]:
        deepest = int(depths.max(initial=-1))
        if deepest >= len(self._known):
            more = range(len(self._known), max(deepest + 1, 2 * len(self._known)))
            self._known = np.append(self._known, [self._seconds(d, d + 1) for d in more])
        found: NDArray[np.float64] = self._known[depths]
        return found
