"""Segments of records, linked to queues: which exist, and how many valid records each has."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import InvariantViolated

SEGMENT_BITS: Final = 12
SEGMENT_SIZE: Final = 1 << SEGMENT_BITS  # records
NONE: Final = 0  # no segment; the first is never used, so that no record is at position 0
_FREE: Final = -1  # owner of a segment that is in no queue
_FEW: Final = 4  # segments that are looked at one by one


class Segments:
    """Bookkeeping for ``Order``: links, fill levels and counts, never the records themselves.

    What has become empty, and what may fit into one segment with a neighbour, is remembered
    until it is asked for.
    """

    def __init__(self, count: int, queues: int) -> None:
        self._live_array = np.zeros(count, np.int32)  # valid records
        self._next_array = np.zeros(count, np.int32)  # the neighbour that is younger
        self._prev_array = np.zeros(count, np.int32)
        self._owner_array = np.full(count, _FREE, np.int32)  # queue
        self._lengths_array = np.zeros(queues, np.int64)  # valid records, by queue
        # The same memory; Python reads and writes single numbers three times as fast there.
        self.live = self._live_array.data
        self.next = self._next_array.data
        self.prev = self._prev_array.data
        self.lengths = self._lengths_array.data
        self._owner = self._owner_array.data
        self.start = [0] * count  # before it no record is valid
        self.fill = [0] * count
        self.head = [NONE] * queues
        self.tail = [NONE] * queues
        self._free = list(range(count - 1, 0, -1))
        self._noted = [False] * count  # whether it is in the following list
        self._sparse: list[int] = []
        self._empty: list[int] = []

    @property
    def in_use(self) -> int:
        return len(self.fill) - 1 - len(self._free)

    def owners(self, places: NDArray[np.int32]) -> NDArray[np.int32]:
        """The queue of each place."""
        owners: NDArray[np.int32] = self._owner_array.take(places >> SEGMENT_BITS)
        return owners

    def reserve(self, count: int, queue: int) -> list[slice]:
        """Places for so many new records at the young end, counted as valid, in pieces."""
        self.lengths[queue] += count
        pieces = []
        while count:
            segment = self.tail[queue]
            if segment == NONE or self.fill[segment] == SEGMENT_SIZE:
                segment = self._open(queue)
            fill = self.fill[segment]
            fits = min(count, SEGMENT_SIZE - fill)
            first = (segment << SEGMENT_BITS) + fill
            pieces.append(slice(first, first + fits))
            self.fill[segment] += fits
            self.live[segment] += fits
            count -= fits
        return pieces

    def leave(self, places: NDArray[np.int32]) -> None:
        """The records at *places* are not valid any more; ``NONE`` among them is passed over."""
        if len(places) == 1:
            segment = int(places[0]) >> SEGMENT_BITS
            if segment != NONE:
                self.live[segment] -= 1
                self.lengths[self._owner[segment]] -= 1
                self._note(segment)
            return
        counts = np.bincount(places >> SEGMENT_BITS, minlength=1)
        counts[NONE] = 0
        segments = counts.nonzero()[0]
        lost = counts.take(segments)
        self._live_array[segments] -= lost.astype(np.int32)
        owners = self._owner_array.take(segments)
        by_queue = np.bincount(owners, weights=lost, minlength=len(self.tail))
        self._lengths_array -= by_queue.astype(np.int64)
        if len(segments) > _FEW:
            segments = segments[self._worth_noting(segments)]
        for segment in segments.tolist():
            self._note(segment)

    def shrink(self, segment: int, records: int) -> None:
        """*segment* holds nothing but so many valid records, from its start."""
        self.start[segment] = 0
        self.fill[segment] = self.live[segment] = records

    def drop(self, segment: int) -> None:
        """Free a segment whose records are all stale."""
        older, younger = self.prev[segment], self.next[segment]
        self._link(older, younger, self._owner[segment])
        self.live[segment] = 0
        self._owner[segment] = _FREE
        self._free.append(segment)
        if older != NONE:
            self._note(older)

    def drop_empty(self) -> None:
        for segment in self._empty:
            if not self.live[segment] and self._owner[segment] != _FREE:
                self.drop(segment)
        self._empty.clear()

    def next_pair(self) -> tuple[int, int] | None:
        """Two neighbours whose valid records fit into one segment, neither of them a young end."""
        while self._sparse:
            segment = self._sparse.pop()
            self._noted[segment] = False
            younger = self.next[segment]
            queue = self._owner[segment]
            if queue == _FREE or younger == NONE or younger == self.tail[queue]:
                continue
            if self.live[segment] + self.live[younger] <= SEGMENT_SIZE:
                return segment, younger
        return None

    def _note(self, segment: int) -> None:
        """*segment* has fewer valid records now."""
        live = self.live[segment]
        if not live:
            self._empty.append(segment)
        older, younger = self.prev[segment], self.next[segment]
        if younger != NONE and live + self.live[younger] <= SEGMENT_SIZE:
            self._note_sparse(segment)
        if older != NONE and live + self.live[older] <= SEGMENT_SIZE:
            self._note_sparse(older)

    def _note_sparse(self, segment: int) -> None:
        if not self._noted[segment]:
            self._noted[segment] = True
            self._sparse.append(segment)

    def _worth_noting(self, segments: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which of *segments* ``_note`` would do something about, or may."""
        live = self._live_array
        own = live.take(segments)
        fewer = np.minimum(
            live.take(self._next_array.take(segments)), live.take(self._prev_array.take(segments))
        )
        worth: NDArray[np.bool_] = own + fewer <= SEGMENT_SIZE
        return worth

    def _open(self, queue: int) -> int:
        """A new young end for the queue."""
        if not self._free:
            raise InvariantViolated("queues have more segments than they can need")
        last = self.tail[queue]
        segment = self._free.pop()
        self.live[segment] = self.start[segment] = self.fill[segment] = 0
        self._owner[segment] = queue
        self._link(last, segment, queue)
        self._link(segment, NONE, queue)
        if last != NONE:
            self._note(last)
        return segment

    def _link(self, older: int, younger: int, queue: int) -> None:
        """Make two segments neighbours; no segment on one side makes the other an end."""
        if older == NONE:
            self.head[queue] = younger
        else:
            self.next[older] = younger
        if younger == NONE:
            self.tail[queue] = older
        else:
            self.prev[younger] = older
