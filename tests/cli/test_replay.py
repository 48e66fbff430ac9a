import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.traces import id_line, write_ids
from typer.testing import CliRunner

from kvstrata.cli.main import app
from kvstrata.observe.events import LOG_VERSION, LogHeader, LookupEvent, PutEvent, encode_event

NAMESPACE = "ab" * 16

# Blocks of 512 tokens and 64 MiB. Five prompts of two blocks each, three times over.
FIVE_PROMPTS = [[10 * n, 10 * n + 1] for n in range(5)] * 3


def replay(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["replay", *map(str, arguments)], env={"COLUMNS": "200"})
    return result.exit_code, result.stdout, result.stderr


def replayed(*arguments: str | Path) -> Any:
    code, printed, said = replay(*arguments, "--json", "--jobs", "1")
    assert (code, said) == (0, "")
    return json.loads(printed)


def figures(outcomes: Sequence[dict[str, Any]], name: str) -> list[tuple[Any, ...]]:
    return [(each["policy"], each["host_bytes"] >> 20, each[name]) for each in outcomes]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_ids(tmp_path / "trace.jsonl", FIVE_PROMPTS)


def test_hits_of_each_policy_and_the_optimum_are_printed_as_json(trace: Path) -> None:
    found = replayed(trace, "--host", "256MiB", "--policy", "s3fifo,lru")
    assert found["trace"] == {
        "path": str(trace),
        "format": "mooncake",
        "requests": 15,
        "span_seconds": 14.0,
        "input_tokens": 15 * 1024,
        "tokens_per_block": 512,
        "block_bytes": 64 << 20,
        "lookup_blocks": 30,
        "device_blocks": 0,
        "distinct_blocks": 10,
        "possible_hits": 20,
    }
    policies = [each["policy"] for each in found["outcomes"]]
    assert policies == ["lru", "s3fifo", "optimum"]
    lru, _, optimum = found["outcomes"]
    # Two prompts fit. LRU gives each up before it comes again; the optimum keeps one of them, and
    # half of the time another one.
    assert (lru["host_hits"], lru["saved"], lru["evicted_host"]) == (0, 30, 26)
    assert (optimum["host_hits"], optimum["hit_rate"]) == (8, pytest.approx(8 / 30))
    assert optimum["share_of_possible_hits"] == pytest.approx(8 / 20)
    assert "goal" not in found


def test_a_sweep_says_how_much_memory_reaches_the_goal(trace: Path) -> None:
    found = replayed(trace, "--sweep", "host=128MiB..1GiB", "--goal", "0.75")
    assert figures(found["outcomes"], "host_hits") == [
        ("lru", 128, 0),
        ("lru", 256, 0),
        ("lru", 512, 0),
        ("lru", 1024, 20),
        ("optimum", 128, 4),
        ("optimum", 256, 8),
        ("optimum", 512, 16),
        ("optimum", 1024, 20),
    ]
    assert found["goal"]["answers"] == [
        "lru: 75% of the possible hits (50.0% of blocks) need 1.0 GiB of host memory.",
        "optimum: 75% of the possible hits (50.0% of blocks) need 512.0 MiB of host memory.",
    ]


def test_a_goal_that_no_size_reaches_is_said_so(trace: Path) -> None:
    found = replayed(trace, "--sweep", "host=128MiB..256MiB", "--goal", "1")
    missed = "100% of the possible hits (66.7% of blocks) are not reached"
    assert found["goal"]["answers"] == [
        f"lru: {missed}: 128.0 MiB of host memory give 0%.",
        f"optimum: {missed}: 256.0 MiB of host memory give 40%.",
    ]


def test_a_sweep_of_both_tiers_says_what_may_stand_for_what(trace: Path) -> None:
    found = replayed(
        trace, "--sweep", "host=256MiB..1GiB:2", "--sweep", "disk=512MiB..1GiB", "--goal", "0.9"
    )
    assert found["goal"]["answers"][0] == (
        "lru: 90% of the possible hits (60.0% of blocks) need 1.0 GiB of host memory and 512.0 MiB "
        "of disk, or 256.0 MiB of host memory and 1.0 GiB of disk."
    )


def test_tables_for_people(trace: Path) -> None:
    code, printed, _ = replay(trace, "--host", "1GiB", "--disk", "2GiB", "--jobs", "1")
    assert code == 0
    assert "30 of 512 tokens, 64.0 MiB" in printed
    assert "1.0 GiB of host memory and 2.0 GiB of disk" in printed
    rows = {line[:25].strip(): line[25:].split() for line in printed.splitlines()}
    assert rows["hits, of all blocks"] == ["66.7%", "66.7%"]
    assert rows["from disk"] == ["0.0%"]
    code, printed, _ = replay(trace, "--sweep", "host=512MiB..1GiB", "--jobs", "2")
    assert code == 0
    cells = next(line.split() for line in printed.splitlines() if line.startswith("512.0 MiB"))
    assert cells == ["512.0", "MiB", "0.0%,", "0.0", "s", "53.3%,", "≤", "0.5", "s"]
    assert "need 1.0 GiB of host memory." in printed


