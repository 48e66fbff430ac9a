from itertools import product
from typing import Any

import numpy as np
import pytest
from tests.blends import FakeScorer, attention, plan_of, positions_of, scores_of

from kvstrata.blend.plan import BlendPlan
from kvstrata.blend.rules import (
    BoundaryRule,
    FullRule,
    HkvdRule,
    QueryRule,
    RandomRule,
    TwoRoundQueryRule,
)
from kvstrata.blend.selection import (
    Recompute,
    Rule,
    ScoreAttention,
    ScoreDeviation,
    Scores,
    Step,
    drive,
    highest,
    same_kind,
    split,
)
from kvstrata.core.blend_fields import RECOMPUTE_RATIOS
from kvstrata.core.errors import ConfigError, InvariantViolated

PLAN = plan_of("2g 20r 2g 12e 4c 3g")  # [0, 40) of 43 tokens
QUESTION = [40, 41, 42]
GAPS = [0, 1, 22, 23]
ONE_LAYER: dict[str, Any] = {"scored": (0,), "layers": 1}


def no_scores(step: Step) -> Scores:
    del step
    return scores_of()


def recomputed(rule: Rule, plan: BlendPlan = PLAN) -> list[int]:
    scorer = FakeScorer(no_scores)
    positions: list[int] = drive(rule.select(plan, plan.prompt_tokens), scorer).tolist()
    assert len(scorer.steps) == (1 if positions else 0)
    return positions


def test_the_boundary_rule_takes_both_ends_of_every_run_that_is_not_exact() -> None:
    assert recomputed(BoundaryRule()) == [0, 1, 2, 3, 20, 21, 22, 23, 36, 37, 38, 39]
    assert recomputed(BoundaryRule(first_tokens=1, last_tokens=0)) == [0, 1, 2, 22, 23, 36]
    assert recomputed(BoundaryRule(first_tokens=0, last_tokens=0)) == GAPS
    short = plan_of("2g 6r 1g")
    assert recomputed(BoundaryRule(first_tokens=0, last_tokens=9), short) == [*range(8)]
    assert recomputed(BoundaryRule(first_tokens=9, last_tokens=0), short) == [*range(8)]


def test_the_full_rule_takes_all_but_exact_runs() -> None:
    assert recomputed(FullRule()) == [*range(24), *range(36, 40)]


def test_where_nothing_is_to_recompute_there_is_no_step() -> None:
    assert recomputed(BoundaryRule(first_tokens=0, last_tokens=0), plan_of("8c 1g")) == []
    assert recomputed(FullRule(), plan_of("8e 1g")) == []
    assert recomputed(TwoRoundQueryRule(**ONE_LAYER), plan_of("8e 1g")) == []
    assert recomputed(FullRule(), plan_of("9g")) == []


def test_random_tokens_are_those_of_the_seed() -> None:
    first = recomputed(RandomRule(0.5, seed=1))
    assert first == recomputed(RandomRule(0.5, seed=1))
    assert first != recomputed(RandomRule(0.5, seed=2))
    assert set(first) >= {*GAPS, 2, 3, 4, 5, *range(36, 40)}
    assert len(first) == 12 + 12


def test_hkvd_takes_what_deviates_most_in_its_layer() -> None:
    scores = np.zeros(40, np.float32)
    scores[[7, 11, 19, 25]] = 2, 9, 5, 99  # 25 is exact: it is not among the candidates
    scorer = FakeScorer(lambda _: scores)
    rule = HkvdRule(0.1, layer=1, layers=4, sink_tokens=0)
    assert drive(rule.select(PLAN, 43), scorer).tolist() == [0, 1, 11, 19, 22, 23]
    first, last = scorer.steps
    assert isinstance(first, ScoreDeviation)
    assert first.layer == 1
    assert first.positions.tolist() == [*range(24), *range(36, 40)]
    assert isinstance(last, Recompute)
    assert rule.work_tokens(PLAN) == 0.5 * 28 + 4 + 2


def test_one_round_takes_what_the_question_attends_to() -> None:
    scorer = FakeScorer(attention({42: {7: 0.5, 9: 0.1}, 40: {9: 0.6, 3: 0.2}}, 43))
    rule = QueryRule(0.1, **ONE_LAYER, sink_tokens=0)
    assert drive(rule.select(PLAN, 43), scorer).tolist() == [0, 1, 7, 9, 22, 23]
    asked, last = scorer.steps
    assert isinstance(asked, ScoreAttention)
    assert asked.positions.tolist() == [*GAPS, *QUESTION]
    assert asked.probes.tolist() == QUESTION
    assert isinstance(last, Recompute)


