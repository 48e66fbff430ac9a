"""Queues of block ids that stay cheap for millions: what eviction policies are made of."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.keys import BlockIds

_BITS: Final = 12
_SIZE: Final = 1 << _BITS  # records a segment
_NONE: Final = 0  # no segment; the first is never used, so that no record is at position 0
_SPARE: Final = 40  # segments beyond what blocks and queues need: for what a search moves
_FEW: Final = 64  # ids, up to which changes of segments are counted one by one
_PEEK: Final = 64  # records that a scan looks at first
_NOTHING: Final = np.empty(0, np.int32)


class Order:
    """First-in first-out queues over ids ``0 .. capacity-1``; an id is in one of them or in none.

    Moving ids to the young end of a queue appends records of them; the records they had go stale.
    Records lie in segments of one array, and each id knows the position of its only valid record.
    A segment without valid records is free again, and two neighbours whose valid records fit into
    one become one, a bounded number in a call: there are never more than about two records for
    each id, and no call takes time that grows with what the queues hold.
    """

    def __init__(self, capacity: int, queues: int = 1) -> None:
        segments = 1 + 2 * (-(-capacity // _SIZE)) + 2 * queues + _SPARE
        self._stamps = np.zeros(capacity, np.int32)  # position of an id's valid record
        self._records = np.empty(segments * _SIZE, np.int32)
        self._live = np.zeros(segments, np.int32)  # valid records of each segment
        self.start = np.zeros(segments, np.int32)  # before it no record is valid
        self.fill = np.zeros(segments, np.int32)
        self.next = np.zeros(segments, np.int32)  # the next younger segment of the queue
        self._prev = np.zeros(segments, np.int32)
        self._owner = np.zeros(segments, np.int32)  # queue
        self._free = list(range(segments - 1, 0, -1))
        self.head = [_NONE] * queues
        self._tail = [_NONE] * queues
        self._lengths = np.zeros(queues, np.int64)
        self._noted = np.zeros(segments, np.bool_)  # whether it is in the following list
        self._sparse: list[int] = []  # segments that may fit into one with the next
        self._empty: list[int] = []

    @property
    def nbytes(self) -> int:
        return self._stamps.nbytes + self._records.nbytes

    @property
    def segments(self) -> int:
        """How many segments are in use."""
        return len(self._live) - 1 - len(self._free)

    def __len__(self) -> int:
        return int(self._lengths.sum())

    def length(self, queue: int) -> int:
        return int(self._lengths[queue])

    def contains(self, ids: BlockIds) -> NDArray[np.bool_]:
        inside: NDArray[np.bool_] = self._stamps[ids] != _NONE
        return inside

    def queue_of(self, ids: BlockIds) -> NDArray[np.int32]:
        """The queue of each id; without meaning for those in none."""
        queues: NDArray[np.int32] = self._owner[self._stamps[ids] >> _BITS]
        return queues

    def append(self, ids: BlockIds, queue: int = 0) -> None:
        """Put *ids* at the young end, the last one youngest, wherever they were before."""
        self.move(ids, queue)
        self.tidy(len(ids))

    def spread(self, ids: BlockIds, queues: NDArray[np.uint8]) -> None:
        """``append`` each id to a queue of its own."""
        self.move_spread(ids, queues)
        self.tidy(len(ids))

    def remove(self, ids: BlockIds) -> None:
        """Take *ids* out of their queues; those in none are passed over."""
        places = self._stamps[ids]
        marks = np.arange(-len(ids), 0, dtype=np.int32)
        self._stamps[ids] = marks
        once = self._stamps[ids] == marks  # an id twice: its record is given up only once
        self._stamps[ids] = _NONE
        self._leave(places if once.all() else places[once])
        self.tidy(len(ids))

    def scan(self, queue: int = 0) -> "Scan":
        """From the oldest id of the queue on; ids may only be moved while it is used."""
        return Scan(self, queue)

    def move(self, ids: BlockIds, queue: int = 0) -> None:
        """``append`` while a scan goes on; call ``tidy`` when it has ended."""
        if len(ids):
            self._write(ids, self._reserve(len(ids), queue))

    def move_spread(self, ids: BlockIds, queues: NDArray[np.uint8]) -> None:
        """``spread`` while a scan goes on; call ``tidy`` when it has ended."""
        counts = np.bincount(queues, minlength=len(self.head))
        used = np.flatnonzero(counts)
        if len(used) <= 1:
            self.move(ids, int(used[0]) if len(used) else 0)
            return
        places = [self._reserve(int(counts[queue]), int(queue)) for queue in used]
        self._write(ids[np.argsort(queues, kind="stable")], np.concatenate(places))

    def tidy(self, moved: int) -> None:
        """Free empty segments, and join sparse ones, in proportion to *moved* ids."""
        if self._empty:
            for segment in self._empty:
                if not self._live[segment] and self._owner[segment] >= 0:
                    self._drop(segment)
            self._empty.clear()
        budget = 1 + 2 * moved // _SIZE
        while self._sparse and budget:
            segment = self._sparse.pop()
            self._noted[segment] = False
            budget -= self._join(segment)

    def check(self) -> None:
        """Raises ``InvariantViolated`` if records, counts and links contradict each other."""
        seen = np.zeros(len(self._stamps), np.bool_)
        held = 0
        for queue in range(len(self.head)):
            ids, segments = self._walk(queue)
            if len(ids) != self._lengths[queue] or seen[ids].any():
                raise InvariantViolated("a queue has lost or doubled an id")
            seen[ids] = True
            held += segments
        if not (seen == (self._stamps != _NONE)).all():
            raise InvariantViolated("an id has a record in no queue")
        if held + len(self._free) != len(self._live) - 1:
            raise InvariantViolated("a segment is lost")

    def ids(self, queue: int = 0) -> BlockIds:
        """All of a queue, oldest first."""
        return self._walk(queue)[0]

    def _walk(self, queue: int) -> tuple[BlockIds, int]:
        parts = [np.empty(0, np.int32)]
        segment, last = self.head[queue], _NONE
        while segment != _NONE:
            valid = self._all_valid(segment)
            if len(valid) != self._live[segment] or self._prev[segment] != last:
                raise InvariantViolated("a segment counts its records wrongly or is misplaced")
            if len(self.valid(segment, 0, int(self.start[segment]))[0]):
                raise InvariantViolated("a segment starts after a valid record")
            parts.append(valid)
            segment, last = int(self.next[segment]), segment
        if self._tail[queue] != last:
            raise InvariantViolated("a queue does not end where it should")
        return np.concatenate(parts), len(parts) - 1

    def place(self, block: int) -> int:
        """The position of an id's record."""
        return int(self._stamps[block])

    def valid(self, segment: int, start: int, end: int) -> tuple[BlockIds, NDArray[np.intp]]:
        """The ids of the valid records between two offsets in *segment*, and their offsets."""
        base = segment << _BITS
        ids = self._records[base + start : base + end]
        fresh = np.flatnonzero(self._stamps.take(ids) == np.arange(base + start, base + end))
        return ids.take(fresh), fresh + start

    def _all_valid(self, segment: int) -> BlockIds:
        return self.valid(segment, int(self.start[segment]), int(self.fill[segment]))[0]

    def _write(self, ids: BlockIds, places: NDArray[np.int32]) -> None:
        """Write new records of *ids* at reserved *places*."""
        before = self._stamps[ids]
        self._records[places] = ids
        self._stamps[ids] = places
        kept = self._stamps[ids] == places
        if not kept.all():  # an id twice: the record that was written last is the valid one
            self._leave(places[~kept])
            before = before[kept]
        self._leave(before)

    def _reserve(self, count: int, queue: int) -> NDArray[np.int32]:
        """Positions for so many new records, counted as valid."""
        self._lengths[queue] += count
        parts = []
        while count:
            segment = self._tail[queue]
            if segment == _NONE or self.fill[segment] == _SIZE:
                segment = self._open(queue)
            fill = int(self.fill[segment])
            fits = min(count, _SIZE - fill)
            first = (segment << _BITS) + fill
            parts.append(np.arange(first, first + fits, dtype=np.int32))
            self.fill[segment] += fits
            self._live[segment] += fits
            count -= fits
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _leave(self, places: NDArray[np.int32]) -> None:
        """The records at *places* are not valid any more."""
        segments = places >> _BITS
        if segments.min(initial=1) == _NONE:
            segments = segments[segments != _NONE]
        if not len(segments):
            return
        if len(segments) == 1:
            segment = int(segments[0])
            self._live[segment] -= 1
            self._lengths[self._owner[segment]] -= 1
        elif len(segments) <= _FEW:
            np.subtract.at(self._live, segments, 1)
            np.subtract.at(self._lengths, self._owner[segments], 1)
        else:
            counts = np.bincount(segments, minlength=len(self._live))
            segments = np.flatnonzero(counts)
            self._live[segments] -= counts[segments]
            np.subtract.at(self._lengths, self._owner[segments], counts[segments])
        self._note(segments)

    def _note(self, segments: NDArray[np.integer]) -> None:
        """Remember which of *segments*, that have fewer valid records now, are to be tidied."""
        live = self._live[segments]
        if not live.all():
            self._empty += segments[live == 0].tolist()
        younger, older = self.next[segments], self._prev[segments]
        with_younger = (live + self._live[younger] <= _SIZE) & (younger != _NONE)
        with_older = (live + self._live[older] <= _SIZE) & (older != _NONE)
        if with_younger.any() or with_older.any():
            sparse = np.concatenate((segments[with_younger], older[with_older]))
            sparse = sparse[~self._noted[sparse]]
            self._noted[sparse] = True
            self._sparse += sparse.tolist()

    def _open(self, queue: int) -> int:
        """A new young end for the queue."""
        if not self._free:
            raise InvariantViolated("queues have more segments than they can need")
        last = self._tail[queue]
        segment = self._free.pop()
        self._live[segment] = self.start[segment] = self.fill[segment] = 0
        self._owner[segment] = queue
        self._prev[segment] = self.next[segment] = _NONE
        self._link(last, segment, queue)
        self._tail[queue] = segment
        if last != _NONE:
            self._note(np.array([last]))
        return segment

    def _link(self, older: int, younger: int, queue: int) -> None:
        """Make two segments neighbours; no segment on one side makes the other an end."""
        if older == _NONE:
            self.head[queue] = younger
        else:
            self.next[older] = younger
        if younger == _NONE:
            self._tail[queue] = older
        else:
            self._prev[younger] = older

    def _drop(self, segment: int) -> None:
        """Free a segment without valid records."""
        older = int(self._prev[segment])
        self._link(older, int(self.next[segment]), int(self._owner[segment]))
        self._owner[segment] = -1
        self._free.append(segment)
        if older != _NONE:
            self._note(np.array([older]))

    def _join(self, segment: int) -> bool:
        """Bring the next segment's records into *segment* if they fit; whether they did."""
        younger = int(self.next[segment])
        if self._owner[segment] < 0 or younger == _NONE:
            return False
        if younger == self._tail[self._owner[segment]]:
            return False
        if self._live[segment] + self._live[younger] > _SIZE:
            return False
        ids = np.concatenate([self._all_valid(s) for s in (segment, younger)])
        base = segment << _BITS
        self._records[base : base + len(ids)] = ids
        self._stamps[ids] = np.arange(base, base + len(ids), dtype=np.int32)
        self.start[segment] = 0
        self.fill[segment] = self._live[segment] = len(ids)
        self._live[younger] = 0
        self._drop(younger)
        return True


