"""The end-to-end rows of `make gpu`, of real engines on this machine's CPU."""

import os
from pathlib import Path

import pytest
from bench import gpu_serving
from bench.gpu_serving import Serving

from kvstrata.cli.demo_engine import Answered
from kvstrata.cli.demo_process import EngineFailed

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def _this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))


@pytest.mark.vllm
def test_engines_with_a_cache_answer_as_those_without(tmp_path: Path) -> None:
    serving = Serving(prompts=3, prompt_tokens=800, output_tokens=6)
    rows = list(gpu_serving.rows(tmp_path, serving, ["layerwise"]))
    assert [row.what.removeprefix("vLLM, layerwise, ") for row in rows] == [
        "miss: answers unlike those without a cache",
        "host hit: answers unlike those without a cache",
        "host hit: share of the prompt that is loaded",
        "miss: time to the first token, over that without a cache",
        "host hit: time to the first token, over that without a cache",
    ]
    assert [row.found for row in rows[:2]] == [0, 0]
    assert rows[2].found == 768 / 800  # whole blocks, and not the last token's
    assert all(row.is_met for row in rows)
    assert rows[3].bound is None


def answered(tokens: list[int], reused: int = 0, seconds: float = 0.1) -> Answered:
    return Answered("plain", 1, seconds, reused, tokens)


def test_an_answer_that_differs_and_a_prompt_that_is_not_loaded_are_not_met() -> None:
    serving = Serving(prompt_tokens=100)
    without = [answered([1]), answered([2])]
    host = [answered([1], 95, 0.01), answered([3], 10, 0.03)]
    rows = list(gpu_serving._compare(serving, "blockwise", without, without, host))
    assert [row.is_met for row in rows] == [True, False, False, True, True]
    assert [row.found for row in rows] == pytest.approx([0, 1, 0.1, 1.0, 0.2])


def test_an_engine_that_cannot_start_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata.cli.demo_process.sys.executable", "/bin/false")
    with pytest.raises(EngineFailed, match="exit code 1"):
        list(gpu_serving.rows(tmp_path))
