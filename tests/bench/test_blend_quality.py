"""What each rule has to leave of the answers that the shipped model gives."""

import json
from pathlib import Path

import pytest
from bench import blend_quality
from bench.blend.checkpoint import load_model
from bench.blend.evaluate import DEEPER, FULL, NO_RECOMPUTE, TWO_ROUND, Row, candidates, evaluate

PROMPTS = 256
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, float | None], Row]:
    model = load_model()
    gated = {FULL, NO_RECOMPUTE, TWO_ROUND, DEEPER}
    lines = [line for line in candidates(model.shape.layers) if line.title in gated]
    found = evaluate(model, lines, prompts=PROMPTS, donors="isolated", seed=2)
    return {(row.rule, row.ratio): row for row in found}


@pytest.mark.parametrize("rule", [TWO_ROUND, DEEPER])
def test_two_rounds_keep_what_other_documents_say(
    rows: dict[tuple[str, float | None], Row], rule: str
) -> None:
    assert rows[FULL, None].cross >= 0.98
    assert rows[NO_RECOMPUTE, None].cross <= 0.15
    assert rows[rule, 0.05].cross >= 0.78
    assert rows[rule, 0.15].cross >= 0.97
    assert rows[rule, 0.30].cross >= 0.97


def test_what_a_document_says_itself_stays(
    rows: dict[tuple[str, float | None], Row],
) -> None:
    full = rows[FULL, None].local
    assert rows[TWO_ROUND, 0.15].local >= full - 0.01
    assert rows[TWO_ROUND, 0.30].local >= full - 0.01
    assert min(row.local for row in rows.values()) >= 0.96


def test_shares_are_those_of_the_ratio(rows: dict[tuple[str, float | None], Row]) -> None:
    assert rows[FULL, None].recomputed == rows[FULL, None].work == 1.0
    assert rows[FULL, None].divergence == 0.0
    assert rows[NO_RECOMPUTE, None].recomputed == 0.0
    for ratio in (0.05, 0.15, 0.30):
        row = rows[TWO_ROUND, ratio]
        assert row.recomputed == ratio
        assert row.recomputed < row.work < 1
        assert row.divergence < rows[NO_RECOMPUTE, None].divergence


def test_the_program_prints_every_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    blend_quality.main(["--prompts", "3", "--json", str(file)])
    found = [Row(**row) for row in json.loads(file.read_text(encoding="utf-8"))]
    assert {row.donors for row in found} == {"isolated", "contextual"}
    printed = capsys.readouterr().out
    assert all(row.rule in printed for row in found)
    assert {row.ratio for row in found if row.rule == TWO_ROUND} == {0.05, 0.15, 0.30}