def test_without_a_trace_the_sample_is_replayed() -> None:
    code, printed, said = replay("--json", "--jobs", "1", "--host", "1TiB")
    assert code == 0
    assert "the synthetic one" in said
    assert json.loads(printed)["trace"]["requests"] == 2000


def test_the_device_takes_hits_from_us(trace: Path) -> None:
    found = replayed(trace, "--device", "1GiB", "--host", "1GiB")
    assert found["trace"]["device_blocks"] == 20
    assert found["trace"]["possible_hits"] == 0
    assert found["outcomes"][0]["host_hits"] == 0


def test_bytes_are_those_of_the_model(trace: Path) -> None:
    found = replayed(trace, "--layers", "2", "--kv-heads", "1", "--head-size", "64")
    assert found["trace"]["block_bytes"] == 512 * 2 * 2 * 64 * 2
    found = replayed(trace, "--kv-bytes-per-token", "1KiB", "--tokens-per-block", "1024")
    assert (found["trace"]["block_bytes"], found["trace"]["tokens_per_block"]) == (1 << 20, 1024)


def test_a_timed_trace_is_recognized(tmp_path: Path) -> None:
    path = tmp_path / "timed.jsonl"
    lines = [id_line([1, 2, 3], timestamp=second, tokens_per_id=16) for second in (0, 7)]
    path.write_text("\n".join(lines))
    found = replayed(path)
    assert (found["trace"]["format"], found["trace"]["span_seconds"]) == ("timed", 7.0)
    assert found["outcomes"][0]["host_hits"] == 3


def test_an_event_log_brings_its_blocks_along(tmp_path: Path) -> None:
    keys = [f"{n:064x}" for n in range(3)]
    path = tmp_path / "events.jsonl"
    path.write_bytes(
        encode_event(LogHeader(LOG_VERSION, 64, 1 << 20))
        + encode_event(PutEvent(1.0, NAMESPACE, keys[:2]))
        + encode_event(LookupEvent(2.0, NAMESPACE, keys))
    )
    found = replayed(path)
    assert found["trace"]["block_bytes"] == 1 << 20
    assert found["trace"]["requests"] == 1
    assert [each["host_hits"] for each in found["outcomes"]] == [2, 2]


def test_a_sweep_is_drawn(trace: Path, tmp_path: Path) -> None:
    sweep = ["--sweep", "host=128MiB..1GiB", "--sweep", "disk=1GiB..2GiB", "--jobs", "1"]
    for number, axes in enumerate((sweep[:2], sweep[2:4], sweep[:4])):
        plot = tmp_path / f"sweep-{number}.png"
        code, _, said = replay(trace, *axes, "--plot", plot, "--jobs", "1")
        assert (code, said) == (0, f"drawn in {plot}\n")
        assert plot.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--plot", "x.png"], "--plot draws a sweep"),
        (["--policy", "lru,fifo"], "no policy 'fifo'"),
        (["--policy", "lru,lru"], "one is there twice"),
        (["--policy", ""], "no policy ''"),
        (["--host", "1MiB"], "host: 1.0 MiB hold no block of 64.0 MiB"),
        (["--sweep", "disk=63MiB..1GiB"], "disk: 63.0 MiB hold no block of 64.0 MiB"),
        (["--host", "much"], "'much' is not a number of bytes"),
        (["--disk", "0"], "'0' is not between 1 byte and"),
        (["--sweep", "host=1GiB"], "not TIER=FROM..TO[:COUNT]"),
        (["--dtype", "bf16"], "unknown element type 'bf16'"),
        (["--label", "time=ts"], "--label time=ts: not FIELD=NAME"),
        (["--tokens-per-block", "600"], "blocks of 600 tokens"),
        (["--format", "kvstrata"], "is no event log"),
        (["--format", "timed"], "2 ids for 1024 tokens"),
        (["--work-dir", "/nowhere/at/all"], "no directory can be made in /nowhere/at/all"),
    ],
)
def test_what_cannot_be_is_said_with_a_remedy(trace: Path, arguments: list[str], said: str) -> None:
    code, printed, message = replay(trace, *arguments)
    assert (code, printed) == (2, "")
    assert said in message
    assert "hint: " in message


def test_a_trace_that_breaks_off_is_said_so(trace: Path) -> None:
    with trace.open("a") as file:
        file.write('{"timestamp": 99')
    code, _, message = replay(trace)
    assert code == 2
    assert f"{trace}:16: " in message


def test_lines_are_folded_at_the_edge_of_a_terminal_alone(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ["--sweep", "host=128MiB..1GiB", "--policy", "lru,s3fifo,cost"]
    monkeypatch.delenv("COLUMNS", raising=False)
    whole = CliRunner().invoke(app, ["replay", str(trace), *sizes])
    folded = CliRunner().invoke(app, ["replay", str(trace), *sizes], env={"COLUMNS": "60"})
    assert whole.exit_code == folded.exit_code == 0
    rows, more_rows = (each.stdout.splitlines() for each in (whole, folded))
    assert max(map(len, rows)) > 80
    assert len(more_rows) > len(rows)
