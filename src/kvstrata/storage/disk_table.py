"""The map from keys to slots that a disk store has in memory."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.key_table import KeyTable
from kvstrata.core.keys import ABSENT, BlockIds
from kvstrata.core.types import NAMESPACE_ID_BYTES, STORE_KEY_BYTES, NamespaceId, StoreKey
from kvstrata.storage.journal import HAS_PARENT, PUT, RECORD, Entry, Records

__all__ = ["BlockTable", "StoredArrays", "latest"]

KeyRows = NDArray[np.uint8]
"""Store keys, one a row: shape ``(n, STORE_KEY_BYTES)``."""

_Positions = NDArray[np.int64]  # of blocks in an order


class StoredArrays(NamedTuple):
    """The blocks of a persistent store, every parent before its children."""

    keys: KeyRows
    parents: KeyRows  # a row counts if its block has a parent, which need not be in the store
    has_parent: NDArray[np.bool_]


class BlockTable:
    """Which block is in which slot. Not thread-safe.

    Arrays of one row a block, about 110 bytes; rows that were never used are not in memory.
    """

    def __init__(self, slots: int, puts: Records) -> None:
        """The blocks of *puts*; of two for one key the later counts."""
        self._keys = KeyTable(slots)
        self._slots = np.zeros(slots, np.uint32)
        self._generations = np.zeros(slots, np.uint64)
        self._parents = np.zeros((slots, STORE_KEY_BYTES), np.uint8)
        self._has_parent = np.zeros(slots, np.bool_)
        self.put(latest(puts))

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def used_slots(self) -> NDArray[np.uint32]:
        return self._slots[self._ids()]

    def find(self, keys: Sequence[StoreKey]) -> BlockIds:
        """The number of each block, ``ABSENT`` where it is not there; until the table changes."""
        return self._keys.find_mixed(keys)

    def slots(self, ids: BlockIds) -> list[int]:
        found: list[int] = self._slots[ids].tolist()
        return found

    def entries(self, ids: BlockIds) -> list[Entry | None]:
        """Where each block is, without its parent; None for ``ABSENT``."""
        columns = ids.tolist(), self._slots[ids].tolist(), self._generations[ids].tolist()
        return [
            None if block == ABSENT else Entry(slot, generation, None)
            for block, slot, generation in zip(*columns, strict=True)
        ]

    def put(self, puts: Records) -> None:
        """Take in the blocks of *puts*, none of which may be there, or in them twice."""
        ids = self._keys.add_mixed(_rows(puts["key"]))
        self._slots[ids] = puts["slot"]
        self._generations[ids] = puts["generation"]
        self._parents[ids] = _rows(puts["parent"])
        self._has_parent[ids] = puts["flags"] & HAS_PARENT

    def forget(self, ids: BlockIds) -> None:
        self._keys.remove(ids)

    def of_namespace(self, namespace: NamespaceId) -> Iterator[BlockIds]:
        """The blocks of *namespace* in pieces, which may be forgotten meanwhile."""
        return self._keys.ids(namespace)

    def records(self, ids: BlockIds) -> Records:
        """The blocks *ids* as records of a journal."""
        puts = np.zeros(len(ids), RECORD)
        puts["kind"] = PUT
        puts["flags"] = self._has_parent[ids] * HAS_PARENT
        puts["slot"] = self._slots[ids]
        puts["generation"] = self._generations[ids]
        puts["key"] = _voids(self._keys.store_key_array(ids))
        puts["parent"] = _voids(self._parents[ids])
        return puts

    def all_records(self) -> Records:
        """Everything, as the records of a compact journal: in the order of the generations."""
        return self.records(self._by_age())

    def stored(self) -> StoredArrays:
        """Everything, as old as can be first."""
        ids = self._by_age()
        keys, parents = self._keys.store_key_array(ids), self._parents[ids]
        has_parent = self._has_parent[ids]
        above = self._above(ids, keys, parents, has_parent)
        if (above >= np.arange(len(ids))).any():
            order = _parents_first(above)
            return StoredArrays(keys[order], parents[order], has_parent[order])
        return StoredArrays(keys, parents, has_parent)

    def _ids(self) -> BlockIds:
        return np.concatenate([np.empty(0, np.int32), *self._keys.ids()])

    def _by_age(self) -> BlockIds:
        ids = self._ids()
        return ids[np.argsort(self._generations[ids])]

    def _above(
        self, ids: BlockIds, keys: KeyRows, parents: KeyRows, has_parent: NDArray[np.bool_]
    ) -> _Positions:
        """Where in *ids* the parent of each is; ``ABSENT`` without one in the table."""
        above = np.full(len(ids), ABSENT, np.int64)
        follows = np.zeros(len(ids), np.bool_)  # the one before it, as most do
        follows[1:] = (parents[1:].view(np.uint64) == keys[:-1].view(np.uint64)).all(axis=1)
        follows &= has_parent
        above[follows] = np.flatnonzero(follows) - 1
        rest = np.flatnonzero(has_parent & ~follows)
        found = self._keys.find_mixed(parents[rest])
        positions = np.full(len(self._slots), ABSENT, np.int32)
        positions[ids] = np.arange(len(ids))
        above[rest] = np.where(found == ABSENT, ABSENT, positions[found])
        return above


def latest(puts: Records) -> Records:
    """*puts* without those that a later one of the same key replaces.

    There are none unless a journal was damaged.
    """
    heads = _rows(puts["key"])[:, NAMESPACE_ID_BYTES:][:, :8]  # random: hardly two are alike
    words = np.ascontiguousarray(heads).view(np.uint64).ravel()
    order = np.argsort(words, kind="stable")
    alike = np.flatnonzero(np.diff(words[order]) == 0)
    if not len(alike):
        return puts
    suspects = np.unique(order[np.concatenate((alike, alike + 1))]).tolist()
    last = {bytes(puts["key"][position]): position for position in suspects}
    kept = np.ones(len(puts), np.bool_)
    kept[suspects] = False
    kept[list(last.values())] = True
    return puts[kept]


def _parents_first(above: _Positions) -> _Positions:
    """An order in which each comes after the one *above* it, and no later than it has to.

    A ring, which only damage can make, comes in some order.
    """
    youngest = np.arange(len(above))  # of a block and those above it, as far as looked
    depth = (above != ABSENT).astype(np.int64)
    above = above.copy()
    for _ in range(len(above).bit_length() + 1):
        further = np.flatnonzero(above != ABSENT)
        if not len(further):
            break
        next_above = above[further]
        youngest[further] = np.maximum(youngest[further], youngest[next_above])
        depth[further] += depth[next_above]
        above[further] = above[next_above]
    order: _Positions = np.lexsort((depth, youngest))
    return order


def _rows(voids: NDArray[np.void]) -> KeyRows:
    return np.ascontiguousarray(voids).view(np.uint8).reshape(-1, STORE_KEY_BYTES)


def _voids(rows: KeyRows) -> NDArray[np.void]:
    return rows.view(f"V{STORE_KEY_BYTES}").ravel()
