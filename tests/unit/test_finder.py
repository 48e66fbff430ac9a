"""Searches of a store on threads of their own."""

import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.caches import PATIENCE_SECONDS, eventually

from kvstrata.core.errors import TierUnavailable
from kvstrata.core.types import StoreKey
from kvstrata.testing import MemoryStore
from kvstrata.transfer.finder import Finder, Found
from kvstrata.transfer.presence import Presence

KEYS = [bytes([n]) * 48 for n in range(4)]
MANY = [number.to_bytes(48, "big") for number in range(300)]
AT_A_TIME = 8  # searches


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


def finder_of(store: MemoryStore, width: int = 64, search_seconds: float = 3600.0) -> Finder:
    presence = Presence(store.exists, missing_seconds=0)
    return Finder(presence, width=width, search_seconds=search_seconds)


class Asked(MemoryStore):
    """Remembers its questions."""

    def __init__(self, there: int) -> None:
        super().__init__(block_bytes=4, capacity_blocks=max(1, there))
        self.questions: list[int] = []
        keys = MANY[:there]
        self.write(keys, [None] * there, [memoryview(b"1234")] * there)

    def exists(self, keys: Sequence[StoreKey]) -> list[bool]:
        self.questions.append(len(keys))
        return super().exists(keys)


def search(finder: Finder, keys: Sequence[StoreKey]) -> Found:
    found: list[Found] = []
    finder.find(keys, found.append, "a")
    eventually(lambda: bool(found), "a search has no end")
    return found[0]


@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 40))
def test_a_prefix_is_found_whole_with_few_questions(there: int, asked: int, width: int) -> None:
    store = Asked(there)
    finder = finder_of(store, width)
    assert search(finder, MANY[:asked]) == Found(min(there, asked))
    assert max(store.questions, default=0) <= max(2, width)
    if width >= 20:
        assert len(store.questions) <= 3
    finder.close()


def test_a_short_prompt_with_a_hole_is_found_up_to_there() -> None:
    store = Asked(9)
    store.remove(MANY[4:5])
    finder = finder_of(store, 16)
    assert search(finder, MANY[:12]) == Found(4)
    finder.close()


class InPart(Asked):
    """An engine of several servers, of which those that have some keys do not answer."""

    def __init__(self, there: int, away: set[int]) -> None:
        super().__init__(there)
        self.away = {MANY[number] for number in away}

    def exists(self, keys: Sequence[StoreKey]) -> list[bool | None]:  # type: ignore[override]  # as a `Store` may
        return [
            None if key in self.away else there
            for key, there in zip(keys, super().exists(keys), strict=True)
        ]


@given(
    st.integers(0, 40),
    st.sets(st.integers(0, 40), max_size=9),
    st.integers(0, 40),
    st.integers(1, 9),
)
def test_of_what_a_part_of_the_engine_has_nobody_is_told_that_it_is_missing(
    there: int, away: set[int], asked: int, width: int
) -> None:
    finder = finder_of(InPart(there, away), width)
    found = search(finder, MANY[:asked])
    known = [number for number in range(there) if number not in away]
    assert {*range(found.there)} <= {*known} | away
    if width >= asked:
        assert found.there == min(asked, *away, there)
    missing = found.there + found.untold
    assert missing == asked or (missing >= there and missing not in away)
    finder.close()


def test_a_search_that_takes_too_long_answers_with_what_it_knows() -> None:
    store = Asked(200)
    finder = finder_of(store, 10, search_seconds=0.0)
    found = search(finder, MANY[:300])
    assert store.questions == [10]
    assert 150 <= found.there <= 200 <= found.there + found.untold < 300
    finder.close()


