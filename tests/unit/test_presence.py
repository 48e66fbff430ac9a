"""What a tier lacks, and who asks it."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.caches import PATIENCE_SECONDS, eventually

from kvstrata.core.errors import TierUnavailable
from kvstrata.core.types import StoreKey
from kvstrata.transfer.presence import Presence

KEYS = [bytes([n]) * 48 for n in range(9)]


class Engine:
    """Has some keys, is asked, and answers when it is let."""

    def __init__(self, *there: StoreKey) -> None:
        self.there = set(there)
        self.questions: list[list[StoreKey]] = []
        self.go = threading.Event()
        self.go.set()
        self.away = False

    def exists(self, keys: Sequence[StoreKey]) -> list[bool]:
        self.questions.append(list(keys))
        assert self.go.wait(PATIENCE_SECONDS)
        if self.away:
            raise TierUnavailable("it is away")
        return [key in self.there for key in keys]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_is_missing_is_asked_for_again_after_a_while() -> None:
    engine, clock = Engine(KEYS[0]), Clock()
    presence = Presence(engine.exists, missing_seconds=2, clock=clock)
    assert presence.ask(KEYS[:2]) == [True, False]
    assert presence.ask(KEYS[:2]) == [True, False]
    assert engine.questions == [KEYS[:2], KEYS[:1]]
    engine.there.add(KEYS[1])
    clock.now += 2
    assert presence.ask(KEYS[:2]) == [True, True]


def test_what_nobody_can_tell_is_asked_for_again() -> None:
    answers: list[list[bool | None]] = [[None, False], [True]]
    presence = Presence(lambda keys: answers.pop(0), missing_seconds=3600)
    assert presence.ask(KEYS[:2]) == [None, False]
    assert presence.ask(KEYS[:2]) == [True, False]


def test_what_this_node_has_written_is_not_missing() -> None:
    engine = Engine()
    presence = Presence(engine.exists, missing_seconds=3600)
    assert presence.ask(KEYS[:1]) == [False]
    engine.there.add(KEYS[0])
    presence.written(KEYS[:1])
    assert presence.ask(KEYS[:1]) == [True]


def test_what_is_written_while_it_is_asked_for_is_not_missing() -> None:
    engine = Engine()
    engine.go.clear()
    presence = Presence(engine.exists, missing_seconds=3600)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(presence.ask, KEYS[:2])
        eventually(lambda: len(engine.questions) == 1, "nobody asks")
        presence.written(KEYS[:1])
        engine.go.set()
        assert asked.result() == [False, False]
    engine.there.add(KEYS[0])
    assert presence.ask(KEYS[:2]) == [True, False]
    assert engine.questions[1:] == [KEYS[:1]]


def test_without_a_time_nothing_is_remembered() -> None:
    engine = Engine()
    presence = Presence(engine.exists, missing_seconds=0)
    for _ in range(3):
        assert presence.ask(KEYS[:1]) == [False]
    assert len(engine.questions) == 3


def test_a_key_that_comes_twice_is_asked_for_once() -> None:
    engine = Engine(KEYS[1])
    presence = Presence(engine.exists, missing_seconds=0)
    assert presence.ask([KEYS[1], KEYS[0], KEYS[1]]) == [True, False, True]
    assert engine.questions == [[KEYS[1], KEYS[0]]]


def test_many_who_ask_for_the_same_keys_are_one_question() -> None:
    engine = Engine(*KEYS[:4])
    engine.go.clear()
    presence = Presence(engine.exists, missing_seconds=0)
    with ThreadPoolExecutor(6) as pool:
        first = pool.submit(presence.ask, KEYS[:4])
        eventually(lambda: len(engine.questions) == 1, "nobody asks")
        others = [pool.submit(presence.ask, KEYS[:6]) for _ in range(5)]
        eventually(lambda: len(engine.questions) == 2, "the other keys are not asked for")
        engine.go.set()
        assert first.result() == [True] * 4
        assert [other.result() for other in others] == [[True] * 4 + [False] * 2] * 5
    assert engine.questions == [KEYS[:4], KEYS[4:6]]


def test_who_waits_for_a_question_that_fails_is_told_nothing() -> None:
    engine = Engine(*KEYS)
    engine.go.clear()
    engine.away = True
    presence = Presence(engine.exists, missing_seconds=3600)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(presence.ask, KEYS[:2])
        eventually(lambda: len(engine.questions) == 1, "nobody asks")
        second = pool.submit(presence.ask, KEYS[:2])
        engine.go.set()
        with pytest.raises(TierUnavailable):
            first.result()
        assert second.result() in ([None, None], [True, True])
    engine.away = False
    assert presence.ask(KEYS[:2]) == [True, True]


def test_who_waits_too_long_is_told_nothing() -> None:
    engine = Engine(*KEYS)
    engine.go.clear()
    presence = Presence(engine.exists, missing_seconds=0, wait_seconds=0.01)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(presence.ask, KEYS[:1])
        eventually(lambda: len(engine.questions) == 1, "nobody asks")
        assert presence.ask(KEYS[:1]) == [None]
        engine.go.set()
        assert first.result() == [True]


def test_no_more_is_remembered_than_there_is_room_for() -> None:
    engine = Engine()
    presence = Presence(engine.exists, missing_seconds=3600)
    keys = [number.to_bytes(48, "big") for number in range(70_000)]
    presence.ask(keys)
    assert len(presence._missing) == 1 << 16
    presence.ask(keys[:1] + keys[-1:])
    assert engine.questions[1:] == [keys[:1]]  # the oldest answers are forgotten
