"""The most hits that any cache of a size could have on a trace: Belady's MIN, with bypass.

It knows the future: when there are more blocks than room it gives up the one that is needed last,
the newcomer too. All blocks are of one size, so no cache whatsoever that holds at most so many
blocks between two requests, and gets blocks only from requests, has more hits on the trace. It
ignores that a block is of use only with all before it: the bound is a little higher than what can
be reached.
"""

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstrata.replay.reuse import NEVER, Reuse
from kvstrata.replay.spool import Spool

__all__ = ["Optimum", "find_optimum"]

_SPARE_ENTRIES = 1024  # of the heaps, before dead ones are swept


class Optimum(NamedTuple):
    """What MIN reaches with some room: no cache has more hits. ``savings`` bounds the seconds."""

    capacity_blocks: int
    hit_blocks: int
    saved_seconds: float  # prefill of the blocks that hit


class _Kept:
    """The blocks in the cache, as runs of consecutive needs: most of a prompt is needed together."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._blocks = 0
        self._lengths: dict[int, int] = {}  # of the run that begins at this need
        self._nearest: list[int] = []  # heaps of those needs, with some that are gone
        self._farthest: list[int] = []

    def take(self, end: int) -> list[tuple[int, int]]:
        """Remove the blocks needed before the need *end*; (need, blocks) of each run."""
        taken = []
        while self._nearest and self._nearest[0] < end:
            need = heapq.heappop(self._nearest)
            length = self._lengths.pop(need, 0)
            if need + length > end:  # the next request goes on where this one ends
                self._insert(end, need + length - end)
                length = end - need
            if length:
                taken.append((need, length))
                self._blocks -= length
        return taken

    def add(self, needs: NDArray[np.int64]) -> None:
        """Keep what is needed at *needs*, in ascending order of blocks of one prompt."""
        lasts = np.flatnonzero(needs[1:] - needs[:-1] != 1).tolist()  # of each run but the last
        begin = 0
        for last in [*lasts, len(needs) - 1]:
            self._insert(int(needs[begin]), last + 1 - begin)
            begin = last + 1
        self._blocks += len(needs)
        self._shrink()
        if len(self._farthest) > _SPARE_ENTRIES + 2 * len(self._lengths):
            self._farthest = [-need for need in self._lengths]
            heapq.heapify(self._farthest)
        if len(self._nearest) > _SPARE_ENTRIES + 2 * len(self._lengths):
            self._nearest = list(self._lengths)
            heapq.heapify(self._nearest)

    def _insert(self, need: int, length: int) -> None:
        self._lengths[need] = length
        heapq.heappush(self._nearest, need)
        heapq.heappush(self._farthest, -need)

    def _shrink(self) -> None:
        while self._blocks > self._capacity_blocks:
            need = -self._farthest[0]
            length = self._lengths.get(need, 0)
            excess = self._blocks - self._capacity_blocks
            if length > excess:
                self._lengths[need] = length - excess
                self._blocks -= excess
                return
            heapq.heappop(self._farthest)
            self._lengths.pop(need, None)
            self._blocks -= length


def find_optimum(
    spool: Spool,
    reuse: Reuse,
    capacity_blocks: int,
    seconds: Callable[[int, int], float],
    on_event: Callable[[int], None] | None = None,
) -> Optimum:
    """Replay *spool* with MIN; *seconds* is what blocks *first* to *end* of a prompt take to compute.

    *on_event* is told how many events are done, now and then.
    """
    kept = _Kept(capacity_blocks)
    hit_blocks, saved_seconds = 0, 0.0
    start = 0
    next_needs = reuse.open()
    try:
        for number, (request, _) in enumerate(spool, start=1):
            count = len(request.blocks)
            for need, length in kept.take(start + count):
                first = request.first_block + need - start
                hit_blocks += length
                saved_seconds += seconds(first, first + length)
            needs = next_needs.take(count)
            needs = needs[needs != NEVER]
            if len(needs):
                kept.add(needs)
            start += count
            if on_event is not None and number % 1024 == 0:
                on_event(number)
    finally:
        next_needs.close()
    return Optimum(capacity_blocks, hit_blocks, saved_seconds)
