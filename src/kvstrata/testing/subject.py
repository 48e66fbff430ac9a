"""The store that a suite tests: how to open, damage and cut it off, and what it holds."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar, Final, TypeVar

import pytest

from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage.store import Store
from kvstrata.testing.machine import Traits
from kvstrata.testing.samples import dirty, fetch, key, random_value

Rule = TypeVar("Rule", bound=Callable[..., None])
_CONDITIONS: Final[dict[str, Callable[[type["StoreSubject"]], bool]]] = {}  # by name of the rule


def only_if(promised: Callable[[type["StoreSubject"]], bool]) -> Callable[[Rule], Rule]:
    """Mark a rule as one for suites of which *promised* is true."""

    def mark(rule: Rule) -> Rule:
        _CONDITIONS[rule.__name__] = promised
        return rule

    return mark


def can_be_damaged(suite: type["StoreSubject"]) -> bool:
    return suite.damage is not StoreSubject.damage


def can_be_cut_off(suite: type["StoreSubject"]) -> bool:
    return suite.outage is not StoreSubject.outage


class StoreSubject(ABC):
    """What a suite needs to know about a store. Only ``open_store`` must be given.

    A suite has the rules for what its store promises: those for other traits, and those for
    damage and outages that it cannot bring about, are not in it.
    """

    traits: ClassVar[Traits] = Traits()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.open_store is StoreSubject.open_store:
            return  # of rules, not of a store
        for base in reversed(cls.__mro__):
            for name, rule in list(vars(base).items()):
                if name in _CONDITIONS:
                    setattr(cls, name, rule if _CONDITIONS[name](cls) else None)

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
        raise AssertionError("override damage: the rule for it is in no suite that does not")

    def outage(self, store: Store, place: Path) -> AbstractContextManager[object]:
        """A context in which *store* cannot reach its blocks."""
        raise AssertionError("override outage: the rule for it is in no suite that does not")

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

    def _assert_whole(
        self, store: Store, numbers: Sequence[int], values: Sequence[Sequence[bytes]]
    ) -> None:
        """Each key is a miss or holds one of its ``values[number]``."""
        buffers = [dirty(len(values[0][0])) for _ in numbers]
        fates = store.read_into([key(number) for number in numbers], buffers)
        for number, buffer, fate in zip(numbers, buffers, fates, strict=True):
            assert fate is Read.MISS or (fate is Read.HIT and bytes(buffer) in values[number])
