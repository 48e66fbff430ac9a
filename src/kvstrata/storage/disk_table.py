"""The map from keys to slots that a disk store has in memory."""

from collections.abc import Iterator

import numpy as np

from kvstrata.core.types import NamespaceId, StoredBlock, StoreKey
from kvstrata.storage.journal import HAS_PARENT, PUT, RECORD, Entry, Records

_ROW = np.dtype([("generation", "<u8"), ("flags", "u1"), ("parent", "V48")])


class BlockTable:
    """Which block is in which slot, in the order in which they were put. Not thread-safe.

    A dict from key to slot and one row of an array for each slot: about 260 bytes a block.
    """

    def __init__(self, slots: int, puts: Records) -> None:
        """The blocks of *puts*; of two for one key the later counts."""
        self._slots: dict[StoreKey, int] = dict(
            zip(puts["key"].tolist(), puts["slot"].tolist(), strict=True)
        )
        self._rows = np.zeros(slots, _ROW)
        for name in _ROW.names or ():
            self._rows[name][puts["slot"]] = puts[name]

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: StoreKey) -> bool:
        return key in self._slots

    @property
    def used_slots(self) -> list[int]:
        return list(self._slots.values())

    def get(self, key: StoreKey) -> Entry | None:
        slot = self._slots.get(key)
        if slot is None:
            return None
        generation, flags, parent = self._rows[slot].item()
        return Entry(slot, generation, parent if flags & HAS_PARENT else None)

    def put(self, key: StoreKey, entry: Entry) -> None:
        self._slots[key] = entry.slot
        self._rows[entry.slot] = (
            entry.generation,
            HAS_PARENT if entry.parent else 0,
            entry.parent or b"",
        )

    def pop(self, key: StoreKey) -> int:
        """Forget *key*, which must be there; its slot."""
        return self._slots.pop(key)

    def keys_of(self, namespace: NamespaceId) -> list[StoreKey]:
        return [key for key in self._slots if key.startswith(namespace)]

    def puts(self) -> Records:
        """A copy of everything, as the records of a compact journal."""
        slots = np.fromiter(self._slots.values(), np.int64, len(self._slots))
        puts = np.zeros(len(slots), RECORD)
        puts["kind"] = PUT
        puts["slot"] = slots
        puts["key"] = np.frombuffer(b"".join(self._slots), "V48")
        rows = self._rows[slots]
        for name in _ROW.names or ():
            puts[name] = rows[name]
        return puts


def parents_first(puts: Records) -> Iterator[StoredBlock]:
    """Each block of *puts*, after its parent if that is there too."""
    keys: list[StoreKey] = puts["key"].tolist()
    parents: list[StoreKey | None] = puts["parent"].tolist()
    for position in np.flatnonzero(puts["flags"] & HAS_PARENT == 0).tolist():
        parents[position] = None
    known: dict[StoreKey, StoreKey | None] = {}  # made when the order of *puts* does not do
    done: set[StoreKey | None] = {None}
    for key, parent in zip(keys, parents, strict=True):
        if key in done:
            continue
        if parent not in done:
            known = known or dict(zip(keys, parents, strict=True))
            if parent in known:
                yield from _chain(key, known, done)
                continue
        done.add(key)
        yield StoredBlock(key, parent)


def _chain(
    start: StoreKey, parents: dict[StoreKey, StoreKey | None], done: set[StoreKey | None]
) -> list[StoredBlock]:
    """*start* after those of its ancestors that are not *done*, which then are."""
    chain: list[StoredBlock] = []
    key: StoreKey | None = start
    while key is not None and key in parents and key not in done:
        done.add(key)  # also ends a chain that damage has closed to a ring
        chain.append(StoredBlock(key, parents[key]))
        key = parents[key]
    return chain[::-1]