def test_two_rounds_follow_what_the_first_has_found() -> None:
    """The question looks at 18, 18 looks at 6; nobody would find 6 from the question alone."""
    weights = {42: {18: 0.9, 9: 0.3}, 18: {6: 0.8, 18: 1.0}}
    scorer = FakeScorer(attention(weights, 43))
    rule = TwoRoundQueryRule(0.1, **ONE_LAYER, sink_tokens=0, probe_tokens=2)
    assert drive(rule.select(PLAN, 43), scorer).tolist() == [0, 1, 6, 18, 22, 23]
    first, second, last = scorer.steps
    assert isinstance(first, ScoreAttention)
    assert first.positions.tolist() == [*GAPS, *QUESTION]
    assert first.probes.tolist() == [41, 42]
    assert isinstance(second, ScoreAttention)
    assert second.positions.tolist() == second.probes.tolist() == [18]
    assert isinstance(last, Recompute)
    assert rule.work_tokens(PLAN) == scorer.run_tokens
    some = TwoRoundQueryRule(0.1, scored=(0, 2, 3), layers=8, sink_tokens=0, probe_tokens=2)
    assert some.work_tokens(PLAN) == len(last.positions) + 4 / 8 * 7 + 3 / 8 * 1


def test_steps_for_other_layers_are_not_run_together() -> None:
    some = positions_of(1, 2)
    steps: list[Step] = [
        Recompute(some),
        ScoreAttention(some, some, (1, 2)),
        ScoreAttention(some, some, (1,)),
        ScoreDeviation(some, 1),
        ScoreDeviation(some, 2),
    ]
    for one, other in product(steps, steps):
        assert same_kind(one, other) == (one is other)
    assert same_kind(steps[2], ScoreAttention(positions_of(3), positions_of(3), (1,)))


@pytest.mark.parametrize(
    ("scored", "again"),
    [((1, 2), (1,)), ((0, 1), (0, 1)), ((0, 2, 3), (0, 2)), ((0,), (0,)), ((3,), (3,))],
)
def test_a_second_round_looks_up_to_the_first_layer_with_a_context(
    scored: tuple[int, ...], again: tuple[int, ...]
) -> None:
    scorer = FakeScorer(attention({42: {18: 0.9}}, 43))
    drive(TwoRoundQueryRule(scored=scored, layers=4).select(PLAN, 43), scorer)
    looked_at = [s.layers for s in scorer.steps if isinstance(s, ScoreAttention)]
    assert looked_at == [scored, again]


def test_of_an_odd_budget_the_first_round_has_more() -> None:
    scorer = FakeScorer(attention({42: {18: 0.9, 9: 0.3, 5: 0.2}}, 43))
    drive(TwoRoundQueryRule(0.13, **ONE_LAYER, sink_tokens=0).select(PLAN, 43), scorer)
    probes = [s.probes.tolist() for s in scorer.steps if isinstance(s, ScoreAttention)]
    assert probes == [QUESTION, [9, 18]]


def test_only_tokens_with_a_place_in_the_cache_can_ask() -> None:
    scorer = FakeScorer(lambda _: np.zeros(41, np.float32))
    drive(QueryRule(**ONE_LAYER).select(PLAN, 41), scorer)
    assert isinstance(asked := scorer.steps[0], ScoreAttention)
    assert asked.probes.tolist() == [40]
    with pytest.raises(InvariantViolated, match="ends at 40"):
        QueryRule(**ONE_LAYER).select(PLAN, 40)


def test_equal_scores_leave_the_first_tokens() -> None:
    scorer = FakeScorer(lambda _: np.zeros(43, np.float32))
    assert drive(QueryRule(0.1, **ONE_LAYER, sink_tokens=0).select(PLAN, 43), scorer).tolist() == [
        0,
        1,
        2,
        3,
        22,
        23,
    ]
    scores = scores_of(1, 2, 2, float("nan"), 2, float("-inf"))
    everything = np.arange(6)
    assert highest(scores, everything, 2).tolist() == [1, 2]
    assert highest(scores, everything, 4).tolist() == [0, 1, 2, 4]
    assert highest(scores, everything, 5).tolist() == [0, 1, 2, 3, 4]
    assert highest(scores, everything, 0).tolist() == []
    assert highest(scores, positions_of(3, 5), 9).tolist() == [3, 5]


def test_profiles() -> None:
    assert RECOMPUTE_RATIOS == {"fast": 0.05, "balanced": 0.15, "safe": 0.30}
    rules = [
        TwoRoundQueryRule(**ONE_LAYER),
        QueryRule(**ONE_LAYER),
        HkvdRule(layer=1, layers=2),
        RandomRule(seed=0),
    ]
    assert {rule.ratio for rule in rules} == {0.15}


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (QueryRule, ONE_LAYER | {"ratio": 1.2}),
        (QueryRule, ONE_LAYER | {"ratio": -0.1}),
        (QueryRule, ONE_LAYER | {"ratio": float("nan")}),
        (QueryRule, ONE_LAYER | {"sink_tokens": -1}),
        (QueryRule, ONE_LAYER | {"probe_tokens": 0}),
        (QueryRule, ONE_LAYER | {"scored": ()}),
        (QueryRule, ONE_LAYER | {"scored": (-1, 0)}),
        (QueryRule, ONE_LAYER | {"scored": (0, 1)}),
        (HkvdRule, {"layer": 4, "layers": 4}),
        (BoundaryRule, {"last_tokens": -1}),
    ],
)
def test_settings_that_cannot_be_are_refused(make: Any, arguments: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="hint"):
        make(**arguments)


def test_a_step_of_one_piece_is_not_split() -> None:
    step = Recompute(np.arange(4))
    assert split(step, 4) == (step, None)
    with pytest.raises(InvariantViolated):
        split(step, 0)
