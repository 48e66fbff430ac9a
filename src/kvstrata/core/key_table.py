"""A map from keys to small numbers in a few arrays: no object per key, batches in one call."""

import os
import struct
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.free_ids import FreeIds
from kvstrata.core.key_rows import (
    Words,
    by_namespace,
    counted,
    distinct,
    leading,
    rows_equal,
    store_key_rows,
)
from kvstrata.core.keys import ABSENT, BlockIds, Index, KeyArray, as_index
from kvstrata.core.namespaces import Namespaces
from kvstrata.core.types import NAMESPACE_ID_BYTES, STORE_KEY_BYTES, NamespaceId, StoreKey

_MAX_CAPACITY: Final = 1 << 29  # ids and links are 32 bits wide
_PIECE: Final = 1 << 16  # ids looked at in one step of an iteration
_LONG_RUN: Final = 1024  # ids that go on by one; after a shorter run every key is looked up
_PROBE: Final = 256  # keys looked up first then, in case that the rest is absent
_RUN_PIECE: Final = 1024  # keys compared with such a run at first
_RUN_GROWTH: Final = 8  # so many times more each time after that
_WORDS: Final = struct.Struct("=4Q")
_MOST: Final = (1 << 64) - 1
_ROW: Final = np.dtype("V32")

_Links = NDArray[np.int64]  # indices into ``KeyTable._links``


