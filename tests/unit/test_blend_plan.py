from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.blends import plan_of, positions_of

from kvstrata.blend.plan import BlendPlan, Economy, Reason, spans_of
from kvstrata.core.errors import ConfigError, InvariantViolated


def runs(plan: BlendPlan) -> list[tuple[int, int]]:
    return list(zip(plan.runs.start.tolist(), plan.runs.length.tolist(), strict=True))


def test_a_plan_ends_with_the_last_block_before_the_last_token() -> None:
    plan = plan_of("4g 10r 3g 2r 9g")
    assert (plan.exact_end, plan.end, plan.prompt_tokens) == (0, 24, 28)
    assert runs(plan) == [(4, 10), (17, 2)]
    assert plan.origin.tolist() == [0, 1]
    assert plan.gaps.tolist() == [0, 1, 2, 3, 14, 15, 16, 19, 20, 21, 22, 23]
    assert plan.approximate.tolist() == [*range(4, 14), 17, 18]
    assert plan.gaps_between == [(14, 17)]
    assert plan.asking_from == 19


def test_the_last_token_is_left_to_the_engine() -> None:
    assert plan_of("16r").end == 12
    assert plan_of("17r").end == 16


def test_what_the_exact_prefix_covers_is_not_reused() -> None:
    plan = plan_of("6r 4r 8r 1g", exact_end=8)
    assert runs(plan) == [(8, 2), (10, 6)]
    assert plan.origin.tolist() == [1, 2]
    assert not len(plan.gaps)
    assert plan.gaps_between == []
    assert plan.taint_from == 8


def test_without_a_run_a_plan_is_empty() -> None:
    for plan in (plan_of("20g"), plan_of("8g 2r"), plan_of("8r 20g", exact_end=8)):
        assert plan.end == plan.exact_end
        assert not len(plan.runs.start)
        assert not len(plan.gaps)
        assert plan.gaps_between == []
        assert plan.taint_from is None


def test_taint_begins_with_the_block_of_the_first_approximate_token() -> None:
    assert plan_of("6g 8e 3g 9r 1g").taint_from == 16
    assert plan_of("6g 8c 1g").taint_from == 4
    assert plan_of("6g 8e 3g").taint_from is None
    assert plan_of("6g 8e 3g 9r 1g").approximate.tolist() == list(range(17, 24))


@pytest.mark.parametrize(
    "changes",
    [
        {"end": 22},
        {"end": 24},
        {"prompt_tokens": 20},
        {"end": 12},
        {"exact_end": 2},
        {"exact_end": 8},
        {"exact_end": -4},
        {"runs": plan_of("4g 8r 8r 3g").runs._replace(start=positions_of(4, 11))},
        {"runs": plan_of("4g 16r 3g").runs._replace(length=positions_of(0))},
        {"runs": plan_of("4g 16r 3g").runs._replace(delta=positions_of(5))},
        {"runs": plan_of("4g 16r 3g").runs._replace(exact=np.array([True]))},
        {"origin": positions_of(0, 1)},
    ],
)
def test_what_cannot_be_is_no_plan(changes: dict[str, Any]) -> None:
    plan = plan_of("4g 16r 3g")
    with pytest.raises(InvariantViolated):
        replace(plan, **changes)


def test_spans_of_positions() -> None:
    start, length = spans_of(positions_of(0, 3, 4, 5, 9, 11, 12))
    assert start.tolist() == [0, 3, 9, 11]
    assert length.tolist() == [1, 3, 1, 2]
    assert [each.tolist() for each in spans_of(positions_of())] == [[], []]


def test_a_prompt_is_blended_where_enough_of_it_is_saved() -> None:
    economy = Economy()
    plan = plan_of("4000r 1000g")
    decision = economy.decide(plan, work_tokens=1696)
    assert decision.blend
    assert decision.reason is Reason.PAYS
    assert (decision.saved_tokens, decision.prefill_tokens) == (3300, 5000)
    assert economy.decide(plan, 3496).reason is Reason.PAYS
    assert economy.decide(plan, 3497).reason is Reason.SMALL_SHARE
    assert not economy.decide(plan, 3497).blend


def test_a_share_is_of_what_the_engine_would_compute() -> None:
    plan = plan_of("2000r 3000r 1000g", exact_end=3000)
    assert Economy().decide(plan, work_tokens=1896).reason is Reason.PAYS


def test_why_a_prompt_is_not_blended() -> None:
    economy = Economy()
    assert economy.decide(plan_of("9000g"), 0).reason is Reason.NO_RUN
    assert economy.decide(plan_of("1024r 1g"), 0).reason is Reason.PAYS
    assert economy.decide(plan_of("1024r 1g"), 1).reason is Reason.FEW_TOKENS
    assert economy.decide(plan_of("1024r 1g"), 9000).saved_tokens < 0
    all_of_it = Economy(min_saved_tokens=0, min_saved_share=0)
    assert all_of_it.decide(plan_of("8r 90g"), 96).reason is Reason.PAYS
    assert all_of_it.decide(plan_of("8r 90g"), 97).reason is Reason.FEW_TOKENS


def test_what_is_too_short_needs_no_plan() -> None:
    economy = Economy()
    assert economy.is_hopeless(1024)
    assert not economy.is_hopeless(1025)
    assert economy.decide(plan_of("1024r 1g"), 0).reason is Reason.PAYS
    assert not Economy(min_saved_tokens=0).is_hopeless(1)


@pytest.mark.parametrize("setting", [{"min_saved_tokens": -1}, {"min_saved_share": 1.01}])
def test_an_economy_that_cannot_be_is_refused(setting: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least"):
        Economy(**setting)
