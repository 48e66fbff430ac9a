"""The circuit breaker: when it opens, what it lets through, when it closes."""

from collections.abc import Callable, Sequence

import pytest

from kvstrata.core.errors import InvariantViolated, TierUnavailable
from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage.store import StoreStatistics
from kvstrata.storage.wrap import BreakerStore


class Fickle:
    """A store that answers, or raises what it is told."""

    def __init__(self) -> None:
        self.calls = 0
        self.error: Exception | None = None
        self.closed = False

    def _answer(self) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error

    def exists(self, keys: Sequence[StoreKey]) -> list[bool]:
        self._answer()
        return [True] * len(keys)

    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        self._answer()
        return [Read.MISS] * len(keys)

    def write(
        self,
        keys: Sequence[StoreKey],
        parents: Sequence[StoreKey | None],
        buffers: Sequence[memoryview],
    ) -> list[Write]:
        self._answer()
        return [Write.FULL] * len(keys)

    def remove(self, keys: Sequence[StoreKey]) -> list[bool]:
        self._answer()
        return [False] * len(keys)

    def statistics(self) -> StoreStatistics:
        return StoreStatistics(1, 2, 3, 4)

    def close(self) -> None:
        self.closed = True


class Bench:
    def __init__(self) -> None:
        self.now = 50.0
        self.store = Fickle()
        self.breaker = BreakerStore(
            self.store, failures=3, retry_seconds=5.0, clock=lambda: self.now
        )

    def fail(self, times: int) -> None:
        self.store.error = TierUnavailable("the disk is gone")
        for _ in range(times):
            with pytest.raises(TierUnavailable, match="the disk is gone"):
                self.breaker.exists([b"k"])


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_answers_of_the_store_pass_through(bench: Bench) -> None:
    assert bench.breaker.exists([b"k", b"l"]) == [True, True]
    assert bench.breaker.read_into([b"k"], [memoryview(b"")]) == [Read.MISS]
    assert bench.breaker.write([b"k"], [None], [memoryview(b"")]) == [Write.FULL]
    assert bench.breaker.remove([b"k"]) == [False]
    assert bench.breaker.statistics() == StoreStatistics(1, 2, 3, 4)
    bench.breaker.close()
    assert bench.store.closed


def test_two_failures_do_not_open_it_and_a_success_starts_the_count_again(bench: Bench) -> None:
    bench.fail(2)
    assert not bench.breaker.is_open
    bench.store.error = None
    bench.breaker.exists([b"k"])
    bench.fail(2)
    assert not bench.breaker.is_open


def test_third_failure_in_a_row_opens_it_and_the_store_is_left_alone(bench: Bench) -> None:
    bench.fail(3)
    assert bench.breaker.is_open
    calls: list[Callable[[], object]] = [
        lambda: bench.breaker.exists([b"k"]),
        lambda: bench.breaker.read_into([b"k"], [memoryview(b"")]),
        lambda: bench.breaker.write([b"k"], [None], [memoryview(b"")]),
        lambda: bench.breaker.remove([b"k"]),
    ]
    for call in calls:
        with pytest.raises(TierUnavailable, match="switched off after 3 failures in a row"):
            call()
    assert bench.store.calls == 3
    assert bench.breaker.statistics() == StoreStatistics(1, 2, 3, 4)


def test_one_call_each_while_probes_an_open_store(bench: Bench) -> None:
    bench.fail(3)
    bench.now += 4.9
    with pytest.raises(TierUnavailable, match="switched off"):
        bench.breaker.exists([b"k"])
    bench.now += 0.2
    with pytest.raises(TierUnavailable, match="the disk is gone"):
        bench.breaker.exists([b"k"])
    with pytest.raises(TierUnavailable, match="switched off after 4 failures"):
        bench.breaker.exists([b"k"])
    assert bench.store.calls == 4


def test_probe_that_succeeds_closes_it(bench: Bench) -> None:
    bench.fail(3)
    bench.store.error = None
    bench.now += 5.1
    assert bench.breaker.exists([b"k"]) == [True]
    assert not bench.breaker.is_open
    assert bench.breaker.exists([b"k"]) == [True]
    assert bench.store.calls == 5


def test_bug_in_the_store_is_not_an_outage(bench: Bench) -> None:
    bench.store.error = InvariantViolated("a bug")
    for _ in range(4):
        with pytest.raises(InvariantViolated, match="a bug"):
            bench.breaker.exists([b"k"])
    assert not bench.breaker.is_open
