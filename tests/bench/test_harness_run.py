"""What a run keeps, and how it goes on."""

import asyncio
import io
import json
import os
import random
import re
import subprocess
from pathlib import Path

import pytest

from kvstrata.bench import engine
from kvstrata.bench.contenders import Deployment
from kvstrata.bench.engine import _serve, _Talk
from kvstrata.bench.processes import cpu_seconds_of, usage_of
from kvstrata.bench.record import (
    About,
    Measured,
    Options,
    Rates,
    RunFolder,
    begun_now,
    this_machine,
)
from kvstrata.bench.services import versions
from kvstrata.bench.traffic import Conversation, Turn
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
    whole, _, cut = file.read_bytes()[:-9].rpartition(b"\n")
    assert cut
    file.write_bytes(whole + b"\n" + cut)
    folder.append(Rates("single", 0, {}))
    folder.append(measured(0, 3.0))
    folder.end_round("single", 0)
    assert [row.seconds for row in folder.measured()] == [3.0]


@pytest.mark.parametrize("name", ["options.json", "about.json"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, name: str) -> None:
    folder = RunFolder(tmp_path / "run", OPTIONS)
    folder.describe(About(this_machine("cpu", "0", tmp_path), "a model", 0.5, "none"))
    (folder.path / name).write_text("{")
    with pytest.raises(ConfigError, match=f"{name}: nothing that a run has written"):
        RunFolder(tmp_path / "run", OPTIONS).about()


def test_a_changed_source_is_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = this_machine("cpu", "0", tmp_path)
    assert begun == this_machine("cpu", "0", tmp_path)
    (tmp_path / "__init__.py").write_text("changed = True")
    monkeypatch.setattr("kvstrata.__file__", str(tmp_path / "__init__.py"))
    (difference,) = this_machine("cpu", "0", tmp_path).differences(begun)
    assert difference.startswith("versions was ")


def test_a_run_names_its_command_and_the_commit_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/kvstrata", "bench", "--output", "my run"])
    assert begun_now().command == "kvstrata bench --output 'my run'"
    package = tmp_path / "kvstrata" / "__init__.py"
    package.parent.mkdir()
    package.touch()
    monkeypatch.setattr("kvstrata.__file__", str(package))
    assert begun_now().commit == ""
    git = ("git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x")
    for arguments in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "one")):
        subprocess.run([*git, *arguments], check=True)
    (tmp_path / "elsewhere").touch()
    assert re.fullmatch("[0-9a-f]{7,}", commit := begun_now().commit)
    package.write_text("changed = True")
    assert begun_now().commit == f"{commit}+"


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


def test_a_run_does_not_go_on_with_other_versions_or_another_binding(tmp_path: Path) -> None:
    begun = this_machine("cpu", "0,1", tmp_path, {"lmcache": "0.5.6"})
    folder = RunFolder(tmp_path / "run", OPTIONS)
    folder.check_machine(begun)  # nothing has been measured
    folder.describe(About(begun, "a model", 0.5, "none"))
    folder.check_machine(this_machine("cpu", "0,1", tmp_path, {"lmcache": "0.5.6"}))
    with pytest.raises(ConfigError, match=r"threads_bind was '0,1' and is '0'\n"):
        folder.check_machine(this_machine("cpu", "0", tmp_path, {"lmcache": "0.5.6"}))
    with pytest.raises(ConfigError, match=r"versions was .*0\.5\.6.* and is .*0\.5\.7"):
        folder.check_machine(this_machine("cpu", "0,1", tmp_path, {"lmcache": "0.5.7"}))


def test_the_file_system_of_the_contenders_is_told() -> None:
    """Where files lie in memory a hit on disk is none."""
    assert this_machine("cpu", "0", Path("/dev/shm/run")).files == "tmpfs"
    assert this_machine("cpu", "0", Path("/proc/self")).files == "proc"


def test_versions_of_what_stands_beside_are_told(tmp_path: Path) -> None:
    (tmp_path / "lmcache-9.8.7.dist-info").mkdir()
    (tmp_path / "lmcache-9.8.7.dist-info" / "METADATA").write_text("Name: lmcache\nVersion: 9.8.7")
    found = versions(["lmcache", "valkey"], tmp_path)
    assert found.pop("lmcache") == "9.8.7"
    ((program, version),) = found.items()
    assert program in {"valkey-server", "redis-server"}
    assert version.split(".")[0].isdigit()
    assert versions(["kvstrata"], tmp_path) == {}


def test_turns_behind_one_that_failed_are_failures_too() -> None:
    talk = _Talk(3, Conversation([Turn([1], 1), Turn([2], 1), Turn([3], 1)]))
    talk.next_prompt()
    unasked = talk.given_up()
    assert [(a.conversation, a.turn, a.failure is None) for a in unasked] == [
        (3, 1, False),
        (3, 2, False),
    ]
    assert talk.is_over


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


def test_answers_of_a_trace_are_as_much_shorter_as_its_prompts(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    answers = [0, 100, 400, 1_000_000]
    rows = [
        {"timestamp": n, "input_length": 1536, "output_length": each, "hash_ids": [n, 2, 3]}
        for n, each in enumerate(answers)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (step,) = workloads(path)["trace"].steps(random.Random(0), SCALE)
    turns = [talk.turns[0] for talk in step.traffic.conversations]
    factor = len(turns[0].tokens) / 1536
    expected = [1, round(100 * factor), round(400 * factor), SCALE.most_tokens // 2]
    assert [turn.answer_tokens for turn in turns] == pytest.approx(expected, abs=1)
    assert len(turns[3].tokens) + turns[3].answer_tokens == SCALE.most_tokens


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


@pytest.mark.parametrize(("kind", "expected"), [("cpu", None), ("cuda", 12 * 16 * 1000)])
def test_an_engine_on_an_accelerator_has_a_cache_of_a_given_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, expected: int | None
) -> None:
    """One that measures its room dies if another that starts beside it gives some back."""
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    monkeypatch.setattr(current_platform, "device_type", kind)
    monkeypatch.setattr(AsyncLLM, "from_engine_args", lambda arguments: arguments)
    model = str(tmp_path)
    chosen = engine._start(Deployment("none", "", model, "", 12, 99, 0, 0, 0, 16, 64, 0.1, 1000))
    assert chosen.kv_cache_memory_bytes == expected
    assert chosen.num_gpu_blocks_override == 12
    assert (chosen.gpu_memory_utilization == 0.1) == (kind == "cuda")


def test_an_engine_that_was_given_up_before_its_first_order_ends_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[bool] = []

    class Engine:
        def __init__(self, deployment: Deployment) -> None:
            pass

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(engine, "Engine", Engine)
    deployment = Deployment("none", "", "", "", 0, 0, 0, 0, 0, 1, 0, 0.0, 0)
    asyncio.run(_serve(deployment, io.BytesIO(), replies := io.BytesIO()))
    assert (closed, replies.getvalue()) == ([True], b'{"type":"Ready"}\n')
