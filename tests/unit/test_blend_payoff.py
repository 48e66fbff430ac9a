"""When blending is given up, because it takes longer than a whole prefill."""

from kvstrata.blend.payoff import Payoff


def measured(*ratios: float, tokens: int = 3000) -> Payoff:
    payoff = Payoff()
    for ratio in ratios:
        payoff.took(tokens, ratio * 0.02, 0.02)
    return payoff


def test_few_measurements_say_nothing() -> None:
    assert measured(9, 9, 9, 9).ratio(3000) is None
    assert not measured(9, 9, 9, 9).refuses(3000)


def test_the_median_of_the_last_five_decides() -> None:
    assert measured(9, 9, 0.5, 0.75, 0.25).ratio(3000) == 0.75
    assert not measured(9, 9, 0.5, 0.75, 0.25).refuses(3000)
    assert measured(0.1, 0.1, 0.1, 1.1, 1.2, 1.3).refuses(3000)


def test_as_soon_as_a_prefill_is_soon_enough() -> None:
    assert not measured(1, 1, 1, 1, 1).refuses(3000)


def test_other_sizes_are_judged_for_themselves() -> None:
    payoff = measured(2, 2, 2, 2, 2)
    assert payoff.refuses(2048)
    assert payoff.refuses(4095)
    assert not payoff.refuses(2047)
    assert not payoff.refuses(4096)


def test_one_prompt_of_32_is_tried_again() -> None:
    payoff = measured(2, 2, 2, 2, 2)
    assert [payoff.refuses(3000) for _ in range(64)].count(False) == 2


def test_what_has_become_sooner_is_blended_again() -> None:
    payoff = measured(2, 2, 2, 2, 2)
    for _ in range(3):
        assert payoff.refuses(3000)
        payoff.took(3000, 0.01, 0.02)
    assert not payoff.refuses(3000)
