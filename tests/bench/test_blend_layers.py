"""Choosing the layers that choose: the pairs that are tried, and what is made of their audits."""

import pytest
from bench.blend_layers import Found, Prompt, best, pairs, read_prompts, shipped_prompts, table


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (1, [(0,)]),
        (2, [(0, 1)]),
        (4, [(0, 1), (1, 2)]),
        (32, [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13), (14, 15)]),
    ],
)
def test_neighbours_of_the_first_half_are_tried(
    layers: int, expected: list[tuple[int, ...]]
) -> None:
    assert pairs(layers) == expected


def test_of_those_that_are_about_as_good_the_earliest_wins() -> None:
    found = [
        Found((0, 1), 10, 7, 5.0),
        Found((2, 3), 10, 9, 0.105),
        Found((4, 5), 10, 9, 0.1),
        Found((6, 7), 0, 0, 0.0),  # nothing was blended
    ]
    assert best(found).layers == (2, 3)
    lines = list(table(found))
    assert "| 2, 3 | 10 | 9 | 0.0105 |" in lines
    assert lines[-1].strip() == "blend_scored_layers: [2, 3]"


def test_prompts_are_texts_or_ids_a_line_each() -> None:
    lines = [
        '{"documents": ["a", "b"], "question": "c"}',
        "",
        '{"documents": [[1]], "question": [2]}',
    ]
    assert read_prompts(lines) == [Prompt(["a", "b"], "c"), Prompt([[1]], [2])]


def test_the_shipped_model_is_asked_across_documents() -> None:
    prompts = shipped_prompts(3)
    assert len(prompts) == 3
    assert {len(prompt.documents) for prompt in prompts} == {6}
    assert all(len(prompt.question) == 1 for prompt in prompts)
