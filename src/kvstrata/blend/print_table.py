"""A map from fingerprints to places in what they were taken of, in a few arrays."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstrata.blend.fingerprints import Prints
from kvstrata.core.errors import InvariantViolated
from kvstrata.core.free_ids import FreeIds

Ids = NDArray[np.int32]
"""Numbers of entries, from 1 on."""

_NOTHING: Final = 0  # the end of a chain
_BITS_OF_MARK: Final = 3  # that choose one of the eight bits of a mark


class PrintTable:
    """Entries of a fingerprint, an owner and a place. Not thread-safe.

    Several entries may have the same fingerprint. Every operation takes time proportional to what
    it is given, whatever the table holds.

    A hash table with chains, half as many entries as buckets at most. Almost all that is looked up
    is not there, and is sorted out by one byte a bucket: it has a bit for every entry of its chain.
    """

    def __init__(self, capacity: int) -> None:
        bits = max(1, (2 * capacity).bit_length())
        self._shift = np.uint64(64 - bits - _BITS_OF_MARK)
        self._heads = np.zeros(1 << bits, np.int32)
        self._marks = np.zeros(1 << bits, np.uint8)
        self._next = np.zeros(capacity + 1, np.int32)
        self._prints = np.zeros(capacity + 1, np.uint64)
        self._owners = np.zeros(capacity + 1, np.int64)
        self._places = np.zeros(capacity + 1, np.int32)
        self._free = FreeIds(capacity)

    def __len__(self) -> int:
        return self._free.used

    @property
    def nbytes(self) -> int:
        """Bytes of address space; memory is what was written to, and the buckets."""
        arrays = (self._heads, self._marks, self._next, self._prints, self._owners, self._places)
        return sum(array.nbytes for array in arrays) + self._free.nbytes

    def holders(self, ids: Ids) -> tuple[list[int], list[int]]:
        """The owner and the place of each entry."""
        return self._owners.take(ids).tolist(), self._places.take(ids).tolist()

    def holder(self, entry: int) -> tuple[int, int]:
        """The owner and the place of one entry."""
        return self._owners.item(entry), self._places.item(entry)

    def owned(self, ids: Ids, owner: int) -> Ids:
        """Those of *ids* that are of *owner* (still, if they were once)."""
        mine: Ids = ids[self._owners.take(ids) == owner]
        return mine

    def add(self, prints: Prints, owner: int, places: NDArray[np.integer]) -> Ids:
        """Take in one entry for each fingerprint; ``InvariantViolated`` when there is no room."""
        if len(prints) > self._free.free:
            raise InvariantViolated("a table of fingerprints is too small")
        ids = self._free.take(len(prints)) + np.int32(1)
        self._prints[ids] = prints
        self._owners[ids] = owner
        self._places[ids] = places
        self._link(ids)
        return ids

    def find(self, prints: Prints) -> tuple[NDArray[np.intp], Ids]:
        """Which of *prints*, ascending, are there, and one entry of each."""
        marks = prints >> self._shift
        bits = marks.astype(np.uint8)
        bits &= 7
        marks >>= np.uint64(_BITS_OF_MARK)
        buckets = marks.view(np.intp)
        marked = self._marks.take(buckets)
        marked >>= bits
        marked &= 1
        rows = marked.view(np.bool_).nonzero()[0]
        wanted = prints.take(rows)
        ids = self._heads.take(buckets.take(rows))
        pending = self._different(ids, wanted)
        while len(pending):
            ids[pending] = here = self._next.take(ids.take(pending))
            pending = pending[self._different(here, wanted.take(pending))]
        found = ids.nonzero()[0]
        return rows.take(found), ids.take(found)

    def find_all(self, prints: Prints) -> Ids:
        """All entries of *prints*, in no order."""
        ids = self._heads.take(self._buckets(prints))
        found: list[Ids] = [np.empty(0, np.int32)]
        while len(there := ids.nonzero()[0]):
            ids, prints = ids.take(there), prints.take(there)
            found.append(ids[self._prints.take(ids) == prints])
            ids = self._next.take(ids)
        return np.concatenate(found)

    def remove(self, ids: Ids) -> None:
        """Take out the entries *ids*, all of them there and different."""
        buckets = np.unique(self._buckets(self._prints.take(ids)))
        members = [self._heads.take(buckets)]
        while members[-1].any():
            members.append(self._next.take(members[-1]))
        self._heads[buckets] = _NOTHING
        self._marks[buckets] = 0
        self._owners[ids] = -1
        chained = np.concatenate(members)
        chained = chained[chained != _NOTHING]
        self._link(chained[self._owners.take(chained) >= 0])
        self._free.release(ids - np.int32(1))

    def _buckets(self, prints: Prints) -> NDArray[np.intp]:
        return (prints >> (self._shift + np.uint64(_BITS_OF_MARK))).view(np.intp)

    def _different(self, ids: Ids, wanted: Prints) -> NDArray[np.intp]:
        """Which of *ids* are entries of another fingerprint than the one wanted."""
        different: NDArray[np.bool_] = self._prints.take(ids) != wanted
        different &= ids != _NOTHING
        return different.nonzero()[0]

    def _link(self, ids: Ids) -> None:
        prints = self._prints.take(ids)
        buckets = self._buckets(prints)
        bits = (prints >> self._shift).astype(np.uint8) & np.uint8(7)
        np.bitwise_or.at(self._marks, buckets, np.left_shift(np.uint8(1), bits))
        while len(ids):
            self._next[ids] = self._heads.take(buckets)
            self._heads[buckets] = ids
            lost = (self._heads.take(buckets) != ids).nonzero()[0]  # to another of the same bucket
            ids, buckets = ids.take(lost), buckets.take(lost)
