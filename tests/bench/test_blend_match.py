"""What bench/blend_match.py finds and stores, its bounds and its output."""

import json
from pathlib import Path

import pytest
from bench.blend_match import GRID_TOKENS, Bed, Documents, Reuse, Row, failures, main, run, to_json

TITLES = ["workload", "nothing known", "every window of another source", "everything known"]


def row(prompt: str, median_ms: float) -> Row:
    return Row(prompt, 1, median_ms, median_ms, median_ms, 2 * median_ms, 10.0)


def test_documents_are_found_in_another_order_without_being_stored_twice() -> None:
    reuse = Documents(Bed(capacity_tokens=1 << 18)).measure()
    assert failures(reuse, []) == []


def test_every_kind_of_prompt_has_the_runs_that_it_is_made_of() -> None:
    _, rows = run(windows=1500, rounds=4, prompt_tokens=8192)
    assert [r.prompt for r in rows] == TITLES
    workload, nothing, patchwork, everything = (r.runs for r in rows)
    assert 4 <= workload <= 40
    assert (nothing, patchwork, everything) == (0, 8192 // GRID_TOKENS, 1)


def test_missed_bounds_are_told() -> None:
    rows = [row("workload", 2.01), row("every window of another source", 20.0)]
    assert failures(Reuse(0.93, 1.3), [row("workload", 2.0)]) == []
    assert [line.split(",")[0] for line in failures(Reuse(0.92, 1.31), rows)] == [
        "coverage is 0.920",
        "stored / unique tokens is 1.31",
        "the workload takes 2.01 ms",
    ]


def test_a_run_that_is_not_what_its_blocks_hold_ends_the_program() -> None:
    bed = Bed(capacity_tokens=1 << 16)
    prompt = bed.tokens(1000)
    bed.give(prompt)
    runs = bed.index.match(b"bench", prompt)
    bed.check(prompt, runs)
    bed.prompts[0] = bed.tokens(1000)
    with pytest.raises(SystemExit, match="the run at 0"):
        bed.check(prompt, runs)


def test_figures_are_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Reuse(1.0, 1.1), [row(title, 0.5) for title in TITLES]
    monkeypatch.setattr("bench.blend_match.run", lambda windows, rounds: found)
    out = tmp_path / "run.json"
    assert main(["--quick", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert all(title in printed for title in TITLES)
    assert "coverage 1.000, stored / unique tokens 1.10" in printed
    assert "of a list" in printed
    assert "1.000" in printed
    assert "missed" not in printed
    assert json.loads(out.read_text("utf-8")) == json.loads(to_json(*found))


def test_the_program_fails_where_a_bound_is_missed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Reuse(1.0, 1.1), [row("workload", 2.01)]
    monkeypatch.setattr("bench.blend_match.run", lambda windows, rounds: found)
    assert main(["--quick"]) == 1
    assert "missed: the workload takes 2.01 ms" in capsys.readouterr().out
