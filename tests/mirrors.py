"""What somebody knows of a cache who was told its changes, and what is so."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstrata.core.types import NAMESPACE_ID_BYTES, BlockKey, NamespaceId
from kvstrata.index.places import DISK, HOST, REMOTE
from kvstrata.manager.feed import Follower
from kvstrata.manager.manager import KVManager
from kvstrata.observe.block_changes import Change, keys_of

Held = tuple[NamespaceId, str, BlockKey]  # the tier between
BITS = {"host": HOST, "disk": DISK, "remote": REMOTE}


@dataclass
class Mirror:
    """Applies changes."""

    held: set[Held] = field(default_factory=set)
    parents: dict[tuple[NamespaceId, BlockKey], BlockKey | None] = field(default_factory=dict)
    cleared: int = 0  # times

    def apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            if change.kind == "cleared":
                self.cleared += 1
                whose = change.namespace
                self.held = {h for h in self.held if whose is not None and h[0] != whose}
                continue
            assert change.namespace is not None
            assert change.keys
            keys = keys_of(change.keys)
            blocks = {(change.namespace, change.tier, key) for key in keys}
            if change.kind == "removed":
                self.held -= blocks
                continue
            self.held |= blocks
            for key, parent in zip(keys, [change.parent, *keys], strict=False):
                self.parents[change.namespace, key] = parent

    def hear_all(self, follower: Follower, most_blocks: int = 4096) -> None:
        while changes := follower.take(most_blocks):
            self.apply(changes)


def held_by(manager: KVManager, namespaces: Iterable[NamespaceId]) -> set[Held]:
    """What the index of *manager* says of these namespaces."""
    index, found = manager._cache.index, set()
    wanted = set(namespaces)
    with manager._lock:
        for ids in index.ids():
            for block, where in zip(index.store_keys(ids), index.where[ids].tolist(), strict=True):
                namespace, key = block[:NAMESPACE_ID_BYTES], block[NAMESPACE_ID_BYTES:]
                if namespace in wanted:
                    found |= {(namespace, tier, key) for tier, bit in BITS.items() if where & bit}
    return found
