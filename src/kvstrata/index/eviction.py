"""Which block leaves a full tier first."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

from kvstrata.core.types import StoreKey


class EvictionPolicy(Protocol):
    """The order in which the blocks of one tier are given up."""

    def __len__(self) -> int: ...

    def add(self, key: StoreKey) -> None: ...

    def touch(self, keys: Iterable[StoreKey]) -> None:
        """These blocks were used together, in prompt order."""
        ...

    def remove(self, key: StoreKey) -> None: ...

    def victim(self, evictable: Callable[[StoreKey], bool]) -> StoreKey | None:
        """The block to give up next, or None if none may leave. It stays until ``remove``."""
        ...


class LRU:
    """Least recently used first; O(1) amortised a victim.

    Of blocks that were used together the last of the prompt goes first, so that what stays is a
    prefix. A block that may not leave now (leased, or the last copy of a parent) is moved to the
    young end when a search meets it: no search pays for it twice.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[StoreKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def add(self, key: StoreKey) -> None:
        self._order[key] = None

    def touch(self, keys: Iterable[StoreKey]) -> None:
        for key in reversed(list(keys)):
            if key in self._order:
                self._order.move_to_end(key)

    def remove(self, key: StoreKey) -> None:
        self._order.pop(key, None)

    def victim(self, evictable: Callable[[StoreKey], bool]) -> StoreKey | None:
        for _ in range(len(self._order)):
            key = next(iter(self._order))
            if evictable(key):
                return key
            self._order.move_to_end(key)
        return None