def test_searches_that_come_together_are_answered_side_by_side() -> None:
    """As by a store that is far away: each waits for its own answer, not for those of others."""
    together = threading.Barrier(AT_A_TIME)

    class Far(MemoryStore):
        def exists(self, keys: Sequence[StoreKey]) -> list[bool]:
            together.wait(PATIENCE_SECONDS)
            return super().exists(keys)

    store = Far(block_bytes=4, capacity_blocks=AT_A_TIME)
    keys = MANY[:AT_A_TIME]
    store.write(keys, [None] * AT_A_TIME, [memoryview(b"1234")] * AT_A_TIME)
    finder = finder_of(store)
    found: list[Found] = []
    for key in keys:
        finder.find([key], found.append, "a")
    eventually(lambda: len(found) == AT_A_TIME, "they wait for each other")
    assert found == [Found(1)] * AT_A_TIME
    finder.close()


def test_a_search_that_has_waited_too_long_for_its_turn_asks_nothing() -> None:
    store, now = Asked(20), [0.0]
    presence = Presence(store.exists, missing_seconds=0)
    finder = Finder(presence, width=8, search_seconds=0.1, clock=lambda: now[0])
    blocked = threading.Event()
    for _ in range(AT_A_TIME):
        finder._threads.submit(blocked.wait)
    found: list[Found] = []
    finder.find(MANY[:20], found.append, "a")
    now[0] = 5.0
    blocked.set()
    eventually(lambda: found == [Found(0, 20)], "the search has no end")
    assert store.questions == []
    finder.close()


def test_the_leading_keys_that_are_there_are_counted() -> None:
    store = store_with(KEYS[0], KEYS[1], KEYS[3])
    store.go.set()
    finder = finder_of(store)
    found: list[Found] = []
    finder.find(KEYS, found.append, "a")
    eventually(lambda: found == [Found(2)], "nothing is found")
    finder.find(KEYS[:2], found.append, "a")
    eventually(lambda: found == [Found(2), Found(2)], "nothing is found")
    store.away = True
    finder.find(KEYS, found.append, "a")
    eventually(lambda: found[2:] == [Found(0, 4)], "a failed search has no end")
    finder.close()
    finder.find(KEYS, found.append, "a")
    assert found[3:] == [Found(0, 4)]


def test_too_many_searches_find_nothing_at_once_and_later_there_is_room() -> None:
    store = store_with(*KEYS)
    finder = finder_of(store)
    found: list[Found] = []
    for _ in range(100):
        finder.find(KEYS, found.append, "a")
    refused = len(found)
    assert set(found) == {Found(0, 4)}
    assert 36 - AT_A_TIME <= refused <= 36  # those under way wait no more
    store.go.set()
    eventually(lambda: len(found) == 100, "a search has no end")
    assert found[refused:] == [Found(4)] * (100 - refused)
    finder.find(KEYS, found.append, "a")
    eventually(lambda: found[100:] == [Found(4)], "there is no room again")
    finder.close()


def test_who_asks_for_much_at_a_time_keeps_nobody_waiting() -> None:
    store = store_with(*KEYS)
    store.go.set()
    finder = finder_of(store)
    go, end = threading.Event(), threading.Event()
    for event in [go, *[end] * (AT_A_TIME - 1)]:  # one thread is to search
        finder._threads.submit(event.wait, PATIENCE_SECONDS)
    answers: list[tuple[str, Found]] = []

    def ask(asker: str) -> None:
        finder.find(KEYS, lambda found: answers.append((asker, found)), asker)

    for asker in ["much"] * 64 + ["one", "one", "two"]:
        ask(asker)
    assert answers == [("much", Found(0, 4))] * 3  # the last in line make room
    answers.clear()
    go.set()
    eventually(lambda: len(answers) == 64, "a search has no end")
    assert answers[:6] == [(a, Found(4)) for a in ("much", "one", "two", "much", "one", "much")]
    end.set()
    finder.close()


def test_bug_in_what_hears_of_a_search_is_logged_and_costs_no_other_search(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def buggy(_found: Found) -> None:
        raise KeyError("a bug")

    store = store_with(*KEYS[:2])
    store.go.set()
    finder = finder_of(store)
    finder.find(KEYS, buggy, "a")
    eventually(lambda: "KeyError: 'a bug'" in caplog.text, "a bug is not told of")
    assert search(finder, KEYS) == Found(2)
    finder.close()
