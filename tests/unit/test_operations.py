"""Timed stores fill the histogram of their tier."""

from functools import partial

import pytest
from prometheus_client import CollectorRegistry

from kvstrata.observe.operations import OperationMetrics
from kvstrata.storage.wrap import TimedStore
from kvstrata.testing import MemoryStore


def test_two_tiers_are_told_apart() -> None:
    registry = CollectorRegistry()
    metrics = OperationMetrics(registry)
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

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kvstrata_store_operation_{name}", labels)

    assert value("bytes_total", tier="disk", operation="write") == 4
    assert value("seconds_sum", tier="disk", operation="write") == 0.002
    assert value("seconds_bucket", tier="disk", operation="write", le="0.001") == 0
    assert value("seconds_bucket", tier="disk", operation="write", le="0.003") == 1
    assert value("seconds_sum", tier="remote", operation="exists") == 0.5
    assert value("bytes_total", tier="remote", operation="exists") == 0
    assert value("seconds_count", tier="remote", operation="remove") == 1
    assert [count[:5] for count in metrics.snapshot()] == [
        ("disk", "write", 1, 0.002, 4),
        ("remote", "exists", 1, 0.5, 0),
        ("remote", "remove", 1, pytest.approx(0.1), 0),
    ]
    within = metrics.snapshot()[0].within
    assert within == [0] * 5 + [1] * 9  # of 0.003 seconds and more


@pytest.mark.parametrize("half", ["_seconds", "_bytes"])
def test_call_that_is_half_counted_is_left_out(half: str) -> None:
    """The I/O threads count while the report is made."""
    metrics = OperationMetrics(CollectorRegistry())
    metrics.observe("disk", "read", 0.5, 100)
    getattr(metrics, half).labels("disk", "write")
    assert [(c.tier, c.operation) for c in metrics.snapshot()] == [("disk", "read")]
