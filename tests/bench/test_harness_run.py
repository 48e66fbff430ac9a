"""What a run keeps, and how it goes on."""

import json
import os
import random
from pathlib import Path

import pytest

from kvstrata.bench.processes import cpu_seconds_of, usage_of
from kvstrata.bench.record import Measured, Options, Rates, RunFolder
from kvstrata.bench.workloads import NAMES, workloads
from kvstrata.bench.workloads.workload import Scale
from kvstrata.core.errors import ConfigError

OPTIONS = Options("quick", ("single",), ("none",))
SCALE = Scale(
    prompt_tokens=(1026, 2050),
    users=6,
    rates=(0.5, 2.0),
    seconds=10.0,
    requests=20,
    vocabulary=1000,
    most_tokens=8448,
    cold_seconds=0.5,
)


def measured(number: int, seconds: float) -> Measured:
    return Measured("single", number, 0, "miss", "none", seconds, [], {}, {})


def test_a_round_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", OPTIONS)
    folder.append(Rates("single", 0, {}))
    folder.append(measured(0, 1.0))
    assert not folder.is_done("single", 0)
    assert folder.measured() == []

    again = RunFolder(tmp_path / "run", OPTIONS)
    again.append(Rates("single", 0, {}))
    again.append(measured(0, 2.0))
    again.end_round("single", 0)
    assert again.is_done("single", 0)
    assert [row.seconds for row in again.measured()] == [2.0]
    assert len(again.rates()) == 1


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, OPTIONS)
    folder.append(Rates("single", 0, {}))
    folder.append(measured(0, 1.0))
    file = tmp_path / "measured.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    folder.append(Rates("single", 0, {}))
    folder.append(measured(0, 3.0))
    folder.end_round("single", 0)
    assert [row.seconds for row in folder.measured()] == [3.0]


def test_a_line_of_something_else_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, OPTIONS)
    (tmp_path / "measured.jsonl").write_text('{"type": "Other"}\n')
    with pytest.raises(ConfigError, match=r"measured\.jsonl:1"):
        folder.measured()


def test_other_contenders_are_refused(tmp_path: Path) -> None:
    RunFolder(tmp_path, OPTIONS)
    other = Options("quick", ("single",), ("none", "kvstrata"))
    with pytest.raises(ConfigError, match=r"contenders was \('none',\) and is"):
        RunFolder(tmp_path, other)


def test_more_rounds_and_other_workloads_go_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, OPTIONS)
    folder.append(Rates("single", 0, {}))
    folder.end_round("single", 0)
    more = RunFolder(tmp_path, Options("quick", ("single", "chat"), ("none",), rounds=7))
    assert more.is_done("single", 0)
    assert not more.is_done("chat", 0)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("dear")
    with pytest.raises(ConfigError, match="holds files and no run"):
        RunFolder(tmp_path, OPTIONS)


@pytest.mark.parametrize("name", NAMES)
def test_rounds_are_the_same_for_all_and_share_nothing(name: str) -> None:
    workload = workloads()[name]
    one, same, other = (
        list(workload.steps(random.Random(seed), SCALE)) for seed in ("1", "1", "2")
    )
    assert one == same
    texts = [
        {tuple(talk.turns[0].tokens[:64]) for step in steps for talk in step.traffic.conversations}
        for steps in (one, other)
    ]
    assert texts[0]
    assert not texts[0] & texts[1]
    longest = max(
        sum(len(turn.tokens) + turn.answer_tokens for turn in talk.turns)
        for step in one
        for talk in step.traffic.conversations
    )
    assert longest <= SCALE.most_tokens


def test_arrivals_come_at_their_rate() -> None:
    *_, fast = workloads()["arrivals"].steps(random.Random(3), SCALE)
    due = [talk.due_seconds or 0.0 for talk in fast.traffic.conversations]
    assert due == sorted(due)
    assert len(due) == 40
    assert due[-1] == pytest.approx(SCALE.seconds, rel=0.6)


def test_what_prompts_of_a_trace_share_is_shared_in_proportion(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1536, "output_length": 1, "hash_ids": [1, 2, 3]},
        {"timestamp": 1000, "input_length": 1536, "output_length": 1, "hash_ids": [1, 2, 4]},
        {"timestamp": 4000, "input_length": 768, "output_length": 1, "hash_ids": [9, 8]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (step,) = workloads(path)["trace"].steps(random.Random(0), SCALE)
    one, two, other = (talk.turns[0].tokens for talk in step.traffic.conversations)
    shared = next(n for n, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
    assert shared == pytest.approx(len(one) * 2 / 3, rel=0.05)
    assert len(other) == pytest.approx(len(one) / 2, rel=0.05)
    assert other[:8] != one[:8]
    due = [talk.due_seconds for talk in step.traffic.conversations]
    assert due == [0.0, pytest.approx((due[2] or 0.0) / 4), due[2]]


def test_an_event_log_is_no_trace_to_replay(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.write_text("not a trace\n")
    with pytest.raises(ConfigError):
        next(workloads(log)["trace"].steps(random.Random(0), SCALE))


def test_usage_of_this_process() -> None:
    usage = usage_of(os.getpid(), [])
    assert usage["client"].cpu_seconds > 0
    assert usage["client"].memory_bytes > 1 << 20
    assert usage["server"].memory_bytes == 0
    assert cpu_seconds_of([os.getpid()]) >= usage["client"].cpu_seconds
    assert usage_of(os.getpid(), [os.getpid()])["server"].memory_bytes > 1 << 20
