"""What all wrappers share: every call goes on to the store inside."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstrata.core.types import NamespaceId, Read, StoreKey, Write
from kvstrata.storage.store import Store, StoreStatistics

T = TypeVar("T")


class WrappedStore:
    """A ``Store`` around *inner*; a subclass does its one thing in ``_call``.

    ``statistics`` and ``close`` go straight to *inner*.
    """

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def exists(self, keys: Sequence[StoreKey]) -> Sequence[bool | None]:
        return self._call(lambda: self._inner.exists(keys))

    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        return self._call(lambda: self._inner.read_into(keys, buffers))

    def write(
        self,
        keys: Sequence[StoreKey],
        parents: Sequence[StoreKey | None],
        buffers: Sequence[memoryview],
    ) -> list[Write]:
        return self._call(lambda: self._inner.write(keys, parents, buffers))

    def remove(self, keys: Sequence[StoreKey]) -> list[bool]:
        return self._call(lambda: self._inner.remove(keys))

    def drop_namespace(self, namespace_id: NamespaceId) -> int:
        return self._call(lambda: self._inner.drop_namespace(namespace_id))

    def statistics(self) -> StoreStatistics:
        return self._inner.statistics()

    def close(self) -> None:
        self._inner.close()

    def _call(self, call: Callable[[], T]) -> T:
        """Run *call*, one call to *inner*, and return its result."""
        return call()
