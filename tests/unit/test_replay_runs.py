"""Many replays at once, and which sizes reach a goal."""

from pathlib import Path

import pytest
from tests.traces import spool

from kvstrata.core.errors import ConfigError
from kvstrata.core.layout import ElementType
from kvstrata.replay.cost import Costs, Model, Rates
from kvstrata.replay.outcome import OPTIMUM, Outcome, cheapest
from kvstrata.replay.reuse import find_reuse
from kvstrata.replay.runs import Run, Study, run_all
from kvstrata.replay.simulator import CachePlan
from kvstrata.replay.sizes import Sizes

COSTS = Costs(Rates(), tokens_per_block=10, block_bytes=1000)


def study(folder: Path) -> Study:
    made = spool(folder, [[n % 5, n % 5 + 10] for n in range(300)])
    return Study(made, find_reuse(made), COSTS)


@pytest.mark.parametrize("jobs", [1, 2])
def test_runs_give_their_outcomes_in_order_however_many_at_a_time(
    tmp_path: Path, jobs: int
) -> None:
    sizes = [Sizes(2000, 0), Sizes(10_000, 0), Sizes(2000, 10_000)]
    runs: list[Run] = [*(CachePlan("lru", each) for each in sizes), *sizes]
    told: list[int] = []
    outcomes = run_all(study(tmp_path), runs, jobs=jobs, on_event=told.append)
    assert [(each.policy, each.sizes) for each in outcomes] == [
        ("lru", sizes[0]),
        ("lru", sizes[1]),
        ("lru", sizes[2]),
        (OPTIMUM, sizes[0]),
        (OPTIMUM, sizes[1]),
        (OPTIMUM, sizes[2]),
    ]
    # Five prompts in turn: LRU with room for one of them never has the next; the optimum keeps one.
    assert [each.hits for each in outcomes] == [0, 590, 590, 118, 590, 590]
    assert told == sorted(told)
    assert told[-1] == 6 * 300


def test_an_error_in_another_process_is_raised_here(tmp_path: Path) -> None:
    broken = study(tmp_path)
    broken.spool.records.unlink()
    with pytest.raises(OSError, match="No such file"):
        run_all(broken, [Sizes(2000, 0), Sizes(3000, 0)], jobs=2)


def outcome(host: int, disk: int, hits: int) -> Outcome:
    return Outcome("lru", Sizes(host, disk), host_hits=hits, disk_hits=0)


def test_sizes_that_others_undercut_are_no_answer() -> None:
    tried = [
        outcome(4, 0, 70),
        outcome(8, 0, 90),
        outcome(16, 0, 95),
        outcome(2, 50, 60),
        outcome(4, 50, 80),
        outcome(8, 50, 96),
        outcome(2, 100, 85),
        outcome(4, 100, 97),
    ]
    assert [each.sizes for each in cheapest(tried, 80)] == [
        Sizes(8, 0),
        Sizes(4, 50),
        Sizes(2, 100),
    ]
    assert [each.sizes for each in cheapest(tried, 90)] == [Sizes(8, 0), Sizes(4, 100)]
    assert cheapest(tried, 98) == []


def test_bytes_of_a_block() -> None:
    assert Model().bytes_per_block(16) == 2 * 1024 * 1024
    assert Model(layers=61, kv_heads=1, head_size=576, is_mla=True).bytes_per_block(64) == 4_497_408
    assert Model(dtype="float8_e4m3fn").bytes_per_block(16) == 1024 * 1024
    assert Model(kv_bytes_per_token=3).bytes_per_block(7) == 21
    with pytest.raises(ConfigError, match="unknown element type 'bf16'") as caught:
        Model(dtype="bf16").bytes_per_block(16)
    assert ElementType.BFLOAT16.label in str(caught.value.hint)
