"""The wrappers: what each adds to the store inside, with clocks of their own."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from kvstrata.core.errors import InvariantViolated, TierUnavailable
from kvstrata.core.types import NamespaceId, Read, StoreKey, Write
from kvstrata.storage.call_time import call_within, end_within
from kvstrata.storage.store import StoreStatistics
from kvstrata.storage.wrap import BreakerStore, LimitedStore, RetryStore, TimedStore
from kvstrata.testing import Fault, FlakyStore, MemoryStore, SlowStore


class Fickle:
    """A store that answers, or raises what it is told."""

    def __init__(self) -> None:
        self.calls = 0
        self.error: Exception | None = None
        self.closed = False
        self.meanwhile: Callable[[], None] = lambda: None

    def _answer(self) -> None:
        self.calls += 1
        self.meanwhile()
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

    def drop_namespace(self, namespace_id: NamespaceId) -> int:
        self._answer()
        return 0

    def statistics(self) -> StoreStatistics:
        return StoreStatistics(1, 2, 3, 4)

    def close(self) -> None:
        self.closed = True


class Bench:
    def __init__(self) -> None:
        self.now = 50.0
        self.store = Fickle()
        self.breaker = BreakerStore(
            self.store, name="disk", failures=3, retry_seconds=5.0, clock=lambda: self.now
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


def test_it_tells_whether_a_call_would_be_refused(bench: Bench) -> None:
    told = [bench.breaker.refuses]
    bench.fail(3)
    for _ in range(2):
        bench.now += 4.9
        told.append(bench.breaker.refuses)
    bench.store.error = None
    probe = Held(bench)
    told.append(bench.breaker.refuses)
    probe.end()
    told.append(bench.breaker.refuses)
    assert told == [False, True, False, True, False]


def test_probe_that_succeeds_closes_it(bench: Bench) -> None:
    bench.fail(3)
    bench.store.error = None
    bench.now += 5.1
    assert bench.breaker.exists([b"k"]) == [True]
    assert not bench.breaker.is_open
    assert bench.breaker.exists([b"k"]) == [True]
    assert bench.store.calls == 5


def test_that_it_opens_and_closes_is_logged_once_each(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        bench.fail(3)
        bench.now += 5.1
        bench.fail(1)
        bench.now += 5.1
        bench.store.error = None
        for _ in range(2):
            bench.breaker.exists([b"k"])
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        (
            "WARNING",
            "the disk tier is switched off after 3 failures in a row: tried again every 5 s",
        ),
        ("INFO", "the disk tier answers again: switched on"),
    ]


def test_bug_in_the_store_is_not_an_outage(bench: Bench) -> None:
    bench.store.error = InvariantViolated("a bug")
    for _ in range(4):
        with pytest.raises(InvariantViolated, match="a bug"):
            bench.breaker.exists([b"k"])
    assert not bench.breaker.is_open


def test_store_without_room_is_not_switched_off(bench: Bench) -> None:
    bench.store.error = TierUnavailable("no room", cause="full")
    for _ in range(4):
        with pytest.raises(TierUnavailable, match="no room"):
            bench.breaker.write([b"k"], [None], [memoryview(b"")])
    assert not bench.breaker.is_open
    bench.fail(2)
    bench.store.error = TierUnavailable("no room", cause="full")
    with pytest.raises(TierUnavailable, match="no room"):
        bench.breaker.write([b"k"], [None], [memoryview(b"")])
    bench.fail(1)
    assert bench.breaker.is_open, "that there is no room was taken for an answer"


def test_a_probe_that_finds_no_room_leaves_it_open_and_lets_the_next_one_probe(
    bench: Bench,
) -> None:
    bench.fail(3)
    bench.now += 5.1
    bench.store.error = TierUnavailable("no room", cause="full")
    with pytest.raises(TierUnavailable, match="no room"):
        bench.breaker.write([b"k"], [None], [memoryview(b"")])
    assert bench.breaker.is_open
    bench.store.error = None
    assert bench.breaker.exists([b"k"]) == [True]
    assert not bench.breaker.is_open


class Held:
    """A call that is under way on a thread until it is let go."""

    def __init__(self, bench: Bench) -> None:
        self.go = threading.Event()
        self.error: Exception | None = None
        inside = threading.Event()

        def hang() -> None:
            inside.set()
            assert self.go.wait(10)  # seconds; nothing here takes one
            if self.error is not None:
                raise self.error

        bench.store.meanwhile = hang
        self.thread = threading.Thread(target=self._call, args=(bench.breaker,))
        self.thread.start()
        assert inside.wait(10)
        bench.store.meanwhile = lambda: None

    def _call(self, breaker: BreakerStore) -> None:
        with suppress(TierUnavailable):
            breaker.exists([b"k"])

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self.go.set()
        self.thread.join(10)
        assert not self.thread.is_alive()


def test_only_one_call_probes_at_a_time_however_long_it_takes(bench: Bench) -> None:
    bench.fail(3)
    bench.store.error = None
    bench.now += 5.1
    probe = Held(bench)
    bench.now += 20.0
    for _ in range(3):
        with pytest.raises(TierUnavailable, match="is under way"):
            bench.breaker.exists([b"k"])
    assert bench.store.calls == 4
    probe.end()
    assert bench.breaker.exists([b"k"]) == [True]


def test_of_many_threads_exactly_one_probes(bench: Bench) -> None:
    bench.fail(3)
    bench.now += 5.1
    start = threading.Barrier(8)

    def call(_: int) -> None:
        start.wait(10)
        with suppress(TierUnavailable):
            bench.breaker.exists([b"k"])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(8)))
    assert bench.store.calls == 4


def test_a_probe_that_ends_with_a_bug_lets_the_next_one_probe(bench: Bench) -> None:
    bench.fail(3)
    bench.now += 5.1
    bench.store.error = InvariantViolated("a bug")
    with pytest.raises(InvariantViolated):
        bench.breaker.exists([b"k"])
    assert bench.breaker.is_open
    bench.store.error = None
    assert bench.breaker.exists([b"k"]) == [True]
    assert not bench.breaker.is_open


def test_a_call_from_before_it_opened_does_not_close_it(bench: Bench) -> None:
    early = Held(bench)
    bench.fail(3)
    bench.store.error = None
    early.end()
    assert bench.breaker.is_open


def test_a_call_from_before_it_opened_does_not_delay_the_probe(bench: Bench) -> None:
    early = Held(bench)
    bench.fail(3)
    bench.store.error = None
    bench.now += 4.9
    early.end(TierUnavailable("late"))
    bench.now += 0.2
    assert bench.breaker.exists([b"k"]) == [True]


def test_calls_that_hang_open_it_while_they_hang(bench: Bench) -> None:
    hanging = [Held(bench) for _ in range(3)]
    bench.now += 29.9
    assert not bench.breaker.is_open
    bench.now += 0.2
    with pytest.raises(TierUnavailable, match="switched off after 3 failures"):
        bench.breaker.exists([b"k"])
    for call in hanging:
        call.end()


def test_calls_that_hang_are_seen_without_another_call(bench: Bench) -> None:
    hanging = [Held(bench) for _ in range(3)]
    bench.now += 30.1
    assert bench.breaker.is_open
    for call in hanging:
        call.end()
    assert bench.breaker.is_open


@pytest.mark.parametrize("callers", [1, 2])
def test_fewer_calls_that_hang_than_failures_open_it_in_time(bench: Bench, callers: int) -> None:
    hanging = [Held(bench) for _ in range(callers)]
    for _ in range(3):
        bench.now += 30.1
        is_open = bench.breaker.is_open
    assert is_open
    bench.now += 5.1
    assert bench.breaker.read_into([b"k"], [memoryview(bytearray(4))]) == [Read.MISS]
    assert bench.breaker.exists([b"k"]) == [True]
    for _ in range(5):  # however long those from before it opened still hang
        bench.now += 30.1
        assert not bench.breaker.is_open
    for call in hanging:
        call.end()
    assert not bench.breaker.is_open


def test_slow_answers_count_as_failures_and_are_given(bench: Bench) -> None:
    def slow() -> None:
        bench.now += 30.1

    bench.store.meanwhile = slow
    for _ in range(3):
        assert bench.breaker.exists([b"k"]) == [True]
    assert bench.breaker.is_open


def test_a_probe_that_is_slow_does_not_close_it(bench: Bench) -> None:
    bench.fail(3)
    bench.store.error = None
    bench.now += 5.1
    probe = Held(bench)
    bench.now += 30.1
    probe.end()
    assert bench.breaker.is_open
    bench.now += 5.1
    assert bench.breaker.exists([b"k"]) == [True]
    assert not bench.breaker.is_open


class Retrying:
    """A retry store whose clock goes on by its pauses, and by *call_seconds* with each call."""

    def __init__(self, faults: Sequence[Fault], call_seconds: float = 0.0) -> None:
        self.now = 10.0
        self.pauses: list[float] = []
        memory = MemoryStore(block_bytes=4, capacity_blocks=2)
        self.flaky = FlakyStore(memory, faults)
        slow = SlowStore(self.flaky, call_seconds, sleep=self.pass_time)
        self.store = RetryStore(slow, clock=lambda: self.now, sleep=self.pause)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


KEY = b"k" * 48


def test_a_call_is_repeated_until_it_succeeds() -> None:
    retrying = Retrying([Fault.BEFORE, Fault.BEFORE])
    assert retrying.store.exists([KEY]) == [False]
    assert retrying.flaky.calls == 3
    assert 0 <= retrying.pauses[0] <= 0.05
    assert 0 <= retrying.pauses[1] <= 0.1


def test_the_last_attempt_raises_what_the_store_raised() -> None:
    retrying = Retrying([Fault.BEFORE] * 3)
    with pytest.raises(TierUnavailable, match="away"):
        retrying.store.exists([KEY])
    assert retrying.flaky.calls == 3


def test_a_call_that_was_slow_to_fail_is_not_repeated() -> None:
    retrying = Retrying([Fault.BEFORE] * 3, call_seconds=2.1)
    with pytest.raises(TierUnavailable):
        retrying.store.exists([KEY])
    assert retrying.flaky.calls == 1
    assert retrying.pauses == []


def test_no_attempt_is_begun_that_could_not_end_in_time() -> None:
    """Each takes 0.9 of 2 seconds, so there is time for two."""
    retrying = Retrying([Fault.BEFORE] * 3, call_seconds=0.9)
    with pytest.raises(TierUnavailable):
        retrying.store.exists([KEY])
    assert retrying.flaky.calls == 2
    assert retrying.now <= 12.0


def test_the_longest_attempt_counts() -> None:
    now, seconds = 0.0, iter([0.7, 0.1, 0.1])
    inner = Fickle()
    inner.error = TierUnavailable("away")

    def pass_time() -> None:
        nonlocal now
        now += next(seconds)

    inner.meanwhile = pass_time
    store = RetryStore(
        inner, deadline_seconds=1.4, backoff_seconds=0, clock=lambda: now, sleep=lambda _: None
    )
    with pytest.raises(TierUnavailable):
        store.exists([KEY])
    assert inner.calls == 2


def test_wrong_credentials_are_not_tried_again() -> None:
    """Servers lock who tries them often."""
    inner = Fickle()
    inner.error = TierUnavailable("no", cause="credentials")
    with pytest.raises(TierUnavailable):
        RetryStore(inner).exists([KEY])
    assert inner.calls == 1


def test_a_bug_is_not_repeated() -> None:
    retrying = Retrying([])
    with pytest.raises(InvariantViolated):
        retrying.store.exists([b"short"])
    assert retrying.flaky.calls == 1


def test_a_closed_store_is_not_asked_again() -> None:
    retrying = Retrying([])
    retrying.store.close()
    with pytest.raises(TierUnavailable, match="closed"):
        retrying.store.exists([KEY])
    assert retrying.flaky.calls == 1


def test_a_repeated_write_finds_what_the_first_attempt_stored() -> None:
    retrying = Retrying([Fault.AFTER])
    assert retrying.store.write([KEY], [None], [memoryview(b"abcd")]) == [Write.EXISTS]
    buffer = memoryview(bytearray(4))
    assert retrying.store.read_into([KEY], [buffer]) == [Read.HIT]
    assert bytes(buffer) == b"abcd"


def test_each_call_is_timed_with_the_bytes_that_it_moved() -> None:
    seen: list[tuple[str, float, int]] = []
    ticks = iter([1.0, 1.5, 2.0, 2.25, 3.0, 3.125, 4.0, 4.5, 5.0, 6.0])
    flaky = FlakyStore(MemoryStore(block_bytes=4, capacity_blocks=2))
    store = TimedStore(flaky, lambda *call: seen.append(call), clock=lambda: next(ticks))
    two, content = [KEY, b"l" * 48], memoryview(b"abcd")
    store.write([*two, KEY], [None] * 3, [content] * 3)
    store.read_into([*two, b"m" * 48], [memoryview(bytearray(4))] * 3)
    store.exists(two)
    store.remove(two)
    flaky.plan = iter([Fault.AFTER])
    with pytest.raises(TierUnavailable):
        store.write(two, [None] * 2, [content] * 2)
    assert seen == [
        ("write", 0.5, 8),
        ("read", 0.25, 8),
        ("exists", 0.125, 0),
        ("remove", 0.5, 0),
        ("write", 1.0, 0),
    ]


def test_questions_that_succeed_do_not_hide_that_no_block_moves() -> None:
    """Over a link that is nearly dead a question gets through, and no block does."""
    now = 50.0
    inner = FlakyStore(MemoryStore(block_bytes=4, capacity_blocks=8))
    breaker = BreakerStore(inner, failures=3, retry_seconds=5, clock=lambda: now)
    wanted, buffer = bytes(48), memoryview(bytearray(4))
    for _ in range(3):
        assert breaker.exists([wanted]) == [False]
        inner.plan = iter([Fault.BEFORE])
        with pytest.raises(TierUnavailable):
            breaker.read_into([wanted], [buffer])
    assert breaker.refuses
    now += 5.1
    assert breaker.exists([wanted]) == [False]  # a probe, which proves little
    assert breaker.is_open
    assert breaker.read_into([wanted], [buffer]) == [Read.MISS]
    assert not breaker.is_open


class Timed(MemoryStore):
    """When each call had to end, of calls that may take an hour."""

    def __init__(self) -> None:
        super().__init__(block_bytes=4, capacity_blocks=2)
        self.ends: list[float] = []

    def exists(self, keys: Sequence[StoreKey]) -> list[bool]:
        self.ends.append(end_within(3600.0))
        return super().exists(keys)

    def drop_namespace(self, namespace_id: NamespaceId) -> int:
        self.ends.append(end_within(3600.0))
        return super().drop_namespace(namespace_id)


def test_a_call_has_its_limit_and_the_next_one_a_limit_of_its_own() -> None:
    timed = Timed()
    store = LimitedStore(timed, 60.0)
    before = time.monotonic()
    store.exists([KEY])
    between = time.monotonic()
    store.exists([KEY])
    first, second = timed.ends
    assert before + 60.0 <= first <= between + 60.0 <= second
    assert end_within(3600.0) >= between + 3600.0


def test_a_limit_within_another_does_not_extend_it() -> None:
    timed = Timed()
    with call_within(1.0):
        end = end_within(3600.0)
        LimitedStore(timed, 60.0).exists([KEY])
        with call_within(0.0):
            assert end_within(3600.0) < end
        assert end_within(3600.0) == end
    assert timed.ends == [end]


def test_a_namespace_is_dropped_without_a_limit() -> None:
    timed = Timed()
    before = time.monotonic()
    LimitedStore(timed, 60.0).drop_namespace(KEY[:16])
    assert timed.ends[0] >= before + 3600.0
