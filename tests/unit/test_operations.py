"""Timed stores fill the histogram of their tier."""

from functools import partial

import pytest
from tests.unit.threads import in_turns

from kvstrata.observe.histogram import SECONDS_BUCKETS
from kvstrata.observe.operations import OperationCounts, OperationMetrics
from kvstrata.storage.wrap import TimedStore
from kvstrata.testing import MemoryStore


def test_two_tiers_are_told_apart() -> None:
    metrics = OperationMetrics()
    ticks = iter([0.0, 0.002, 1.0, 1.5, 2.0, 2.1])
    disk, remote = (
        TimedStore(
            MemoryStore(block_bytes=4, capacity_blocks=1),
            partial(metrics.observe, tier),
            clock=lambda: next(ticks),
        )
        for tier in ("disk", "remote")
    )
    disk.write([b"k" * 48], [None], [memoryview(b"abcd")])
    remote.exists([b"k" * 48])
    remote.remove([])
    assert [count[:5] for count in metrics.snapshot()] == [
        ("disk", "write", 1, 0.002, 4),
        ("remote", "exists", 1, 0.5, 0),
        ("remote", "remove", 1, pytest.approx(0.1), 0),
    ]
    assert metrics.snapshot()[0].within == [0] * 5 + [1] * 9  # of 0.003 seconds and more


def test_a_call_that_takes_as_long_as_a_bucket_is_within_it() -> None:
    metrics = OperationMetrics()
    for seconds in (SECONDS_BUCKETS[3], 2 * SECONDS_BUCKETS[-1]):
        metrics.observe("disk", "read", seconds, 100)
    within = [0] * 3 + [1] * (len(SECONDS_BUCKETS) - 3)
    seconds = SECONDS_BUCKETS[3] + 2 * SECONDS_BUCKETS[-1]
    assert metrics.snapshot() == [OperationCounts("disk", "read", 2, seconds, 200, within)]


def test_calls_of_many_threads_are_all_counted_and_each_as_a_whole() -> None:
    """The I/O threads count while the report is made."""
    metrics = OperationMetrics()

    def call() -> None:
        for _ in range(2000):
            metrics.observe("disk", "read", 1.0, 3)

    def look() -> None:
        for counted in metrics.snapshot():
            assert counted.moved_bytes == 3 * counted.calls == 3 * counted.seconds

    in_turns([call] * 4, look)
    (counted,) = metrics.snapshot()
    assert counted.calls == 8000
