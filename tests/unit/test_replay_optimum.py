"""The spool, the next uses of blocks, and the bound on hits made of them."""

import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.traces import ListedTrace, prompt, spool

from kvstrata.core.errors import ConfigError
from kvstrata.replay import belady
from kvstrata.replay import reuse as reuse_module
from kvstrata.replay.belady import find_optimum
from kvstrata.replay.device import DeviceCache
from kvstrata.replay.reuse import NEVER, Reuse, find_reuse
from kvstrata.replay.scan import scan
from kvstrata.replay.spool import Spool
from kvstrata.replay.trace import Kind, Request


def weigh(first: int, end: int) -> float:
    """A second for the first block of a prompt, two for the second, and so on."""
    return float(sum(range(first + 1, end + 1)))


def next_needs(found: Reuse) -> list[int]:
    return [int(need) for need in np.fromfile(found.path, np.int64)]


# -- the spool -------------------------------------------------------------------------------


def test_a_spool_gives_back_what_was_put_in(tmp_path: Path) -> None:
    requests = [
        Request(
            float(n), 10 * (n % 7) + 3, np.arange(n, n + n % 7, dtype=np.uint64), Kind(n % 3), n, 9
        )
        for n in range(1000)
    ]
    made = scan(ListedTrace(requests), tmp_path)
    for (read, device_blocks), wanted in zip(made, requests, strict=True):
        assert read[:2] == wanted[:2]
        assert read.blocks.tolist() == wanted.blocks.tolist()
        assert read[3:] == wanted[3:]
        assert device_blocks == 0
    looked_up = [each for each in requests if each.kind is not Kind.PUT]
    assert made == Spool(
        tmp_path,
        10,
        events=1000,
        requests=len(looked_up),
        blocks=sum(len(each.blocks) for each in requests),
        lookup_blocks=sum(len(each.blocks) for each in looked_up),
        input_tokens=sum(each.input_tokens for each in looked_up),
        began_seconds=0.0,
        ended_seconds=999.0,
    )


def test_a_trace_without_a_whole_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no request that fills a block of 10 tokens"):
        spool(tmp_path, [[], []])


def test_blocks_that_are_only_saved_are_no_lookups(tmp_path: Path) -> None:
    made = spool(tmp_path, [prompt(1, 2, kind=Kind.PUT), prompt(1, kind=Kind.LOOKUP)])
    assert (made.events, made.requests, made.blocks, made.lookup_blocks) == (2, 1, 3, 1)


# -- the device cache ------------------------------------------------------------------------


def test_device_cache_forgets_the_least_recently_used_and_ends_of_prompts_first() -> None:
    device = DeviceCache(4)
    ask = [np.array(each, np.uint64) for each in ([1, 2, 3], [4, 5], [1, 2, 3], [1, 6], [4])]
    assert [device.request(blocks) for blocks in ask] == [0, 0, 2, 1, 0]


def test_only_leading_blocks_are_hits_of_the_device() -> None:
    device = DeviceCache(10)
    device.request(np.array([2, 3], np.uint64))
    assert device.request(np.array([1, 2, 3], np.uint64)) == 0


def test_what_the_device_has_is_no_possible_hit_of_ours(tmp_path: Path) -> None:
    made = spool(tmp_path, [[1, 2], [1, 2, 3], [4, 5, 6], [1, 2]], device_blocks=3)
    assert [device for _, device in made] == [0, 2, 0, 0]
    assert made.device_blocks == 2
    assert find_reuse(made).possible_hits == 2  # of the last request


def test_an_event_log_is_not_put_behind_a_device_again(tmp_path: Path) -> None:
    trace = ListedTrace([prompt(1)])
    trace.behind_device = True
    with pytest.raises(ConfigError, match="only what the device cache has left over"):
        scan(trace, tmp_path, device_blocks=3)


# -- next uses -------------------------------------------------------------------------------


def test_next_need_of_a_block_skips_uses_that_are_no_needs(tmp_path: Path) -> None:
    trace = [
        prompt(1, 2),  # uses 0, 1
        prompt(1, kind=Kind.PUT),  # 2
        prompt(1, 2, kind=Kind.LOOKUP),  # 3, 4
        prompt(2, kind=Kind.PUT),  # 5
    ]
    found = find_reuse(spool(tmp_path, trace))
    # Block 1 is saved before it is needed again: what counts is that it is there from then on.
    assert next_needs(found) == [NEVER, 4, 3, NEVER, NEVER, NEVER]
    assert (found.distinct_blocks, found.possible_hits) == (2, 2)