class KeyTable:
    """Fixed-capacity map from (namespace, key) to an id ``0 .. capacity-1``. Not thread-safe.

    Keys are compared in full. Every operation takes time proportional to the keys it is given,
    whatever the table holds, and is at its best with many at once. Memory is what the operating
    system has to back: an unused part of the capacity costs address space, and the buckets.

    A hash table with chains: ``_links`` holds, for each id, the next one in its chain, and after
    those the first id of each bucket. A key's first word is kept with a random mask of its
    namespace in it, so that the four words of a row tell namespaces apart too, and nobody can
    choose keys that share a bucket.
    """

    def __init__(self, capacity: int) -> None:
        if not 0 <= capacity <= _MAX_CAPACITY:
            raise ValueError(f"a table of {capacity} keys; at most {_MAX_CAPACITY}")
        self.capacity = capacity
        bits = max(1, (2 * capacity).bit_length())  # chains of half an id at most
        self._links = np.full(capacity + (1 << bits), ABSENT, np.int32)
        self._words = np.zeros((max(1, capacity), 4), np.uint64)  # one row to look at, at least
        self._rows = self._words.view(_ROW).ravel()  # the same, moved faster
        self._numbers = np.full(capacity, ABSENT, np.int32)  # the namespace of each id in use
        self._free = FreeIds(capacity)
        self._shift = np.uint64(64 - bits)
        self._factor = np.frombuffer(os.urandom(8), np.uint64)[0] | np.uint64(1)
        self._spaces = Namespaces()

    def __len__(self) -> int:
        return self._free.used

    @property
    def nbytes(self) -> int:
        """Bytes of address space of all arrays."""
        arrays = (self._links, self._words, self._numbers)
        return sum(array.nbytes for array in arrays) + self._free.nbytes

    @property
    def namespaces(self) -> list[NamespaceId | None]:
        """Of each number its namespace; ``None`` for one that is not in use."""
        return list(self._spaces.names)

    @property
    def namespace_bound(self) -> int:
        """All numbers of namespaces are below it."""
        return len(self._spaces.names)

    def namespace_number(self, namespace: NamespaceId) -> int:
        """The number of *namespace*, ``ABSENT`` if nothing of it is in the table.

        Numbers are small, and given to another namespace once nothing of this one is left.
        """
        return self._spaces.number(namespace)

    def count(self, number: int) -> int:
        """How many keys the namespace of that *number* has."""
        return self._spaces.counts[number]

    def numbers(self, ids: BlockIds) -> NDArray[np.int32]:
        """The namespace's number of each id, ``ABSENT`` for ids that are not in use."""
        return self._numbers.take(ids)

    def retire(self, namespace: NamespaceId) -> int:
        """Find nothing of *namespace* any more, at once; its number, or ``ABSENT``.

        Its ids stay in use until they are removed. What is added under the same name from now on
        gets another number.
        """
        return self._spaces.retire(namespace)

    def find(self, namespace: NamespaceId, keys: KeyArray) -> BlockIds:
        """The id of each key, ``ABSENT`` where it is not in the table."""
        number = self.namespace_number(namespace)
        if number == ABSENT:
            return np.full(len(keys), ABSENT, np.int32)
        words = self._masked(number, keys)
        return self._look_up(words, self._first_links(words))

    def longest_prefix(self, namespace: NamespaceId, keys: KeyArray) -> BlockIds:
        """The ids of the leading *keys* that are all in the table."""
        number = self.namespace_number(namespace)
        if number == ABSENT:
            return np.empty(0, np.int32)
        pieces: list[BlockIds] = []
        start, probe = 0, 0
        while start < len(keys):
            if not probe:
                ids = self._run(number, keys[start:])
                pieces.append(ids)
                start += len(ids)
                if not len(ids):
                    break
                probe = 0 if len(ids) > _LONG_RUN else _PROBE
                continue
            words = self._masked(number, keys[start : start + probe])
            ids = self._look_up(words, self._first_links(words))
            found = leading(ids != ABSENT)
            pieces.append(ids[:found])
            start += found
            if found < len(ids):
                break
            probe = len(keys)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.empty(0, np.int32)])

    def add(self, namespace: NamespaceId, keys: KeyArray) -> BlockIds:
        """Take in *keys*, none of them in the table, all different; their ids.

        When there is no room for all, the leading ones are taken in. Of two equal keys none is:
        ``InvariantViolated``.
        """
        keys = keys[: self._free.free]
        if not len(keys):
            return np.empty(0, np.int32)
        number = self._spaces.intern(namespace)
        words = self._masked(number, keys)
        return self._insert(words, self._first_links(words), number)

    def find_or_add(
        self, namespace: NamespaceId, keys: KeyArray
    ) -> tuple[BlockIds, NDArray[np.bool_]]:
        """``find``, then ``add`` what is absent: the ids, and which of them are new.

        When there is no room for all that is absent, both are shorter than *keys*.
        """
        number = self._spaces.intern(namespace)
        words = self._masked(number, keys)
        links = self._first_links(words)
        ids = self._look_up(words, links)
        new = ids == ABSENT
        absent = new.nonzero()[0]
        if len(absent) > self._free.free:
            room = int(absent[self._free.free])
            ids, new, absent = ids[:room], new[:room], absent[: self._free.free]
        if len(absent) == len(keys):
            ids = self._insert(words, links, number)
        elif len(absent):
            ids[absent] = self._insert(words[absent], links[absent], number)
        self._spaces.settle(number)
        return ids, new

    def remove(self, ids: BlockIds) -> None:
        """Take *ids* out; ``InvariantViolated``, and no change, if one is unknown or twice there."""
        if not len(ids):
            return
        index = as_index(ids)
        numbers = self._mark(ids, index)
        at = self._first_links(self._words_of(ids))
        wanted = ids
        while len(wanted):
            here = self._links.take(at)
            if here.min() == ABSENT:
                raise InvariantViolated("a key is not in the chain of its bucket")
            gone = self._numbers.take(here) < 0  # of this call: also those that another row wants
            self._links[at[gone]] = self._links.take(here[gone])
            missing = (here != wanted).nonzero()[0]
            if len(missing):
                at = np.where(gone, at, here)[missing]
            wanted = wanted[missing]
        self._numbers[index] = ABSENT
        self._links[index] = ABSENT
        self._free.release(ids)
        for number, count in counted(numbers):
            self._spaces.add(number, -count)
            self._spaces.settle(number)

    def find_mixed(self, store_keys: Sequence[StoreKey] | NDArray[np.uint8]) -> BlockIds:
        """The id of each key with its namespace before it, ``ABSENT`` where it is not there."""
        rows = store_key_rows(store_keys)
        ids = np.full(len(rows), ABSENT, np.int32)
        for namespace, which in by_namespace(rows):
            keys = np.ascontiguousarray(rows[which, NAMESPACE_ID_BYTES:])
            ids[which] = self.find(namespace, keys)
        return ids

    def add_mixed(self, store_keys: Sequence[StoreKey] | NDArray[np.uint8]) -> BlockIds:
        """``add`` for keys with their namespaces before them."""
        rows = store_key_rows(store_keys)[: self._free.free]
        ids = np.full(len(rows), ABSENT, np.int32)
        try:
            for namespace, which in by_namespace(rows):
                keys = np.ascontiguousarray(rows[which, NAMESPACE_ID_BYTES:])
                ids[which] = self.add(namespace, keys)
        except InvariantViolated:
            self.remove(ids[ids != ABSENT])
            raise
        return ids

    def keys(self, ids: BlockIds) -> KeyArray:
        """The keys of *ids*, all in use."""
        numbers = self._numbers.take(ids)
        if len(ids) and numbers.min() < 0:
            raise InvariantViolated("the key of an id that is not in use is asked for")
        words = self._words_of(ids)
        different, which = distinct(numbers)
        masks = np.array([self._spaces.masks[number] for number in different], np.uint64)
        words[:, 0] ^= masks[which]
        return words.view(np.uint8)

    def store_key_array(self, ids: BlockIds) -> KeyArray:
        """The keys of *ids* with their namespaces before them, shape ``(n, STORE_KEY_BYTES)``."""
        rows = np.empty((len(ids), STORE_KEY_BYTES), np.uint8)
        rows[:, NAMESPACE_ID_BYTES:] = self.keys(ids)
        different, which = distinct(self._numbers.take(ids))
        names = b"".join(self._spaces.names[number] or b"" for number in different)
        heads = np.frombuffer(names, np.uint8).reshape(-1, NAMESPACE_ID_BYTES)
        rows[:, :NAMESPACE_ID_BYTES] = heads[which]
        return rows

    def store_keys(self, ids: BlockIds) -> list[StoreKey]:
        """The keys of *ids* with their namespaces before them."""
        joined = self.store_key_array(ids).tobytes()
        return [joined[i : i + STORE_KEY_BYTES] for i in range(0, len(joined), STORE_KEY_BYTES)]

    def ids(self, namespace: NamespaceId | None = None) -> Iterator[BlockIds]:
        """The ids of *namespace*, or all, ascending, in pieces of bounded length.

        Each piece is as of when it is asked for; the table may change in between.
        """
        number = ABSENT if namespace is None else self.namespace_number(namespace)
        if namespace is None or number != ABSENT:
            yield from self.ids_of_number(number)

    def ids_of_number(self, number: int) -> Iterator[BlockIds]:
        """``ids`` of the namespace of that *number*; of all for ``ABSENT``."""
        start = 0
        while start < self._free.fresh:
            piece = self.ids_in(start, start + _PIECE, number)
            start += _PIECE
            if len(piece):
                yield piece

    def ids_in(self, start: int, end: int, number: int) -> BlockIds:
        """The ids of that namespace from *start* up to *end*; of all for ``ABSENT``."""
        numbers = self._numbers[start:end]
        found = numbers >= 0 if number == ABSENT else numbers == number
        return (np.flatnonzero(found) + start).astype(np.int32)

    def check(self) -> None:
        """Raises ``InvariantViolated`` if chains, numbers, counts and free ids contradict."""
        self._free.check(self._numbers >= 0)
        used = np.flatnonzero(self._numbers >= 0)
        counts = self._spaces.counts
        if np.bincount(self._numbers[used], minlength=len(counts)).tolist() != counts:
            raise InvariantViolated("the keys of a namespace are counted wrongly")
        self._spaces.check()
        words = self._words_of(used)
        if (self._look_up(words, self._first_links(words)) != used).any():
            raise InvariantViolated("a key is not found, or twice in the table")
        if np.count_nonzero(self._links != ABSENT) != len(used):
            raise InvariantViolated("a chain holds an id that is not in use")

    def _masked(self, number: int, keys: KeyArray) -> Words:
        words = np.array(keys.view(np.uint64))  # a copy, and aligned
        words[:, 0] ^= self._spaces.masks[number]
        return words

    def _first_links(self, words: Words) -> _Links:
        """Of each key the link that leads to its bucket's first id."""
        mixed = (words[:, 0] ^ words[:, 3]) * self._factor
        links: _Links = (mixed >> self._shift).view(np.int64)
        links += self.capacity
        return links

    def _words_of(self, ids: NDArray[np.integer]) -> Words:
        return self._rows.take(ids).view(np.uint64).reshape(-1, 4)

    def _look_up(self, words: Words, links: _Links) -> BlockIds:
        ids = self._links.take(links)
        if ids.min(initial=0) >= 0:
            pending = (~self._holds(ids, words)).nonzero()[0]
        else:
            there = (ids != ABSENT).nonzero()[0]
            right = self._holds(ids.take(there), words.take(there, axis=0))
            pending = there[~right]
        while len(pending):
            here = self._links.take(ids.take(pending))
            ids[pending] = here
            wrong = ~self._holds(here, words.take(pending, axis=0)) & (here != ABSENT)
            pending = pending[wrong]
        return ids

    def _find_one(self, number: int, key: NDArray[np.uint8]) -> int:
        """``find`` of a single key: an array of one would take ten times as long."""
        words = _WORDS.unpack(key.tobytes())
        first, last = words[0] ^ int(self._spaces.masks[number]), words[3]
        wanted = _WORDS.pack(first, *words[1:])
        bucket = ((first ^ last) * int(self._factor) & _MOST) >> int(self._shift)
        block = self._links.item(self.capacity + bucket)
        while block != ABSENT and self._words[block].tobytes() != wanted:
            block = self._links.item(block)
        return block

    def _holds(self, ids: BlockIds, words: Words) -> NDArray[np.bool_]:
        """Whether each id's row has these words; without meaning where an id is ``ABSENT``."""
        return rows_equal(self._words_of(ids), words)

    def _run(self, number: int, keys: KeyArray) -> BlockIds:
        """The id of the first of *keys*, and those that follow by one each, as far as they go."""
        start, done, piece = self._find_one(number, keys[0]), 0, _RUN_PIECE
        if start == ABSENT:
            return np.empty(0, np.int32)
        end = min(len(keys), self.capacity - start)
        while done < end:
            count = min(end - done, piece)
            some = slice(start + done, start + done + count)
            words = self._masked(number, keys[done : done + count])
            same = self._numbers[some].tobytes() == np.int32(number).tobytes() * count
            if not same or self._words[some].tobytes() != words.tobytes():
                equal = rows_equal(self._words[some], words)
                equal &= self._numbers[some] == number
                done += leading(equal)
                break
            done += count
            piece *= _RUN_GROWTH
        return np.arange(start, start + done, dtype=np.int32)

    def _insert(self, words: Words, links: _Links, number: int) -> BlockIds:
        ids = self._free.take(len(words))
        self._store(ids, words, number)
        twice = False
        waiting, at = ids.astype(np.intp), links
        while len(waiting):
            self._links[waiting] = self._links.take(at)
            self._links[at] = waiting
            first = self._links.take(at)  # of several for one bucket, one got in
            lost = (first != waiting).nonzero()[0]
            waiting, at, first = waiting[lost], at[lost], first[lost]
            # Equal keys share a bucket, so each meets the other here.
            twice |= bool(len(lost) and self._holds(first, self._words_of(waiting)).any())
        if twice:
            self.remove(ids)
            raise InvariantViolated("a key is added twice")
        return ids

    def _store(self, ids: BlockIds, words: Words, number: int) -> None:
        index = as_index(ids)
        self._numbers[index] = number
        self._spaces.add(number, len(ids))
        if isinstance(index, slice):
            self._words[index] = words
        else:
            np.put(self._rows, index, words.view(_ROW).ravel())

    def _mark(self, ids: BlockIds, index: Index) -> NDArray[np.int32]:
        """Mark *ids* as not in use, unless there is something wrong; their namespaces' numbers."""
        if ids.min() < 0 or ids.max() >= self.capacity:
            raise InvariantViolated("a key is removed by an id that cannot be")
        numbers = self._numbers.take(ids)
        if numbers.min() < 0:
            raise InvariantViolated("a key is removed that is not in the table")
        if isinstance(index, slice):
            self._numbers[index] = -2
            return numbers
        marks = np.arange(-2, -2 - len(ids), -1, dtype=np.int32)
        self._numbers[index] = marks
        if (self._numbers.take(index) != marks).any():
            self._numbers[index] = numbers
            raise InvariantViolated("a key is removed twice in one call")
        return numbers
