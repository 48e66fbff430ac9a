"""Plans in a line, and an engine without a model, for tests of rules."""

import re
from collections.abc import Callable
from itertools import accumulate

import numpy as np

from kvstrata.blend.plan import BlendPlan, Positions, ReusedRuns
from kvstrata.blend.selection import ScoreAttention, Scores, Step

BLOCK_TOKENS = 4


def plan_of(prompt: str, *, exact_end: int = 0) -> BlendPlan:
    """Plan for a prompt of parts, each its tokens and what they are.

    ``r``: run moved by 1; ``c``: run in its place, behind other tokens; ``e``: exact run; ``g``:
    tokens that are not known. ``"4g 10r 3g"`` has 17 tokens.
    """
    parts = [(int(n), kind) for n, kind in re.findall(r"(\d+)([rceg])", prompt)]
    starts = [0, *accumulate(length for length, _ in parts)]
    runs = [(s, n, kind) for s, (n, kind) in zip(starts, parts, strict=False) if kind != "g"]
    found = ReusedRuns(
        start=np.array([start for start, _, _ in runs], np.int64),
        length=np.array([length for _, length, _ in runs], np.int64),
        delta=np.array([-1 if kind == "r" else 0 for *_, kind in runs], np.int64),
        exact=np.array([kind == "e" for *_, kind in runs], np.bool_),
    )
    return BlendPlan.of_runs(
        found, prompt_tokens=starts[-1], block_tokens=BLOCK_TOKENS, exact_end=exact_end
    )


class FakeScorer:
    """Keeps the steps and gives each the scores that *score* makes."""

    def __init__(self, score: Callable[[Step], Scores]) -> None:
        self.steps: list[Step] = []
        self._score = score

    def run(self, step: Step) -> Scores:
        self.steps.append(step)
        return self._score(step)

    @property
    def run_tokens(self) -> int:
        return sum(len(step.positions) for step in self.steps)


def scores_of(*numbers: float) -> Scores:
    return np.array(numbers, np.float32)


def positions_of(*numbers: int) -> Positions:
    return np.array(numbers, np.int64)


def attention(weights: dict[int, dict[int, float]], tokens: int) -> Callable[[Step], Scores]:
    """Scores of a prompt where ``weights[probe][token]`` is the attention that is paid."""

    def score(step: Step) -> Scores:
        scores = np.zeros(tokens, np.float32)
        if isinstance(step, ScoreAttention):
            for probe in step.probes.tolist():
                for token, weight in weights.get(probe, {}).items():
                    scores[token] = max(scores[token], weight)
        return scores

    return score
