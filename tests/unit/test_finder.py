"""Searches of a store on threads of their own."""

import threading
from collections.abc import Sequence

from tests.caches import PATIENCE_SECONDS, eventually

from kvstrata.core.errors import TierUnavailable
from kvstrata.core.types import StoreKey
from kvstrata.testing import MemoryStore
from kvstrata.transfer.finder import Finder

KEYS = [bytes([n]) * 48 for n in range(4)]


class Waiting(MemoryStore):
    """Answers when it is let."""

    def __init__(self) -> None:
        super().__init__(block_bytes=4, capacity_blocks=9)
        self.go = threading.Event()
        self.away = False

    def exists(self, keys: Sequence[StoreKey]) -> list[bool]:
        assert self.go.wait(PATIENCE_SECONDS)
        if self.away:
            raise TierUnavailable("it is away")
        return super().exists(keys)


def store_with(*keys: StoreKey) -> Waiting:
    store = Waiting()
    store.write(keys, [None] * len(keys), [memoryview(b"1234")] * len(keys))
    return store


def test_the_leading_keys_that_are_there_are_counted() -> None:
    store = store_with(KEYS[0], KEYS[1], KEYS[3])
    store.go.set()
    finder = Finder(store)
    counts: list[int] = []
    finder.find(KEYS, counts.append)
    eventually(lambda: counts == [2], "nothing is found")
    finder.find(KEYS[:2], counts.append)
    eventually(lambda: counts == [2, 2], "nothing is found")
    store.away = True
    finder.find(KEYS, counts.append)
    eventually(lambda: counts == [2, 2, 0], "a failed search has no end")
    finder.close()
    finder.find(KEYS, counts.append)
    assert counts == [2, 2, 0, 0]


def test_too_many_searches_find_nothing_at_once_and_later_there_is_room() -> None:
    store = store_with(*KEYS)
    finder = Finder(store)
    counts: list[int] = []
    for _ in range(100):
        finder.find(KEYS, counts.append)
    refused = len(counts)
    assert set(counts) == {0}
    assert 30 <= refused <= 36  # those under way wait no more
    store.go.set()
    eventually(lambda: len(counts) == 100, "a search has no end")
    assert counts[refused:] == [4] * (100 - refused)
    finder.find(KEYS, counts.append)
    eventually(lambda: counts[100:] == [4], "there is no room again")
    finder.close()
