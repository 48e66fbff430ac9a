"""What a tier's reads say about the next ones."""

import time

import pytest

from kvstrata.transfer.read_meter import ReadCost, ReadMeter


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return clock


def test_nothing_is_known_before_the_first_block(now: list[float]) -> None:
    meter = ReadMeter()
    meter.asked(3)
    assert meter.cost() is None
    now[0] += 1.0
    meter.ended(3, 0)
    assert meter.cost() is None


def test_cost_is_the_time_in_which_blocks_were_asked_for(now: list[float]) -> None:
    meter = ReadMeter()
    meter.asked(4)
    now[0] += 2.0
    meter.ended(4, 4)
    now[0] += 100.0  # nobody asks: that says nothing about the tier
    assert meter.cost() == ReadCost(0.0, 0.5)
    meter.asked(4)
    assert meter.cost() == ReadCost(2.0, 0.5)


def read(meter: ReadMeter, now: list[float], blocks: int, seconds: float) -> None:
    meter.asked(blocks)
    now[0] += seconds
    meter.ended(blocks, blocks)


def test_latency_is_told_from_throughput(now: list[float]) -> None:
    """Single blocks that take long say nothing against reading many at once."""
    meter = ReadMeter()
    for blocks in (1, 1, 64, 1, 16, 128):
        read(meter, now, blocks, 0.02 + blocks * 0.001)
    assert meter.cost() == pytest.approx(ReadCost(0.02, 0.001))


def test_reads_of_one_size_are_all_throughput(now: list[float]) -> None:
    meter = ReadMeter()
    for _ in range(5):
        read(meter, now, 10, 0.1)
    assert meter.cost() == pytest.approx(ReadCost(0.0, 0.01))


def test_noise_makes_no_cost_negative(now: list[float]) -> None:
    meter = ReadMeter()
    read(meter, now, 1, 5.0)
    read(meter, now, 100, 0.1)
    cost = meter.cost()
    assert cost is not None
    assert min(cost) >= 0


def test_later_measurements_weigh_more(now: list[float]) -> None:
    meter = ReadMeter()
    read(meter, now, 4, 4.0)
    for _ in range(60):
        read(meter, now, 4, 1.0)
    cost = meter.cost()
    assert cost is not None
    assert cost.block_seconds == pytest.approx(0.25, rel=1e-2)


def test_queue_that_never_empties_is_measured_all_the_same(now: list[float]) -> None:
    meter = ReadMeter()
    meter.asked(100)
    now[0] += 1.0
    meter.ended(50, 50)
    assert meter.cost() == ReadCost(1.0, 0.02)
