"""Names apart: stores on one engine that keep the same blocks in other forms never meet."""

from collections.abc import Sequence

from blake3 import blake3

from kvstrata.core.types import (
    BLOCK_KEY_BYTES,
    NAMESPACE_ID_BYTES,
    NamespaceId,
    Read,
    StoreKey,
    Write,
)
from kvstrata.storage.store import Store, StoreStatistics


class ApartStore:
    """Keeps each block under another block key, made of its own and *form*; namespaces stay.

    What a node with another form has written is a miss then, and is not touched.
    """

    def __init__(self, inner: Store, form: bytes) -> None:
        self._inner = inner
        self._form = form

    def exists(self, keys: Sequence[StoreKey]) -> Sequence[bool | None]:
        return self._inner.exists([self._apart(key) for key in keys])

    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        return self._inner.read_into([self._apart(key) for key in keys], buffers)

    def write(
        self,
        keys: Sequence[StoreKey],
        parents: Sequence[StoreKey | None],
        buffers: Sequence[memoryview],
    ) -> list[Write]:
        above = [None if parent is None else self._apart(parent) for parent in parents]
        return self._inner.write([self._apart(key) for key in keys], above, buffers)

    def remove(self, keys: Sequence[StoreKey]) -> list[bool]:
        return self._inner.remove([self._apart(key) for key in keys])

    def drop_namespace(self, namespace_id: NamespaceId) -> int:
        return self._inner.drop_namespace(namespace_id)

    def statistics(self) -> StoreStatistics:
        return self._inner.statistics()

    def close(self) -> None:
        self._inner.close()

    def _apart(self, key: StoreKey) -> StoreKey:
        if len(key) != NAMESPACE_ID_BYTES + BLOCK_KEY_BYTES:
            return key  # for the store inside to refuse
        namespace, block = key[:NAMESPACE_ID_BYTES], key[NAMESPACE_ID_BYTES:]
        return namespace + blake3(self._form, key=block).digest(length=BLOCK_KEY_BYTES)
