"""The latency bench of blending: its prompts, and what it makes of pairs."""

import math
import random
from typing import cast

import pytest
from bench.blend_latency import (
    DOCUMENTS,
    MIX,
    SHARE,
    Bench,
    Measured,
    Pair,
    cells,
    in_a_row,
    in_short,
    measure_start,
    prompt_of,
    report,
    scoring_share,
    worst_ratio,
)


@pytest.mark.parametrize("tokens", [300, 1100, 2050])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.95])
def test_a_prompt_has_its_length_and_all_documents(tokens: int, share: float) -> None:
    size = int(tokens * share) // DOCUMENTS
    documents = [[2000 + i] * size for i in range(DOCUMENTS)] if size else []
    prompt = prompt_of(documents, tokens, random.Random(1))
    assert len(prompt) == tokens
    assert sum(token >= 2000 for token in prompt) == size * len(documents)
    for document in documents:
        at = prompt.index(document[0])
        assert prompt[at : at + size] == document
    assert prompt[-1] < 2000


def test_a_cell_has_medians_of_pairs() -> None:
    times = ((1, 0.2), (2, 0.3), (3, 0.9))
    pairs = [Pair(2050, 0.95, full, blend, 2048, 2.0, 1.0 + blend) for full, blend in times]
    (cell,) = cells(pairs)
    assert (cell.full_ms, cell.blend_ms, cell.ratio) == (2000, 300, 0.2)
    assert cell.cpu_ratio == pytest.approx(4.4 / 6)
    assert cell.pairs == 3
    (unknown,) = cells([Pair(300, 0.0, 1, 1, 0, 0.0, 0.0)])
    assert math.isnan(unknown.cpu_ratio)


def test_what_is_not_blended_is_judged_by_its_length() -> None:
    whole = [
        Pair(300, share, 1.0, taken, 0, 1.0, 1.0) for share, taken in ((0.0, 1.0), (0.3, 1.08))
    ]
    whole += [Pair(300, 0.6, 1.0, 1.02, 0, 1.0, 1.0), Pair(2050, 0.3, 1.0, 1.04, 0, 1.0, 1.0)]
    assert worst_ratio(whole) == 1.04
    blended = [
        Pair(2050, share, 1.0, taken, 2048, 1.0, 1.0) for share, taken in ((0.6, 1.1), (0.95, 0.3))
    ]
    assert worst_ratio(whole + blended) == 1.1


class Turns:
    """Stands for a ``Bench``: notes who would begin which turn."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, float, int]] = []

    def pairs(
        self,
        tokens: int,
        share: float,
        number: int,
        *,
        in_a_row: int = 1,
        behind: tuple[int, ...] = (),
    ) -> list[Pair]:
        if not behind:
            self.asked += [(tokens, share, number)] * in_a_row
        return []


def test_three_starts_have_nine_turns_a_shape_and_engines_begin_them_by_turns() -> None:
    turns = Turns()
    for start in range(3):
        warmed = len(turns.asked)
        measure_start(cast("Bench", turns), range(3 * start, 3 * start + 3))
        del turns.asked[warmed : warmed + 2]
    for shape in MIX:
        numbers = [number for *asked, number in turns.asked if tuple(asked) == shape]
        assert numbers == [number for number in range(9) for _ in range(in_a_row(shape[0]))]
    documents = [number for tokens, share, number in turns.asked if share == SHARE]
    assert documents == list(range(9))


def test_a_start_is_told_in_short() -> None:
    documents = Pair(2050, 0.975, 1.0, 0.25, 2048, 2.0, 0.5)
    behind = Pair(2050, 0.975, 2.0, 1.0, 2048, 2.0, 2.0)
    mix = [Pair(300, 0.0, 1.0, 1.03, 0, 1.0, 1.0)]
    told = in_short(Measured([documents], mix, [behind]))
    assert told == "documents 0.25, mix at most 1.03, queue 0.50 of a whole prefill"


def test_what_choosing_takes_is_counted_in_tokens_through_the_layers_that_are_scored() -> None:
    # 53 tokens that ask and stand between and 24 first ones, through the first 3 of 12 layers, and half
    # of the 299 that are chosen, through 2.
    expected = (3 * (53 + 24) + 2 * 149.5) / 12 / 2050
    assert scoring_share(12, 32) == pytest.approx(expected, rel=0.01)


def test_the_report_says_which_bounds_are_met() -> None:
    fast = [Pair(2050, 0.95, 1.0, 0.25, 2048, 2.0, 0.5)]
    slow = [
        Pair(300, 0.3, 1.0, 1.2, 0, 1.0, 1.04),
        Pair(1100, 0.3, 1.0, 1.0, 0, 1.0, 1.02),
        Pair(2050, 0.6, 1.0, 0.9, 2048, 1.0, 1.3),
    ]
    behind = [Pair(2050, 0.975, 1.0, 1.3, 2048, 5.0, 4.0)]
    lines = list(report(Measured(fast, slow, behind), 0.028))
    assert "| 2050 | 98% | 1000 | 1300 | 1.30 | 0.80 | 2048 | 1 |" in lines
    assert any(line.startswith("met     4.00 times") for line in lines)
    assert any("NOT met at most 1.20" in line for line in lines)
    assert any("choosing what to compute is planned to take 2.8 %" in line for line in lines)
    assert any("where nothing was reused, at most 1.04 of its CPU time" in line for line in lines)
