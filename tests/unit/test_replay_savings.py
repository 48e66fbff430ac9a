"""The bound on saved seconds: beside everything a cache could do, and by hand."""

import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.traces import prompt, spool

from kvstrata.replay import savings
from kvstrata.replay.belady import find_optimum
from kvstrata.replay.reuse import find_reuse
from kvstrata.replay.savings import most_saved_seconds
from kvstrata.replay.trace import Kind, Request


def weigh(first: int, end: int) -> float:
    """A second for the first block of a prompt, four for the second, nine for the third."""
    return float(sum(depth * depth for depth in range(first + 1, end + 1)))


def bound(folder: Path, prompts: Sequence[Sequence[int] | Request], blocks: int) -> float:
    made = spool(folder, prompts)
    return most_saved_seconds(made, find_reuse(made), blocks, weigh)


def most_seconds(prompts: Sequence[Sequence[int]], capacity_blocks: int) -> float:
    """Try everything that a cache could do."""
    states: dict[frozenset[int], float] = {frozenset(): 0.0}
    for blocks in prompts:
        reached: dict[frozenset[int], float] = {}
        for held, seconds in states.items():
            hits = [weigh(depth, depth + 1) for depth, b in enumerate(blocks) if b in held]
            there = held | set(blocks)
            for kept in combinations(sorted(there), min(capacity_blocks, len(there))):
                state = frozenset(kept)
                reached[state] = max(reached.get(state, 0.0), seconds + sum(hits))
        states = reached
    return max(states.values())


prompts_of_five = st.lists(
    st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True), min_size=1, max_size=7
)


@given(prompts=prompts_of_five, capacity_blocks=st.integers(0, 5))
def test_no_cache_saves_more_seconds_than_the_bound(
    prompts: list[list[int]], capacity_blocks: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = bound(Path(folder), prompts, capacity_blocks)
    assert found >= most_seconds(prompts, capacity_blocks) * (1 - 1e-9)


def test_with_room_for_all_the_bound_is_all_that_comes_again(tmp_path: Path) -> None:
    prompts = [[1, 2], [3, 4], [1, 2], [3, 4], [1, 5]]
    assert bound(tmp_path, prompts, 5) == 5 + 5 + 1


def test_without_room_nothing_is_saved(tmp_path: Path) -> None:
    assert bound(tmp_path, [[1, 2], [1, 2]], 0) == 0


def test_room_goes_to_what_saves_most(tmp_path: Path) -> None:
    """Always two prompts in turn, room for one of their four blocks: a second one, 4 s, each time
    but the first."""
    prompts = [[1, 2], [3, 4]] * 100
    assert bound(tmp_path, prompts, 1) == pytest.approx(99 * 4, rel=0.04)


def test_the_bound_is_above_the_seconds_of_most_hits(tmp_path: Path) -> None:
    dice = np.random.default_rng(3)
    prompts = [
        [start * 10 + n for n in range(1 + start % 7)] for start in dice.integers(0, 30, 400)
    ]
    made = spool(tmp_path, prompts)
    reuse = find_reuse(made)
    for blocks in (1, 10, 40, 100):
        most = most_saved_seconds(made, reuse, blocks, weigh)
        assert most >= find_optimum(made, reuse, blocks, weigh).saved_seconds


def test_saves_and_beginnings_on_the_device_count(tmp_path: Path) -> None:
    put = Request(0.0, 40, np.array([1, 2], np.uint64), Kind.PUT, first_block=2)
    asked = Request(1.0, 40, np.array([2], np.uint64), Kind.LOOKUP, first_block=3)
    assert bound(tmp_path, [put, asked], 2) == 16  # the fourth block of the prompt
    assert bound(tmp_path / "none", [asked, prompt(9)], 2) == 0


@pytest.mark.parametrize("uses_a_piece", [1, 3, 64])
def test_the_bound_is_the_same_in_however_many_pieces(
    tmp_path: Path, uses_a_piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[n % 5, 10 + n % 3, 20 + n % 7] for n in range(60)]
    whole = bound(tmp_path / "whole", prompts, 4)
    monkeypatch.setattr(savings, "_USES_A_PIECE", uses_a_piece)
    assert bound(tmp_path / "pieces", prompts, 4) == pytest.approx(whole)
