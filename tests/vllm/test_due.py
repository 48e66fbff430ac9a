"""Requests are looked at when they may have completed a block, and seldom before."""

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.integration.vllm.due import DueRequests

BLOCK_TOKENS = 4


def test_a_request_that_decodes_is_looked_at_once_a_block() -> None:
    due = DueRequests()
    due.look("a", 3)
    looked = [due.take(1) for _ in range(2)]
    assert looked == [[], []]
    assert due.take(1) == ["a"]
    assert due.take(1) == []


def test_the_last_word_counts() -> None:
    due = DueRequests()
    due.look("a", 1)
    due.look("a", 3)
    due.look("b", 5)
    due.look("b")
    due.look("c", 1)
    due.forget("c")
    assert due.take(1) == ["b"]
    assert due.take(2) == ["a"]
    assert due.take(100) == []


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), max_size=40),
)
def test_no_block_is_seen_later_than_it_is_complete(steps: list[list[int]]) -> None:
    """Three requests, each with its tokens in every step."""
    due, tokens, seen = DueRequests(), [0, 0, 0], [0, 0, 0]
    for number in range(3):
        due.look(str(number))
    for step in steps:
        tokens = [before + more for before, more in zip(tokens, step, strict=True)]
        for name in due.take(max(step)):
            seen[int(name)] = tokens[int(name)] // BLOCK_TOKENS
            due.look(name, BLOCK_TOKENS - tokens[int(name)] % BLOCK_TOKENS)
        assert seen == [count // BLOCK_TOKENS for count in tokens]
