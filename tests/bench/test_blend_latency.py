"""The latency bench of blending: its prompts, and what it makes of pairs."""

import random

import pytest
from bench.blend_latency import DOCUMENTS, Pair, cells, prompt_of, report


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
    pairs = [Pair(2050, 0.95, full, blend, 2048) for full, blend in ((1, 0.2), (2, 0.3), (3, 0.9))]
    (cell,) = cells(pairs)
    assert (cell.full_ms, cell.blend_ms, cell.ratio) == (2000, 300, 0.2)


def test_the_report_says_which_bounds_are_met() -> None:
    fast = [Pair(2050, 0.95, 1.0, 0.25, 2048)]
    slow = [Pair(300, 0.3, 1.0, 1.2, 0), Pair(1100, 0.3, 1.0, 1.0, 0)]
    lines = list(report(fast, slow))
    assert any(line.startswith("met     4.00 times") for line in lines)
    assert any("NOT met at most 1.20" in line for line in lines)
