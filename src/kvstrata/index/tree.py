"""The hash-linked prefix tree: which blocks exist, where, and who depends on them."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.key_rows import distinct
from kvstrata.core.key_table import KeyTable
from kvstrata.core.keys import ABSENT, BlockIds, Index, KeyArray, as_index
from kvstrata.core.types import NamespaceId, StoreKey
from kvstrata.index.census import Census, NamespaceCounts
from kvstrata.index.family import Family
from kvstrata.index.places import ARRIVING, LOCAL, NO_SLOT, REMOTE, WRITING

_REAP_PIECE: Final = 1 << 16  # ids looked at in one step of a search for retired blocks
_REAP_PIECES: Final = 8  # such steps in one call

Flags = NDArray[np.bool_]


class Watcher(Protocol):
    """Hears what changes, while it changes."""

    def moved(self, ids: BlockIds, before: NDArray[np.uint8], after: NDArray[np.uint8]) -> None:
        """``where`` of *ids* was *before* and is *after*."""
        ...

    def retired(self, namespace: NamespaceId) -> None: ...


class PrefixIndex:
    """Every block that is in some tier, by id ``0 .. capacity-1``. Not thread-safe.

    A block's key already names everything before it (chained hash), so a match looks up the keys
    of a prompt and needs no token. The links exist for eviction: a block that others continue
    from does not leave its last tier before they do.

    What is known of a block are the columns, arrays by id. ``where`` is changed by ``set_where``
    and ``clear_where`` alone, ``host_slot`` by the owner of the index, the others by the index.
    A block that is nowhere (``where`` is 0) but has children or leases stays known: a look-up
    finds it, inserting its key gives its id, and ``settle`` removes it when the last of them goes.

    Every operation takes time proportional to the blocks it is given, not to those it holds.
    """

    def __init__(self, capacity: int) -> None:
        self._table = KeyTable(capacity)
        self.parent = np.zeros(capacity, np.int32)  # id, ABSENT for a first block
        self.children = np.zeros(capacity, np.int32)  # how many blocks continue from it
        self.depth = np.zeros(capacity, np.int32)  # blocks before it in its prompt, if known
        self.leases = np.zeros(capacity, np.int32)
        self.host_slot = np.zeros(capacity, np.int32)
        self.where = np.zeros(capacity, np.uint8)  # bits of ``places``
        self._family = Family(self.parent, self.children)
        self._census = Census()
        self._retired: set[int] = set()  # numbers of namespaces
        self._retired_flags = np.zeros(0, np.bool_)  # the same by number, and one for ABSENT
        self._cursor = 0  # of ``reap``
        self.watcher: Watcher | None = None

    def __len__(self) -> int:
        return len(self._table)

    @property
    def capacity(self) -> int:
        return self._table.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of address space of all arrays."""
        columns = (self.parent, self.children, self.depth, self.leases, self.host_slot, self.where)
        return self._table.nbytes + self._family.nbytes + sum(column.nbytes for column in columns)

    @property
    def namespaces(self) -> list[NamespaceId]:
        """Those with entries that can be found."""
        names = enumerate(self._table.namespaces)
        return [name for number, name in names if name is not None and number not in self._retired]

    @property
    def retired_blocks(self) -> int:
        """Entries of retired namespaces, which ``reap`` has still to remove."""
        return sum(self._table.count(number) for number in self._retired)

    def counts(self, namespace: NamespaceId) -> NamespaceCounts:
        """How many blocks *namespace* has, and where."""
        number = self._table.namespace_number(namespace)
        return NamespaceCounts(0, 0, 0, 0) if number == ABSENT else self._census.of(number)

    def find(self, namespace: NamespaceId, keys: KeyArray) -> BlockIds:
        """The id of each key, ``ABSENT`` where it is not known."""
        return self._table.find(namespace, keys)

    def longest_prefix(self, namespace: NamespaceId, keys: KeyArray) -> BlockIds:
        """The ids of the leading *keys* that are all known."""
        return self._table.longest_prefix(namespace, keys)

    def insert(self, namespace: NamespaceId, keys: KeyArray, parent: int = ABSENT) -> BlockIds:
        """The ids of *keys*, which follow each other in a prompt, after the block *parent*.

        What is absent is made, nowhere yet, and hung under the block before it. When the index
        is full there are ids for the leading keys only. *parent* is a block of *namespace* that
        is known, or was before the namespace was retired and then counts as absent; anything
        else, and a key that is there twice, is ``InvariantViolated`` without a change.
        """
        parent = self._parent_in(namespace, parent)
        ids, new = self._table.find_or_add(namespace, keys)
        if new.any():
            base = 0 if parent == ABSENT else int(self.depth[parent]) + 1
            above = np.empty(len(ids), np.int32)
            above[0] = parent
            above[1:] = ids[:-1]
            depth = np.arange(base, base + len(ids), dtype=np.int32)
            made = ids
            if not new.all():
                made, above, depth = ids[new], above[new], depth[new]
            index = as_index(made)
            self._begin(index)
            self._family.hang(index, above)
            self.depth[index] = depth
        return ids

    def insert_stored(
        self, store_keys: NDArray[np.uint8], parents: NDArray[np.uint8], has_parent: Flags
    ) -> BlockIds:
        """Make entries for many blocks of any prompts, nowhere yet; the leading part when full.

        Row ``i`` of *parents* is the key before key ``i``, if *has_parent*. A parent counts if it
        is in the index or comes before its children. None of *store_keys* may be in the index,
        or be there twice.
        """
        ids = self._table.add_mixed(store_keys)
        with_parent = np.flatnonzero(has_parent[: len(ids)])
        above = np.full(len(ids), ABSENT, np.int32)
        above[with_parent] = self._table.find_mixed(parents[with_parent])
        known = np.flatnonzero(above != ABSENT)
        other = self._table.numbers(above[known]) != self._table.numbers(ids[known])
        above[known[other]] = ABSENT
        self._begin(as_index(ids))
        self._family.hang_stored(ids, above, self.depth)
        return ids

    def lease(self, ids: BlockIds) -> None:
        """Keep *ids*, all different, where they are."""
        self.leases[as_index(ids)] += 1

    def unlease(self, ids: BlockIds) -> None:
        """Give back a lease on each of *ids*, all different."""
        index = as_index(ids)
        if len(ids) and self.leases[index].min() < 1:
            raise InvariantViolated("a lease is returned that was not taken")
        self.leases[index] -= 1

    def set_where(self, ids: BlockIds, places: int) -> None:
        """*ids*, all different, are in these places too."""
        before = self.where.take(ids)
        after = before | np.uint8(places)
        self.where[as_index(ids)] = after
        self._census.count(self._table.numbers(ids), before, after, places)
        if self.watcher is not None:
            self.watcher.moved(ids, before, after)

    def clear_where(self, ids: BlockIds, places: int) -> None:
        """*ids*, all different, are not in these places; ``settle`` those that may be nowhere."""
        before = self.where.take(ids)
        after = before & np.uint8(~places & 0xFF)
        self.where[as_index(ids)] = after
        self._census.count(self._table.numbers(ids), before, after, places)
        if self.watcher is not None:
            self.watcher.moved(ids, before, after)

    def settle(self, ids: BlockIds) -> None:
        """Remove those of *ids* that are nowhere, unleased and childless, and parents that become so.

        Being believed in the remote tier does not count as being somewhere.
        """
        ids = ids[self._nowhere(ids)]
        if len(ids) and self._table.numbers(ids).min() < 0:
            raise InvariantViolated("a block is settled that the index does not know")
        retired = self._which_retired(ids)
        if retired is not None:
            self._remove(np.unique(ids[retired]))
            ids = ids[~retired]
        while len(ids):
            gone, above = self._family.vanish(ids)
            self._remove(gone)
            ids = above[self._nowhere(above)]
            if len(ids):
                over = [self._family.only_children_above(b, self._is_nowhere) for b in ids.tolist()]
                ids = np.concatenate((ids, np.fromiter(chain(*over), np.int32)))

    def may_leave(self, ids: BlockIds, tier: int) -> Flags:
        """Which of *ids* may be evicted from a tier, each when those before it that may have left.

        That needs a block without lease, and without children unless it is in another tier too
        (host memory or disk).
        """
        where = self.where.take(ids)
        unleased: Flags = self.leases.take(ids) == 0
        last = (where & np.uint8(LOCAL & ~tier)) == 0
        retired = self._which_retired(ids)
        if retired is not None:
            last &= ~retired
        if last.any():
            vanishes = unleased & ((where & np.uint8(~(tier | REMOTE) & 0xFF)) == 0)
            if retired is None:
                emptied = self._family.emptied(ids, vanishes)
            else:  # has no part in the tree: what was above may be another block by now
                emptied, living = retired.copy(), ~retired
                emptied[living] = self._family.emptied(ids[living], vanishes[living])
            unleased &= ~last | emptied
        return unleased

    def retire(self, namespace: NamespaceId) -> None:
        """Find nothing of *namespace* any more, at once; what is inserted again begins afresh.

        The entries stay where they are until ``reap`` removes them. They have no part in the tree.
        """
        number = self._table.retire(namespace)
        if number != ABSENT:
            self._retired.add(number)
            self._flag_retired()
            self._cursor = 0
        if self.watcher is not None:
            self.watcher.retired(namespace)

    @property
    def reap_calls(self) -> int:
        """Calls of ``reap`` after which every block was looked at."""
        return self.capacity // (_REAP_PIECE * _REAP_PIECES) + 1

    def reap(self, max_blocks: int, leave: Callable[[BlockIds], None]) -> int:
        """Remove some entries of retired namespaces, after *leave* was called with their ids.

        How many: at most *max_blocks*, and at most what a bounded search finds. Ask again as long
        as there are ``retired_blocks``. Leased blocks, and those that are being written or read, are
        left for later.
        """
        missing = max_blocks
        for _ in range(_REAP_PIECES):
            if not self._retired or missing <= 0:
                break
            end = min(self._cursor + _REAP_PIECE, self.capacity)
            ids = self._reapable(self._cursor, end)
            self._cursor = int(ids[missing]) if len(ids) > missing else end % self.capacity
            leave(ids[:missing])
            self._remove(ids[:missing])
            missing -= len(ids[:missing])
        return max_blocks - missing

    def store_keys(self, ids: BlockIds) -> list[StoreKey]:
        """The keys of *ids* with their namespaces before them."""
        return self._table.store_keys(ids)

    def parent_keys(self, ids: BlockIds) -> list[StoreKey | None]:
        """Of each id the store key of its parent, ``None`` for first blocks."""
        above = self.parent[ids]
        retired = self._which_retired(ids)
        if retired is not None:
            above[retired] = ABSENT
        known = above != ABSENT
        keys = iter(self._table.store_keys(above[known]))
        return [next(keys) if has_parent else None for has_parent in known.tolist()]

    def keys(self, ids: BlockIds) -> KeyArray:
        """The keys of *ids*."""
        return self._table.keys(ids)

    def by_namespace(self, ids: BlockIds) -> list[tuple[NamespaceId, BlockIds]]:
        """Those of *ids* that can be found, by namespace, each in the order given."""
        numbers, names = self._table.numbers(ids), self._table.namespaces
        found = []
        for number in distinct(numbers)[0]:
            name = None if number == ABSENT or number in self._retired else names[number]
            if name is not None:
                found.append((name, ids[numbers == number]))
        return found

    def fingerprints(self, ids: BlockIds) -> NDArray[np.uint64]:
        """64 bits of each key, for those who know blocks after their ids have been given away."""
        return self._table.keys(ids).view(np.uint64)[:, 1]

    def ids(self, namespace: NamespaceId | None = None) -> Iterator[BlockIds]:
        """The ids of *namespace*, or all that can be found, in pieces of bounded length.

        Each piece is as of when it is asked for; the index may change in between.
        """
        for piece in self._table.ids(namespace):
            retired = self._which_retired(piece)
            found = piece if retired is None else piece[~retired]
            if len(found):
                yield found

    def check(self) -> None:
        """Raises ``InvariantViolated`` if links, counts or places contradict each other."""
        self._table.check()
        pieces = [np.empty(0, np.int32), *self._table.ids()]
        ids = np.concatenate(pieces)
        if (self.leases[ids] < 0).any():
            raise InvariantViolated("a block has fewer leases than none")
        numbers = self._table.numbers(ids)
        self._census.check(numbers, self.where[ids])
        if any(not self._table.count(number) for number in self._retired):
            raise InvariantViolated("a namespace is retired that has no blocks")
        retired = self._which_retired(ids)
        if retired is not None:
            ids, numbers = ids[~retired], numbers[~retired]
        self._family.check(ids, numbers)

    def _parent_in(self, namespace: NamespaceId, parent: int) -> int:
        if parent == ABSENT:
            return ABSENT
        number = int(self._table.numbers(np.array([parent]))[0])
        if number in self._retired:
            return ABSENT
        if number == ABSENT or number != self._table.namespace_number(namespace):
            raise InvariantViolated("a block is hung under one that its namespace does not have")
        return parent

    def _begin(self, index: Index) -> None:
        if self._retired and self._table.namespace_bound >= len(self._retired_flags):
            self._flag_retired()
        self.leases[index] = 0
        self.host_slot[index] = NO_SLOT
        self.where[index] = 0

    def _nowhere(self, ids: BlockIds) -> Flags:
        nowhere: Flags = (self.where.take(ids) & np.uint8(~REMOTE & 0xFF)) == 0
        nowhere &= self.leases.take(ids) == 0
        return nowhere

    def _is_nowhere(self, block: int) -> bool:
        return not self.leases[block] and not int(self.where[block]) & ~REMOTE

    def all_ids(self) -> Iterator[BlockIds]:
        """``ids``, and those of retired namespaces."""
        return self._table.ids()

    def is_retired(self, ids: BlockIds) -> Flags:
        """Which of *ids* are of a namespace that was retired."""
        retired = self._which_retired(ids)
        return np.zeros(len(ids), np.bool_) if retired is None else retired

    def are_of(self, ids: BlockIds, namespace: NamespaceId) -> Flags:
        """Which of *ids* can be found in *namespace*."""
        number = self._table.namespace_number(namespace)
        if number == ABSENT:  # as is that of ids that are not in use
            return np.zeros(len(ids), np.bool_)
        theirs: Flags = self._table.numbers(ids) == number
        return theirs

    def _which_retired(self, ids: BlockIds) -> Flags | None:
        """Which of *ids* are of a retired namespace; ``None`` if there is no such namespace."""
        if not self._retired:
            return None
        retired: Flags = self._retired_flags[self._table.numbers(ids)]
        return retired

    def _reapable(self, start: int, end: int) -> BlockIds:
        alone = next(iter(self._retired)) if len(self._retired) == 1 else ABSENT
        ids = self._table.ids_in(start, end, alone)
        if alone == ABSENT:
            ids = ids[self._retired_flags[self._table.numbers(ids)]]
        busy = (self.where.take(ids) & np.uint8(ARRIVING | WRITING)) != 0
        idle: BlockIds = ids[~busy & (self.leases.take(ids) == 0)]
        return idle

    def _remove(self, ids: BlockIds) -> None:
        if not len(ids):
            return
        numbers, where = self._table.numbers(ids), self.where.take(ids)
        self._table.remove(ids)
        self._census.count(numbers, where, np.zeros_like(where), LOCAL)
        if self._retired:
            left = {number for number in self._retired if self._table.count(number)}
            if left != self._retired:
                self._retired = left
                self._flag_retired()

    def _flag_retired(self) -> None:
        self._retired_flags = np.zeros(2 * self._table.namespace_bound + 1, np.bool_)
        self._retired_flags[list(self._retired)] = True
