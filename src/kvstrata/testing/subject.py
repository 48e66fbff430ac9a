"""The store that a suite tests: how to open, damage and cut it off, and what it holds."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

import pytest

from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage.store import Store
from kvstrata.testing.machine import Traits
from kvstrata.testing.samples import dirty, fetch, key, random_value


class StoreSubject(ABC):
    """What a suite needs to know about a store. Only ``open_store`` must be given."""

    traits: ClassVar[Traits] = Traits()

    @abstractmethod
    def open_store(self, place: Path) -> Store:
        """The store that lives at *place*: a folder of its own, empty when it is opened first.

        A persistent store is opened again after ``close``. Make it small, since the suite fills
        it: room for 6 to 64 blocks, and blocks of a few KiB. A store on a server uses the name
        of the folder as a prefix of its keys, or a database of its own.
        """

    def value(self, number: int, length: int) -> bytes:
        """Value *number* of *length* bytes. Override it if the store alters some values."""
        return random_value(number, length)

    def damage(self, store: Store, place: Path, wanted: StoreKey) -> None:
        """Change a stored byte of the block *wanted* behind the back of *store*."""
        pytest.skip("the store does not say how to damage it")

    def outage(self, store: Store, place: Path) -> AbstractContextManager[object]:
        """A context in which *store* cannot reach its blocks."""
        pytest.skip("the store does not say how to cut it off")

    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        return tmp_path

    @pytest.fixture
    def store(self, place: Path) -> Iterator[Store]:
        store = self.open_store(place)
        yield store
        store.close()

    def _value(self, store: Store, number: int) -> bytes:
        return self.value(number, store.statistics().block_bytes)

    def _put(self, store: Store, *numbers: int) -> list[Write]:
        """Write value n under key n, all in one batch."""
        values = [memoryview(self._value(store, number)) for number in numbers]
        return store.write([key(number) for number in numbers], [None] * len(numbers), values)

    def _put_value(self, store: Store, wanted: StoreKey, number: int) -> Write:
        (fate,) = store.write([wanted], [None], [memoryview(self._value(store, number))])
        return fate

    def _assert_holds(self, store: Store, wanted: StoreKey, number: int) -> None:
        assert fetch(store, wanted) == self._value(store, number)

    def _variable_block_bytes(self, store: Store) -> int:
        size = store.statistics()
        if not size.variable:
            pytest.skip("the store is not variable")
        return size.block_bytes

    def _capacity(self, store: Store) -> int:
        capacity = store.statistics().capacity_blocks
        if not capacity or not self.traits.bounded:
            pytest.skip("the store is never full")
        return capacity

    def _assert_whole(
        self, store: Store, numbers: Sequence[int], values: Sequence[Sequence[bytes]]
    ) -> None:
        """Each key is a miss or holds one of its ``values[number]``."""
        buffers = [dirty(len(values[0][0])) for _ in numbers]
        fates = store.read_into([key(number) for number in numbers], buffers)
        for number, buffer, fate in zip(numbers, buffers, fates, strict=True):
            assert fate is Read.MISS or (fate is Read.HIT and bytes(buffer) in values[number])