class Scan:
    """Goes along a queue from its oldest id."""

    def __init__(self, order: Order, queue: int) -> None:
        self._order = order
        self._queue = queue
        self._segment = _NONE
        self._offset = 0

    def next(self, count: int) -> BlockIds:
        """The next ids, at most *count*; none when the young end is reached."""
        parts: list[BlockIds] = []
        missing, look = count, _PEEK
        while missing and self._enter():
            ids = self._read(missing, max(missing, look))
            parts.append(ids)
            missing -= len(ids)
            look *= 4
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [_NOTHING])

    def back_to(self, block: int) -> None:
        """Go on with *block*, which was among the last ids and was not moved since."""
        place = self._order.place(block)
        self._segment, self._offset = place >> _BITS, place & (_SIZE - 1)

    def _enter(self) -> bool:
        """Be in a segment with records ahead; False at the young end."""
        order = self._order
        while self._segment == _NONE or self._offset == order.fill[self._segment]:
            following = (
                order.head[self._queue]
                if self._segment == _NONE
                else int(order.next[self._segment])
            )
            if following == _NONE:
                return False
            self._segment = following
            self._offset = int(order.start[following])
        return True

    def _read(self, count: int, records: int) -> BlockIds:
        """At most *count* valid ids of the next *records*."""
        order, segment, first = self._order, self._segment, self._offset
        end = min(first + records, int(order.fill[segment]))
        ids, offsets = order.valid(segment, first, end)
        if first == order.start[segment]:
            order.start[segment] = offsets[0] if len(offsets) else end
        self._offset = int(offsets[count]) if len(ids) > count else end
        return ids[:count]
