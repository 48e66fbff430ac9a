"""Hits of the policies on a trace beside those of libCacheSim, which shares no code with them."""

import heapq
from collections.abc import Iterator

import libcachesim
import numpy as np
import pytest
from numpy.typing import NDArray

from kvstrata.core.keys import BlockIds
from kvstrata.index.policies import LRU, S3FIFO, CostAware, EvictionPolicy

BLOCKS = 6000  # different ones
PRINTS = np.random.default_rng(0).integers(0, 1 << 63, BLOCKS, np.uint64)
SIZES = [50, 400, 1500]  # of the tier


def conversations(requests: int) -> Iterator[list[int]]:
    """Blocks of prompts: a shared start, a document of some popularity, and turns that add up."""
    rng = np.random.default_rng(7)
    turns: dict[int, int] = {}
    for _ in range(requests):
        document = min(int(rng.zipf(1.3)), 200) - 1
        turns[document] = (turns.get(document, 0) + 1) % 12
        start = 200 + 29 * document
        shared = document % 5
        yield [*range(shared, shared + 5), *range(start, start + 5 + 2 * turns[document])]


def accesses(requests: int) -> list[int]:
    """The same one by one, the last of a prompt first: so an order of single objects is one of
    prefixes."""
    return [block for prompt in conversations(requests) for block in reversed(prompt)]


def hits_of(policy: EvictionPolicy, trace: list[int], tier_blocks: int) -> list[bool]:
    inside: set[int] = set()
    hits = []
    for block in trace:
        ids = np.array([block], np.int32)
        hits.append(block in inside)
        if block in inside:
            policy.touch(ids)
            continue
        if len(inside) == tier_blocks:
            victims = policy.victims(1, lambda ids: np.ones(len(ids), np.bool_))
            policy.remove(victims)
            inside.remove(int(victims[0]))
        policy.admit(ids)
        inside.add(block)
    policy.check()
    assert len(policy) == len(inside)
    return hits


def oracle_hits(cache: libcachesim.CacheBase, trace: list[int]) -> list[bool]:
    return [cache.get(libcachesim.Request(obj_id=block, obj_size=1)) for block in trace]


def optimal_hits(trace: list[int], tier_blocks: int) -> int:
    """Belady: what leaves is what will not be used for longest."""
    following = [len(trace)] * len(trace)
    last: dict[int, int] = {}
    for position in reversed(range(len(trace))):
        following[position] = last.get(trace[position], len(trace))
        last[trace[position]] = position
    inside: dict[int, int] = {}  # when each is used next
    latest: list[tuple[int, int]] = []
    hits = 0
    for position, block in enumerate(trace):
        hits += block in inside
        while len(inside) == tier_blocks and block not in inside:
            use, candidate = heapq.heappop(latest)
            if inside.get(candidate) == -use:
                del inside[candidate]
        inside[block] = following[position]
        heapq.heappush(latest, (-following[position], block))
    return hits


def fingerprints(ids: BlockIds) -> NDArray[np.uint64]:
    prints: NDArray[np.uint64] = PRINTS[ids]
    return prints


@pytest.mark.parametrize("tier_blocks", SIZES)
def test_lru_hits_and_misses_are_the_oracles(tier_blocks: int) -> None:
    trace = accesses(500)
    expected = oracle_hits(libcachesim.LRU(tier_blocks), trace)
    assert hits_of(LRU(BLOCKS), trace, tier_blocks) == expected
    assert 0.1 < np.mean(expected) < 0.95


@pytest.mark.parametrize("tier_blocks", SIZES)
def test_s3_fifo_hits_as_often_as_the_oracle(tier_blocks: int) -> None:
    """Not always the same: the oracle looks for a block among its ghosts before it makes room for
    it, and those that it found make room for older ones."""
    trace = accesses(500)
    expected = oracle_hits(libcachesim.S3FIFO(tier_blocks), trace)
    hits = hits_of(S3FIFO(BLOCKS, tier_blocks, fingerprints), trace, tier_blocks)
    assert np.mean(hits) == pytest.approx(np.mean(expected), abs=0.005)
    assert np.mean(np.equal(hits, expected)) > 0.97


@pytest.mark.parametrize("tier_blocks", SIZES)
def test_no_policy_hits_more_often_than_the_optimum(tier_blocks: int) -> None:
    trace = accesses(500)
    policies: list[EvictionPolicy] = [
        LRU(BLOCKS),
        S3FIFO(BLOCKS, tier_blocks, fingerprints),
        CostAware(BLOCKS, lambda ids: 1.0 + ids % 7),
    ]
    optimum = optimal_hits(trace, tier_blocks)
    for policy in policies:
        assert sum(hits_of(policy, trace, tier_blocks)) <= optimum
