"""Queues of block ids that stay cheap for millions: what eviction policies are made of."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.keys import BlockIds, as_index
from kvstrata.index.segments import NONE, SEGMENT_BITS, SEGMENT_SIZE, Segments

_SPARE: Final = 40  # segments beyond what blocks and queues need: for what is moved in one go
_AT_ONCE: Final = 16 * SEGMENT_SIZE  # ids that are moved in one go
_PEEK: Final = 64  # records that a scan looks at first
_NOTHING: Final = np.empty(0, np.int32)


class Order:
    """First-in first-out queues over ids ``0 .. capacity-1``; an id is in one of them or in none.

    Moving ids to the young end of a queue appends records of them; the records they had go stale.
    Records lie in segments of one array, and each id knows the place of its only valid record.
    A segment without valid records is free again, and two neighbours whose valid records fit into
    one become one, a bounded number in a call: there are never more than about two records for
    each id, and no call takes time that grows with what the queues hold.
    """

    def __init__(self, capacity: int, queues: int = 1) -> None:
        segments = 1 + 2 * (-(-capacity // SEGMENT_SIZE)) + 2 * queues + _SPARE
        self._places = np.zeros(capacity, np.int32)  # of an id's valid record
        self._records = np.empty(segments << SEGMENT_BITS, np.int32)
        self._segments = Segments(segments, queues)
        self._queues = queues

    @property
    def nbytes(self) -> int:
        """Bytes of address space."""
        return self._places.nbytes + self._records.nbytes

    @property
    def segments_in_use(self) -> int:
        return self._segments.in_use

    def __len__(self) -> int:
        return sum(self._segments.lengths)

    def length(self, queue: int) -> int:
        return self._segments.lengths[queue]

    def contains(self, ids: BlockIds) -> NDArray[np.bool_]:
        inside: NDArray[np.bool_] = self._places.take(ids) != NONE
        return inside

    def queue_of(self, ids: BlockIds) -> NDArray[np.int32]:
        """The queue of each id; without meaning for those in none."""
        return self._segments.owners(self._places.take(ids))

    def append(self, ids: BlockIds, queue: int = 0) -> None:
        """Put *ids* at the young end, the last one youngest, wherever they were before."""
        for start in range(0, len(ids), _AT_ONCE):
            some = ids[start : start + _AT_ONCE]
            self.move(some, queue)
            self.tidy(len(some))

    def spread(self, ids: BlockIds, queues: NDArray[np.uint8]) -> None:
        """``append`` each id to a queue of its own."""
        for start in range(0, len(ids), _AT_ONCE):
            some = ids[start : start + _AT_ONCE]
            self._move_spread(some, queues[start : start + _AT_ONCE])
            self.tidy(len(some))

    def remove(self, ids: BlockIds) -> None:
        """Take *ids* out of their queues; those in none are passed over."""
        if not len(ids):
            return
        places = self._places.take(ids)
        index = as_index(ids)
        if not isinstance(index, slice):  # an id may be there twice: its record goes only once
            marks = np.arange(-len(ids), 0, dtype=np.int32)
            self._places[index] = marks
            places = places[self._places.take(index) == marks]
        self._places[index] = NONE
        self._segments.leave(places)
        self.tidy(len(ids))

    def scan(self, queue: int = 0) -> "Scan":
        """From the oldest id of the queue on; ids may only be moved while it is used."""
        return Scan(self._segments, self._places, self._records, queue)

    def move(self, ids: BlockIds, queue: int = 0) -> None:
        """``append`` while a scan goes on; call ``tidy`` when it has ended."""
        if len(ids):
            self._write(ids, self._segments.reserve(len(ids), queue))

    def tidy(self, moved: int) -> None:
        """Free empty segments, and join sparse ones, in proportion to *moved* ids."""
        self._segments.drop_empty()
        for _ in range(1 + 2 * moved // SEGMENT_SIZE):
            pair = self._segments.next_pair()
            if pair is None:
                break
            self._join(*pair)

    def ids(self, queue: int = 0) -> BlockIds:
        """All of a queue, oldest first."""
        scan = self.scan(queue)
        return scan.next(self.length(queue))

    def check(self) -> None:
        """Raises ``InvariantViolated`` if records, counts and links contradict each other."""
        seen = np.zeros(len(self._places), np.bool_)
        held = 0
        for queue in range(self._queues):
            parts = [_NOTHING]
            segment, last = self._segments.head[queue], NONE
            while segment != NONE:
                parts.append(self._checked(segment, last))
                segment, last = self._segments.next[segment], segment
            ids = np.concatenate(parts)
            if len(ids) != self.length(queue) or seen[ids].any():
                raise InvariantViolated("a queue has lost or doubled an id")
            if self._segments.tail[queue] != last:
                raise InvariantViolated("a queue does not end where it should")
            seen[ids] = True
            held += len(parts) - 1
        if not (seen == (self._places != NONE)).all():
            raise InvariantViolated("an id has a record in no queue")
        if held != self._segments.in_use:
            raise InvariantViolated("a segment is lost")

    def _checked(self, segment: int, older: int) -> BlockIds:
        segments, base = self._segments, segment << SEGMENT_BITS
        start, fill = base + segments.start[segment], base + segments.fill[segment]
        ids, _ = valid_records(self._records, self._places, start, fill)
        if len(ids) != segments.live[segment] or segments.prev[segment] != older:
            raise InvariantViolated("a segment counts its records wrongly or is misplaced")
        if len(valid_records(self._records, self._places, base, start)[0]):
            raise InvariantViolated("a segment starts after a valid record")
        return ids

    def _move_spread(self, ids: BlockIds, queues: NDArray[np.uint8]) -> None:
        counts = np.bincount(queues, minlength=self._queues).tolist()
        pieces = []
        for queue, count in enumerate(counts):
            pieces += self._segments.reserve(count, queue) if count else []
        if max(counts) < len(ids):
            ids = ids[np.argsort(queues, kind="stable")]
        self._write(ids, pieces)

    def _write(self, ids: BlockIds, pieces: list[slice]) -> None:
        """Write new records of *ids* at reserved places."""
        before = self._places.take(ids)
        parts = [np.arange(piece.start, piece.stop, dtype=np.int32) for piece in pieces]
        places = parts[0] if len(parts) == 1 else np.concatenate(parts)
        done = 0
        for piece, part in zip(pieces, parts, strict=True):
            self._records[piece] = ids[done : done + len(part)]
            done += len(part)
        index = as_index(ids)
        self._places[index] = places
        if not isinstance(index, slice):
            kept = self._places.take(index) == places
            if not kept.all():  # an id twice: the record that was written last is the valid one
                self._segments.leave(places[~kept])
                before = before[kept]
        self._segments.leave(before)

    def _join(self, segment: int, younger: int) -> None:
        """Bring the records of *younger* into *segment*, its neighbour."""
        parts = []
        for one in (segment, younger):
            base = one << SEGMENT_BITS
            start, fill = base + self._segments.start[one], base + self._segments.fill[one]
            parts.append(valid_records(self._records, self._places, start, fill)[0])
        ids = np.concatenate(parts)
        base = segment << SEGMENT_BITS
        self._records[base : base + len(ids)] = ids
        self._places[ids.astype(np.intp)] = np.arange(base, base + len(ids), dtype=np.int32)
        self._segments.shrink(segment, len(ids))
        self._segments.drop(younger)


def valid_records(
    records: BlockIds, places: NDArray[np.int32], start: int, end: int
) -> tuple[BlockIds, NDArray[np.intp]]:
    """The ids of the valid records from place *start* to *end*, and how far after *start* each is."""
    ids = records[start:end]
    fresh = (places.take(ids) == np.arange(start, end)).nonzero()[0]
    return ids.take(fresh), fresh


class Scan:
    """Goes along a queue from its oldest id."""

    def __init__(
        self, segments: Segments, places: NDArray[np.int32], records: BlockIds, queue: int
    ) -> None:
        self._segments = segments
        self._places = places
        self._records = records
        self._queue = queue
        self._segment = NONE
        self._offset = 0

    def next(self, count: int) -> BlockIds:
        """The next ids, at most *count*; none when the young end is reached."""
        parts: list[BlockIds] = []
        missing, look = count, _PEEK
        while missing > 0 and self._enter():
            ids = self._read(missing, max(missing, look))
            parts.append(ids)
            missing -= len(ids)
            look *= 4
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [_NOTHING])

    def back_to(self, block: int) -> None:
        """Go on with *block*, which was among the last ids and was not moved since."""
        place = int(self._places[block])
        self._segment, self._offset = place >> SEGMENT_BITS, place & (SEGMENT_SIZE - 1)

    def _enter(self) -> bool:
        """Be in a segment with records ahead; False at the young end."""
        segments = self._segments
        while self._segment == NONE or self._offset == segments.fill[self._segment]:
            if self._segment == NONE:
                following = segments.head[self._queue]
            else:
                following = segments.next[self._segment]
            if following == NONE:
                return False
            self._segment = following
            self._offset = segments.start[following]
        return True

    def _read(self, count: int, records: int) -> BlockIds:
        """At most *count* valid ids of the next *records*."""
        segments, segment, first = self._segments, self._segment, self._offset
        end = min(first + records, segments.fill[segment])
        base = segment << SEGMENT_BITS
        ids, offsets = valid_records(self._records, self._places, base + first, base + end)
        if first == segments.start[segment]:
            segments.start[segment] = first + int(offsets[0]) if len(offsets) else end
        self._offset = first + int(offsets[count]) if len(ids) > count else end
        return ids[:count]
