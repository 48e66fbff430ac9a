"""The hash-linked prefix tree: which blocks exist, where, and who depends on them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.types import NamespaceId, StoreKey

NO_SLOT: Final = -1


@dataclass(slots=True, eq=False)
class Entry:
    """One block: its place in the tree and its residency."""

    key: StoreKey
    parent: "Entry | None"
    children: int = 0
    host_slot: int = NO_SLOT
    on_disk: bool = False
    arriving: bool = False  # from the remote tier, on the way into host memory, and nowhere else
    in_remote: bool = False  # as far as we know: others may have removed it since
    leases: int = 0
    forgotten: bool = False  # out of the index; its host slot is freed with its last lease

    @property
    def resident(self) -> bool:
        """Whether the index has to know it; what is in the remote tier alone is asked for there."""
        return self.host_slot != NO_SLOT or self.on_disk or self.arriving


class PrefixIndex:
    """Every block that is in some tier, one ``Entry`` each.

    A block's key already names everything before it (chained hash), so a match walks the keys
    of a prompt and needs no token. The links exist for eviction: a block that others continue
    from does not leave its last tier before they do.
    """

    def __init__(self) -> None:
        self._entries: dict[StoreKey, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, key: StoreKey) -> Entry | None:
        return self._entries.get(key)

    def longest_prefix(self, keys: Sequence[StoreKey]) -> list[Entry]:
        """The entries of the leading *keys* that are all present. Changes nothing."""
        found = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                break
            found.append(entry)
        return found

    def insert(self, key: StoreKey, parent: StoreKey | None) -> Entry:
        """The entry of *key*, made if absent and hung under *parent* if that is present."""
        entry = self._entries.get(key)
        if entry is None:
            above = self._entries.get(parent) if parent is not None else None
            entry = self._entries[key] = Entry(key, above)
            if above is not None:
                above.children += 1
        return entry

    def remove(self, entry: Entry) -> None:
        """Take *entry* out. Entries that continue from it stay, as first blocks."""
        if self._entries.pop(entry.key, None) is not entry:
            raise InvariantViolated("an entry is removed that the index does not hold")
        if entry.parent is not None:
            entry.parent.children -= 1
        entry.forgotten = True

    def may_leave(self, entry: Entry, tier: Literal["host", "disk"]) -> bool:
        """Whether *entry* may be evicted from *tier*: unleased, and childless if it is the last."""
        if entry.leases:
            return False
        elsewhere = entry.on_disk if tier == "host" else entry.host_slot != NO_SLOT
        return elsewhere or entry.children == 0

    def namespace(self, namespace: NamespaceId) -> list[Entry]:
        return [entry for key, entry in self._entries.items() if key.startswith(namespace)]

    def check(self) -> None:
        """Raises ``InvariantViolated`` if links, counts or residency contradict each other."""
        children: dict[int, int] = {}
        for key, entry in self._entries.items():
            if entry.key != key or entry.forgotten or not entry.resident:
                raise InvariantViolated("an entry is misfiled, forgotten or nowhere")
            if entry.parent is not None:
                children[id(entry.parent)] = children.get(id(entry.parent), 0) + 1
        for entry in self._entries.values():
            if entry.children != children.get(id(entry), 0):
                raise InvariantViolated(f"an entry counts {entry.children} children wrongly")
