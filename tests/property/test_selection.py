"""Every rule keeps its budget and what is mandatory, whatever the runs and the scores are."""

from collections.abc import Callable
from itertools import zip_longest

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.blends import BLOCK_TOKENS, FakeScorer, plan_of

from kvstrata.blend.plan import BlendPlan, Positions
from kvstrata.blend.rules import HkvdRule, QueryRule, RandomRule, TwoRoundQueryRule
from kvstrata.blend.selection import (
    Rule,
    ScoreAttention,
    Scores,
    Selection,
    Step,
    drive,
    highest,
    split,
)

RULES: dict[str, Callable[[float, int], Rule]] = {
    "random": lambda ratio, sinks: RandomRule(ratio, seed=5, sink_tokens=sinks),
    "hkvd": lambda ratio, sinks: HkvdRule(ratio, layer=3, layers=4, sink_tokens=sinks),
    "query": lambda ratio, sinks: QueryRule(
        ratio, scored=(0,), layers=1, sink_tokens=sinks, probe_tokens=3
    ),
    "two rounds": lambda ratio, sinks: TwoRoundQueryRule(
        ratio, scored=(0,), layers=1, sink_tokens=sinks
    ),
}
rule_makers = st.sampled_from(sorted(RULES)).map(RULES.__getitem__)
ratios = st.one_of(st.sampled_from([0.0, 0.05, 0.15, 0.3, 1.0]), st.floats(0, 1))
sinks = st.integers(0, 6)


@st.composite
def plans(draw: st.DrawFn) -> BlendPlan:
    parts = draw(st.lists(st.tuples(st.integers(1, 40), st.sampled_from("rcegr")), max_size=8))
    prompt = " ".join(f"{length}{kind}" for length, kind in parts)
    tokens = sum(length for length, _ in parts) + 1
    exact_end = draw(st.integers(0, (tokens - 1) // BLOCK_TOKENS)) * BLOCK_TOKENS
    return plan_of(f"{prompt} 1g", exact_end=exact_end)


def scores_by(seed: int, tokens: int) -> Callable[[Step], Scores]:
    """Many equal ones, of a step's positions as those of no other step."""

    def score(step: Step) -> Scores:
        rng = np.random.default_rng([seed, len(step.positions)])
        return rng.integers(0, 4, tokens).astype(np.float32)

    return score


def scorer_of(plan: BlendPlan, seed: int) -> FakeScorer:
    return FakeScorer(scores_by(seed, plan.prompt_tokens))


def must_be_recomputed(plan: BlendPlan, sink_tokens: int) -> set[int]:
    needed = set(range(plan.exact_end, plan.end))
    for start, length, _, exact in zip(*(each.tolist() for each in plan.runs), strict=True):
        needed -= set(range(start if exact else start + sink_tokens, start + length))
    return needed


@given(plans(), rule_makers, ratios, sinks, st.integers(0, 99))
def test_the_budget_is_kept_and_the_mandatory_tokens_are_in(
    plan: BlendPlan,
    make: Callable[[float, int], Rule],
    ratio: float,
    sink_tokens: int,
    seed: int,
) -> None:
    rule = make(ratio, sink_tokens)
    scorer = scorer_of(plan, seed)
    chosen = drive(rule.select(plan, plan.prompt_tokens), scorer)
    assert (np.diff(chosen) > 0).all()
    mandatory = must_be_recomputed(plan, sink_tokens)
    candidates = set(plan.approximate.tolist()) - mandatory
    beyond = set(chosen.tolist()) - mandatory
    assert mandatory <= set(chosen.tolist())
    assert beyond <= candidates
    assert len(beyond) == min(int(ratio * len(plan.approximate)), len(candidates))
    for step in scorer.steps:
        assert (np.diff(step.positions) > 0).all()
        if isinstance(step, ScoreAttention):
            assert np.isin(step.probes, step.positions).all()
            assert (np.diff(step.probes) > 0).all()
    assert abs(rule.work_tokens(plan) - scorer.run_tokens) < 1


@given(plans(), rule_makers, sinks)
def test_a_ratio_of_one_takes_every_token_that_is_not_exact_in_one_step(
    plan: BlendPlan, make: Callable[[float, int], Rule], sink_tokens: int
) -> None:
    scorer = scorer_of(plan, 0)
    chosen = drive(make(1.0, sink_tokens).select(plan, plan.prompt_tokens), scorer)
    assert set(chosen.tolist()) == set(plan.gaps.tolist()) | set(plan.approximate.tolist())
    assert len(scorer.steps) == bool(len(chosen))


@given(st.lists(plans(), min_size=2, max_size=4), rule_makers, st.integers(0, 99))
def test_prompts_side_by_side_choose_as_each_alone(
    several: list[BlendPlan], make: Callable[[float, int], Rule], seed: int
) -> None:
    rule = make(0.3, 1)
    alone = [scorer_of(plan, seed) for plan in several]
    for plan, scorer in zip(several, alone, strict=True):
        drive(rule.select(plan, plan.prompt_tokens), scorer)
    together = [scorer_of(plan, seed) for plan in several]
    under_way = [rule.select(plan, plan.prompt_tokens) for plan in several]
    while any(selection.step is not None for selection in under_way):
        for selection, scorer in reversed(list(zip(under_way, together, strict=True))):
            if selection.step is not None:
                selection.advance(scorer.run(selection.step))
    for left, right in zip(alone, together, strict=True):
        for one, other in zip_longest(left.steps, right.steps):
            assert type(one) is type(other)
            assert one.positions.tolist() == other.positions.tolist()


@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.5, float("inf"), -1.0]), min_size=1, max_size=50),
    st.integers(0, 60),
    st.integers(0, 99),
)
def test_highest_agrees_with_sorting(numbers: list[float], count: int, seed: int) -> None:
    scores = np.array(numbers, np.float32)
    candidates: Positions = np.flatnonzero(np.random.default_rng(seed).random(len(scores)) < 0.7)
    expected = sorted(candidates.tolist(), key=lambda place: (-numbers[place], place))[:count]
    assert highest(scores, candidates, count).tolist() == sorted(expected)


@given(plans(), rule_makers, st.integers(1, 30), st.integers(0, 99))
def test_a_step_in_pieces_is_the_step(
    plan: BlendPlan, make: Callable[[float, int], Rule], tokens: int, seed: int
) -> None:
    """Scored as an engine would: of each piece what it runs, and what its probes give."""
    weights = np.random.default_rng(seed).random((plan.prompt_tokens,) * 2).astype(np.float32)

    def score(step: Step) -> Scores:
        scores = np.zeros(plan.prompt_tokens, np.float32)
        if isinstance(step, ScoreAttention):
            for probe in step.probes:
                scores = np.maximum(scores, weights[probe])
        else:
            scores[step.positions] = weights[0][step.positions]
        return scores

    def in_pieces(step: Step) -> Scores:
        scores = np.zeros(plan.prompt_tokens, np.float32)
        rest: Step | None = step
        ran = []
        while rest is not None:
            head, rest = split(rest, tokens)
            assert type(head) is type(step)
            assert 0 < len(head.positions) <= tokens
            if isinstance(head, ScoreAttention):
                assert np.isin(head.probes, head.positions).all()
            ran += head.positions.tolist()
            scores = np.maximum(scores, score(head))
        assert ran == step.positions.tolist()
        return scores

    def way(how: Callable[[Step], Scores]) -> list[int]:
        selection: Selection = make(0.3, 2).select(plan, plan.prompt_tokens)
        chosen: list[int] = drive(selection, FakeScorer(how)).tolist()
        return chosen

    assert way(score) == way(in_pieces)
