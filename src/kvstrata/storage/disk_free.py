"""The free slots of a disk store, handed out in runs so that a batch is one piece on disk."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import InvariantViolated


class FreeSlots:
    """Which slots are free, as runs of neighbours. Not thread-safe.

    Every call is O(runs touched). Runs are kept by the bit length of their number of slots, the
    one that was freed last first.
    """

    def __init__(self, slots: int, used: Sequence[int] | NDArray[np.integer]) -> None:
        """*used* are the slots that are taken, in any order, each once."""
        self._ends: dict[int, int] = {}  # first slot of a run: the slot after it
        self._starts: dict[int, int] = {}  # the slot after a run: its first slot
        self._sizes: list[dict[int, None]] = [{} for _ in range(slots.bit_length() + 1)]
        taken = np.sort(np.asarray(used, np.int64))
        starts = np.concatenate(([0], taken + 1))
        ends = np.concatenate((taken, [slots]))
        is_run = starts < ends
        for start, end in zip(
            starts[is_run][::-1].tolist(), ends[is_run][::-1].tolist(), strict=True
        ):
            self._add(start, end)
        self.free = slots - len(taken)

    def take(self, count: int) -> list[int]:
        """*count* slots, or all there are: from one run if one is long enough, else from few."""
        taken: list[int] = []
        while len(taken) < count and self.free:
            start, end = self._run(count - len(taken))
            self._drop(start, end)
            used_end = min(end, start + count - len(taken))
            if used_end < end:
                self._add(used_end, end)
            taken += range(start, used_end)
            self.free -= used_end - start
        return taken

    def give(self, slots: Sequence[int]) -> None:
        """*slots* are free again; raises ``InvariantViolated`` if one is twice there.

        So it does if a neighbouring run of free slots has one.
        """
        if not len(slots):
            return
        given = np.sort(np.asarray(slots, np.int64))
        steps = np.diff(given)
        if (steps == 0).any():
            raise InvariantViolated("a slot is freed twice in one call")
        breaks = np.flatnonzero(steps != 1) + 1
        starts, ends = given[[0, *breaks]], given[[*(breaks - 1), -1]] + 1
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            self._give_run(start, end)
        self.free += len(given)

    def _give_run(self, start: int, end: int) -> None:
        if start in self._ends or end in self._starts:
            raise InvariantViolated(f"slot {start} is freed but was free")
        first, last = self._starts.get(start, start), self._ends.get(end, end)
        if first < start:
            self._drop(first, start)
        if end < last:
            self._drop(end, last)
        self._add(first, last)

    def _run(self, count: int) -> tuple[int, int]:
        """A run of at least *count* slots, preferably small; the longest class if there is none."""
        sizes = self._sizes
        certain = (count - 1).bit_length() + 1  # every run of this bit length is long enough
        order = [*range(certain, len(sizes)), *range(min(certain, len(sizes)) - 1, 0, -1)]
        for bits in order:
            if sizes[bits]:
                start = next(reversed(sizes[bits]))
                return start, self._ends[start]
        raise InvariantViolated(f"{self.free} slots are free, but there is no run")

    def _add(self, start: int, end: int) -> None:
        self._ends[start], self._starts[end] = end, start
        self._sizes[(end - start).bit_length()][start] = None

    def _drop(self, start: int, end: int) -> None:
        del self._ends[start], self._starts[end]
        del self._sizes[(end - start).bit_length()][start]
