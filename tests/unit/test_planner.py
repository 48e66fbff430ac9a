"""How much of what was found is loaded: what pays, what comes in time, and trying again."""

import time
from collections.abc import Callable

import numpy as np

from kvstrata.manager.planner import Plan, Planner, Reason
from kvstrata.manager.writes import LowerTier
from kvstrata.transfer.read_meter import ReadCost

HERE, DISK, REMOTE = 0, 1, 2
TIERS: tuple[LowerTier, ...] = ("disk", "remote")


def planner(
    disk: ReadCost | None = None,
    remote: ReadCost | None = None,
    timeout_seconds: float = 100.0,
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[list[int], float | None], Plan]:
    made = Planner(
        {"disk": lambda: disk, "remote": lambda: remote},
        load_timeout_seconds=timeout_seconds,
        clock=clock,
    )
    return lambda sources, rate: made.plan(np.array(sources, np.uint8), TIERS, rate)


def test_what_is_in_host_memory_is_taken_whatever_the_engine_can_do() -> None:
    plan = planner()([HERE] * 5, 1e9)
    assert (plan.blocks, plan.reason, plan.load_seconds) == (5, Reason.ALL, 0.0)


def test_nothing_found_is_nothing_taken() -> None:
    assert planner()([], 10.0).blocks == 0


def test_tier_that_was_never_measured_is_tried() -> None:
    assert planner()([DISK] * 3, 1e9).blocks == 3


def test_engine_that_was_never_measured_loads() -> None:
    plan = planner(ReadCost(1.0, 1.0))([DISK] * 3, None)
    assert plan == Plan(3, Reason.ALL, 4.0, None)


def test_blocks_that_are_computed_sooner_than_read_are_computed() -> None:
    take = planner(ReadCost(0.0, 0.2))
    assert take([HERE, HERE, DISK, DISK], 10.0)[:2] == (2, Reason.RECOMPUTE)
    assert take([HERE, HERE, DISK, DISK], 4.0)[:2] == (4, Reason.ALL)


def test_block_in_between_is_read_for_the_sake_of_those_behind_it() -> None:
    """Reading one block takes longer than computing it, but not than computing all that follow."""
    plan = planner(ReadCost(0.0, 0.2))([DISK] + [HERE] * 9, 10.0)
    assert plan == Plan(10, Reason.ALL, 0.2, 1.0)


def test_queue_of_a_tier_counts_once_and_only_if_it_is_needed() -> None:
    take = planner(ReadCost(0.5, 0.01))
    assert take([HERE] * 4, 10.0).blocks == 4
    assert take([HERE] * 2 + [DISK] * 3, 10.0)[:2] == (2, Reason.RECOMPUTE)
    assert take([HERE] * 2 + [DISK] * 7, 10.0)[:2] == (9, Reason.ALL)


def test_two_tiers_add_up() -> None:
    plan = planner(ReadCost(1.0, 0.5), ReadCost(2.0, 1.0))([DISK, REMOTE, DISK], None)
    assert plan.load_seconds == 1.0 + 2 * 0.5 + 2.0 + 1.0


def test_what_would_come_after_the_timeout_is_left() -> None:
    plan = planner(ReadCost(0.0, 1.0), timeout_seconds=2.5)([HERE, DISK, DISK, DISK], None)
    assert plan[:3] == (3, Reason.TOO_LATE, 2.0)


def test_tier_that_lost_for_a_while_is_tried_again() -> None:
    now = [1000.0]
    take = planner(ReadCost(0.0, 1.0), clock=lambda: now[0])
    assert take([DISK] * 2, 10.0)[:2] == (0, Reason.RECOMPUTE)
    now[0] += 29.0
    assert take([DISK] * 2, 10.0)[:2] == (0, Reason.RECOMPUTE)
    now[0] += 2.0
    assert take([DISK] * 2, 10.0)[:2] == (2, Reason.PROBE)
    assert take([DISK] * 2, 10.0)[:2] == (0, Reason.RECOMPUTE)