@pytest.mark.parametrize("uses_a_part", [1, 7, 13, 100, 10**6])
def test_next_needs_are_the_same_in_however_many_pieces(
    tmp_path: Path, uses_a_part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reuse_module, "_USES_A_PART", uses_a_part)
    monkeypatch.setattr(reuse_module, "_USES_A_PIECE", 1 + uses_a_part // 3)
    dice = np.random.default_rng(5)
    prompts = [dice.permutation(40)[: 1 + n % 9].tolist() for n in range(60)]
    flat = [block for blocks in prompts for block in blocks]
    later = [
        next((later for later in range(use + 1, len(flat)) if flat[later] == block), NEVER)
        for use, block in enumerate(flat)
    ]
    made = spool(tmp_path, prompts)
    found = find_reuse(made)
    assert next_needs(found) == later
    assert found.distinct_blocks == len(set(flat))
    assert found.possible_hits == len(flat) - len(set(flat))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocks", "next", "requests"]


# -- the optimum -----------------------------------------------------------------------------


def optimum(
    directory: Path, prompts: Sequence[Sequence[int] | Request], capacity_blocks: int
) -> tuple[int, float]:
    made = spool(directory, prompts)
    found = find_optimum(made, find_reuse(made), capacity_blocks, weigh)
    return found.hit_blocks, found.saved_seconds


@pytest.mark.parametrize(
    ("capacity_blocks", "hits", "seconds"),
    # Room for one: 1, all along. For two: 1 and 2, then 1. For three: 3 too, from the second on.
    # For four: 4 too.
    [(0, 0, 0.0), (1, 2, 2.0), (2, 3, 4.0), (3, 4, 5.0), (4, 5, 7.0), (100, 5, 7.0)],
)
def test_hits_of_the_optimum_computed_by_hand(
    tmp_path: Path, capacity_blocks: int, hits: int, seconds: float
) -> None:
    prompts = [[1, 2], [3, 4], [1, 2], [3, 4], [1, 5]]
    assert optimum(tmp_path, prompts, capacity_blocks) == (hits, seconds)


def test_a_run_of_needs_may_go_over_two_requests(tmp_path: Path) -> None:
    trace = [prompt(1, 2, 3), prompt(1, 2, kind=Kind.LOOKUP), prompt(3, kind=Kind.LOOKUP)]
    assert optimum(tmp_path, trace, 3)[0] == 3
    assert optimum(tmp_path / "less", trace, 2)[0] == 2


def most_hits(prompts: Sequence[Sequence[int]], capacity_blocks: int) -> int:
    """Try everything that a cache could do."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for blocks in prompts:
        reached: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            now = hits + len(held & set(blocks))
            there = held | set(blocks)
            for kept in combinations(sorted(there), min(capacity_blocks, len(there))):
                state = frozenset(kept)
                reached[state] = max(reached.get(state, 0), now)
        states = reached
    return max(states.values())


prompts_of_five = st.lists(
    st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True), min_size=1, max_size=7
)


@given(prompts=prompts_of_five, capacity_blocks=st.integers(0, 5))
def test_no_cache_has_more_hits_than_the_optimum_and_one_has_as_many(
    prompts: list[list[int]], capacity_blocks: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found, _ = optimum(Path(folder), prompts, capacity_blocks)
    assert found == most_hits(prompts, capacity_blocks)


def test_optimum_tells_how_far_it_is(tmp_path: Path) -> None:
    made = spool(tmp_path, [[n] for n in range(2500)])
    told: list[int] = []
    find_optimum(made, find_reuse(made), 10, weigh, told.append)
    assert told == [1024, 2048]


def test_what_the_optimum_has_given_up_takes_no_memory() -> None:
    kept = belady._Kept(10)
    for need in range(50_000, 0, -2):
        kept.add(np.array([need]))
    assert [*kept._lengths] == list(range(20, 0, -2))
    assert len(kept._nearest) <= len(kept._farthest) + 1100
    assert len(kept._farthest) <= 1100
