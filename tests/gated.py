"""Stores that tests hold up, or take away."""

import threading
from collections.abc import Sequence

import pytest
from tests.caches import BLOCK_BYTES, PATIENCE_SECONDS

from kvstrata.core.errors import TierUnavailable
from kvstrata.core.types import NamespaceId, Read, StoreKey
from kvstrata.storage.disk import DiskStore
from kvstrata.testing.memory import MemoryStore, Value


class HeldDrops:
    """From now on a disk drops a namespace when ``go`` is set; ``begun``: it has been told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        drop = DiskStore.drop_namespace

        def held(store: DiskStore, namespace: NamespaceId) -> int:
            self.begun.set()
            assert self.go.wait(PATIENCE_SECONDS)
            return drop(store, namespace)

        monkeypatch.setattr(DiskStore, "drop_namespace", held)


class GatedStore(MemoryStore):
    """Searches and reads pass when their gate is open."""

    def __init__(self, values: dict[StoreKey, Value]) -> None:
        super().__init__(block_bytes=BLOCK_BYTES, capacity_blocks=100, values=values)
        self._counting = threading.Lock()
        self.searches, self.reads = threading.Event(), threading.Event()
        self.searches.set()
        self.reads.set()
        self.begun_reads = 0
        self.read_keys: list[StoreKey] = []
        self.written_keys: list[StoreKey] = []
        self.away = False

    def exists(self, keys: Sequence[StoreKey]) -> list[bool]:
        assert self.searches.wait(PATIENCE_SECONDS)
        self._reach()
        return super().exists(keys)

    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        with self._counting:
            self.begun_reads += 1
        assert self.reads.wait(PATIENCE_SECONDS)
        self._reach()
        self.read_keys += keys
        return super().read_into(keys, buffers)

    def write(self, keys, parents, buffers):  # type: ignore[no-untyped-def]  # as above it
        self._reach()
        self.written_keys += keys
        return super().write(keys, parents, buffers)

    def drop_namespace(self, namespace_id: NamespaceId) -> int:
        self._reach()
        return super().drop_namespace(namespace_id)

    def _reach(self) -> None:
        if self.away:
            raise TierUnavailable("the store is away")
