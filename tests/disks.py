"""What a disk store holds, for tests."""

from kvstrata.core.types import StoreKey
from kvstrata.storage.disk import DiskStore


def listed(store: DiskStore) -> list[tuple[StoreKey, StoreKey | None]]:
    """The blocks of *store* as ``stored`` gives them, each with its parent."""
    stored = store.stored()
    return [
        (key.tobytes(), parent.tobytes() if has_parent else None)
        for key, parent, has_parent in zip(*stored, strict=True)
    ]


def listed_keys(store: DiskStore) -> list[StoreKey]:
    return [key for key, _ in listed(store)]
