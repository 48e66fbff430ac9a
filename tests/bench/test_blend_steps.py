"""The arithmetic of bench/blend_steps.py; no engine."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from bench.blend_steps import Timed, report

from kvstrata.blend.selection import Recompute, ScoreAttention
from kvstrata.integration.vllm.blend.scorer import StepRunner

SOME = np.arange(2)


def test_steps_are_timed_by_kind_and_only_within(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Sequence[Any]] = []
    monkeypatch.setattr(StepRunner, "run", lambda _runner, _prompts, steps: ran.append(steps))
    untimed = StepRunner.run
    runner = StepRunner.__new__(StepRunner)
    with Timed() as timed:
        runner.run([], [ScoreAttention(SOME, SOME, (0,))])
        runner.run([], [ScoreAttention(SOME, SOME, (0,))])
        runner.run([], [Recompute(SOME)])
    assert len(ran) == 3
    assert timed.seconds.keys() == {"choose", "recompute"}
    assert min(timed.seconds.values()) > 0
    assert StepRunner.run is untimed


@pytest.mark.parametrize(
    ("choose", "word", "met"), [(0.05, "met ", True), (0.051, "NOT met", False)]
)
def test_shares_are_medians_of_those_of_each_pair(choose: float, word: str, met: bool) -> None:
    whole = [1.0, 2.0, 1.0]
    blended = [
        {"choose": choose * seconds, "recompute": 0.1 * seconds, "all": 0.2 * seconds}
        for seconds in whole
    ]
    text, is_met = report(whole, blended)
    assert "| whole prefill | 1000 | |" in text
    assert "| recomputing | 100.0 | 0.100 |" in text
    assert text.splitlines()[-1].startswith(word)
    assert is_met == met
