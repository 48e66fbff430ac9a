"""A memory of blocks that have left, by fingerprint, in a bounded table."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

_WAYS: Final = 8
_TAG_SHIFT: Final = np.uint64(32)
_LOW_HALF: Final = np.uint64(0xFFFF_FFFF)

Prints = NDArray[np.uint64]
Flags = NDArray[np.bool_]


class Ghosts:
    """The last *capacity* fingerprints that were added, without those taken since.

    A table with buckets of eight, two thirds full: when a bucket overflows, its oldest is
    forgotten early, which befalls a few in a hundred. Each place has 32 bits of a fingerprint
    and when it was added, counted in additions. Twelve bytes for each of *capacity*.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        buckets = 3 * capacity // (2 * _WAYS) + 1
        self._buckets = np.uint64(buckets)
        self._tags = np.zeros((buckets, _WAYS), np.uint32)
        self._added = np.zeros((buckets, _WAYS), np.uint32)
        self._clock = capacity + 1  # so that an empty place is one that was added too long ago

    @property
    def nbytes(self) -> int:
        return self._tags.nbytes + self._added.nbytes

    def add(self, prints: Prints) -> None:
        """Remember *prints*, the last one longest."""
        if not self.capacity or not len(prints):
            return
        rows, tags = self._locate(prints)
        times = np.arange(self._clock, self._clock + len(prints)).astype(np.uint32)
        self._clock += len(prints)
        while len(rows):
            oldest = self._ages(rows).argmax(axis=1)
            self._tags[rows, oldest] = tags
            self._added[rows, oldest] = times
            lost = self._added[rows, oldest] != times  # to another one for the same place
            rows, tags, times = rows[lost], tags[lost], times[lost]

    def take(self, prints: Prints) -> Flags:
        """Which of *prints* are remembered; those are forgotten by that."""
        if not self.capacity or not len(prints):
            return np.zeros(len(prints), np.bool_)
        rows, tags = self._locate(prints)
        same = (self._tags[rows] == tags[:, None]) & (self._ages(rows) <= self.capacity)
        which, way = np.nonzero(same)
        self._added[rows[which], way] = np.uint32((self._clock - self.capacity - 1) & 0xFFFF_FFFF)
        found = np.zeros(len(prints), np.bool_)
        found[which] = True
        return found

    def _locate(self, prints: Prints) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        rows = ((prints & _LOW_HALF) * self._buckets >> _TAG_SHIFT).astype(np.int64)
        return rows, (prints >> _TAG_SHIFT).astype(np.uint32)

    def _ages(self, rows: NDArray[np.int64]) -> NDArray[np.uint32]:
        """How many were added since, and itself."""
        now = np.uint32(self._clock & 0xFFFF_FFFF)
        ages: NDArray[np.uint32] = now - self._added[rows]
        return ages
