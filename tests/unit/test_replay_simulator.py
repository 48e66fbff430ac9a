"""The simulated cache against tiny traces computed by hand, an independent LRU, and the optimum."""

import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.traces import prompt, spool

from kvstrata.core.tier_fields import Eviction
from kvstrata.core.write_rule import WriteRule, WriteWhen
from kvstrata.replay.belady import find_optimum
from kvstrata.replay.cost import Costs, Rates
from kvstrata.replay.hashing import chain
from kvstrata.replay.outcome import Outcome
from kvstrata.replay.reuse import find_reuse
from kvstrata.replay.simulator import CachePlan, SimulatedCache, simulate
from kvstrata.replay.sizes import Sizes
from kvstrata.replay.spool import Spool, Spooled
from kvstrata.replay.trace import Kind, Request

POLICIES: tuple[Eviction, ...] = get_args(Eviction)
WRITES: tuple[WriteWhen, ...] = get_args(WriteWhen)
BLOCK_BYTES = 1000

# A block of 10 tokens takes 10 ms to compute, 1 ms to load from host memory, 2 ms more from disk.
RATES = Rates(1000.0, 1e12, 1000 * BLOCK_BYTES, 500 * BLOCK_BYTES)
COSTS = Costs(RATES, tokens_per_block=10, block_bytes=BLOCK_BYTES)


def plan(
    host: int, disk: int = 0, policy: Eviction = "lru", write: WriteWhen = "saved", reuses: int = 1
) -> CachePlan:
    return CachePlan(
        policy, Sizes(host * BLOCK_BYTES, disk * BLOCK_BYTES), WriteRule(write, reuses)
    )


def chained(ids: Sequence[int]) -> Request:
    """A prompt of blocks that are the same only behind the same beginning."""
    blocks = chain(np.array(ids, np.uint64))
    return Request(0.0, 10 * len(ids), blocks)


def run(prompts: Sequence[Sequence[int] | Request], tried: CachePlan) -> Outcome:
    """Put *prompts* through a cache that is checked after each one."""
    cache = SimulatedCache(tried, COSTS, most_blocks=1000)
    for each in prompts:
        request = each if isinstance(each, Request) else prompt(*each)
        cache.request(Spooled(request, 0))
        cache.check()
    return cache.outcome()


# -- by hand ---------------------------------------------------------------------------------


def test_second_prompt_hits_what_the_first_has_saved() -> None:
    outcome = run([[1, 2, 3], [1, 2, 4]], plan(10))
    assert (outcome.host_hits, outcome.disk_hits, outcome.saved) == (2, 0, 4)
    assert outcome.prefill_seconds == pytest.approx(0.020, rel=1e-6)
    assert outcome.load_seconds == pytest.approx(0.002)
    assert (outcome.evicted_host, outcome.shed, outcome.written) == (0, 0, 0)


def test_a_hit_ends_at_the_first_hole() -> None:
    trace = [prompt(2, 3, kind=Kind.PUT), prompt(1, 2, 3, kind=Kind.LOOKUP)]
    assert run(trace, plan(10)).hits == 0
    assert run([*trace, prompt(2, 3, kind=Kind.LOOKUP)], plan(10)).hits == 2


def test_a_lookup_saves_nothing_and_a_put_finds_nothing() -> None:
    lookup, put = (prompt(1, 2, kind=kind) for kind in (Kind.LOOKUP, Kind.PUT))
    assert run([lookup, lookup], plan(10)).hits == 0
    outcome = run([put, put, lookup], plan(10))
    assert (outcome.hits, outcome.saved) == (2, 2)


def test_what_only_the_cache_of_the_trace_has_found_is_saved_with_what_follows() -> None:
    lookup = prompt(1, 2, 3, kind=Kind.LOOKUP)._replace(found_blocks=2)
    put = prompt(3, kind=Kind.PUT)._replace(parent=int(prompt(2).blocks[0]))
    assert run([lookup, lookup], plan(10)).saved == 0  # the engine has not computed them
    outcome = run([lookup, put, lookup], plan(10))
    assert (outcome.hits, outcome.saved) == (3, 3)


def test_what_the_cache_of_the_trace_has_found_whole_is_saved_at_once() -> None:
    lookup = prompt(1, 2, kind=Kind.LOOKUP)._replace(found_blocks=2)
    outcome = run([lookup, lookup], plan(10))
    assert (outcome.hits, outcome.saved) == (2, 2)


def test_the_end_of_the_least_recently_used_prompt_goes_first() -> None:
    outcome = run([[1, 2], [3, 4], [5], [1, 2], [3, 4]], plan(4))
    # 5 drives out 2. Then 1 hits and 2 drives out 4, whose prompt is the oldest; 3 hits.
    assert (outcome.host_hits, outcome.evicted_host, outcome.saved) == (2, 3, 7)


def test_what_host_memory_gives_up_is_found_on_disk() -> None:
    outcome = run([[1, 2], [3, 4], [1, 2]], plan(2, disk=10))
    assert (outcome.host_hits, outcome.disk_hits, outcome.written) == (0, 2, 4)
    assert outcome.load_seconds == pytest.approx(2 * 0.001 + 2 * 0.002)


def test_blocks_that_are_used_once_are_not_written_when_only_reused_ones_are() -> None:
    outcome = run([[1, 2], [3, 4], [3], [5, 6], [7, 8], [3, 4]], plan(4, disk=10, write="reused"))
    assert outcome.written == 1
    assert outcome.disk_hits == 1


def test_blocks_are_written_when_they_were_found_often_enough() -> None:
    trace = [[1], [2], [1], [2], [1]]
    for reuses, written in ((1, 2), (2, 1), (3, 0)):
        tried = plan(4, disk=10, write="reused", reuses=reuses)
        assert run(trace, tried).written == written


def test_blocks_are_written_when_they_leave_host_memory_at_the_latest() -> None:
    outcome = run([[1, 2], [3, 4], [1, 2], [3, 4]], plan(2, disk=10, write="evicted"))
    assert (outcome.disk_hits, outcome.shed, outcome.declined) == (4, 0, 0)


def test_what_is_sooner_computed_is_not_loaded() -> None:
    slow = Rates(1000.0, 1e12, 1000 * BLOCK_BYTES, BLOCK_BYTES / 0.011)  # 11 ms from disk
    cache = SimulatedCache(plan(2, disk=10), Costs(slow, 10, BLOCK_BYTES), most_blocks=1000)
    for blocks in ([1, 2], [3, 4], [1, 2]):
        cache.request(Spooled(prompt(*blocks), 0))
    outcome = cache.outcome()
    assert (outcome.hits, outcome.declined) == (0, 2)


def test_what_the_device_has_is_not_asked_for() -> None:
    cache = SimulatedCache(plan(10), COSTS, most_blocks=1000)
    cache.request(Spooled(prompt(1, 2, 3), 0))
    cache.request(Spooled(prompt(1, 2, 3, 4), 2))
    outcome = cache.outcome()
    assert (outcome.host_hits, outcome.saved) == (1, 4)
    assert outcome.prefill_seconds == pytest.approx(0.010, rel=1e-6)


def test_deep_blocks_save_more_seconds() -> None:
    rates = Rates(1000.0, 10.0, 1000 * BLOCK_BYTES, 500 * BLOCK_BYTES)
    cache = SimulatedCache(plan(10), Costs(rates, 10, BLOCK_BYTES), most_blocks=1000)
    for _ in range(2):
        cache.request(Spooled(prompt(1, 2), 0))
    # 20 tokens, and on average 10 before each of them, each of which is a tenth of a token.
    assert cache.outcome().prefill_seconds == pytest.approx(0.020 + 0.020 * 10 / 10)


def test_busiest_minute_of_the_disk() -> None:
    trace = [
        prompt(1, 2, at_seconds=10.0),
        prompt(3, 4, 5, at_seconds=59.0),
        prompt(6, 7, at_seconds=61.0),
        prompt(6, 7, 8, at_seconds=1000.0),
    ]
    outcome = run(trace, plan(20, disk=20))
    assert outcome.peak_write_bytes_per_second == pytest.approx(5 * BLOCK_BYTES / 60)
    assert outcome.peak_read_bytes_per_second == 0.0


def test_a_prompt_larger_than_the_cache_does_not_drive_out_everything() -> None:
    outcome = run([[1], [2], [3], list(range(10, 40)), [3], [2]], plan(10))
    assert (outcome.shed, outcome.evicted_host, outcome.host_hits) == (22, 1, 2)


def test_progress_is_told(tmp_path: Path) -> None:
    made = spool(tmp_path, [[n] for n in range(600)])
    told: list[int] = []
    outcome = simulate(made, COSTS, plan(10), most_blocks=600, on_event=told.append)
    assert told == [256, 512]
    assert outcome.saved == 600


# -- against an LRU that shares nothing with ours -----------------------------------------------


class NaiveLRU:
    """A prefix cache of one tier in the plainest words."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.order: OrderedDict[int, None] = OrderedDict()  # oldest first
        self.above: dict[int, int | None] = {}

    def request(self, blocks: list[int]) -> int:
        hits = 0
        while hits < len(blocks) and blocks[hits] in self.order:
            hits += 1
        self.touch(blocks[:hits])
        for position in range(hits, len(blocks)):
            self.above[blocks[position]] = blocks[position - 1] if position else None
        while len(self.order) + len(blocks) - hits > self.capacity:
            self.evict(kept=blocks[hits - 1] if hits else None)
        self.order.update(dict.fromkeys(reversed(blocks[hits:])))
        return hits

    def touch(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.order.move_to_end(block)

    def evict(self, kept: int | None) -> None:
        """One that no other continues from, and the prompt that comes in does not either."""
        while True:
            oldest = next(iter(self.order))
            if oldest != kept and all(self.above[block] != oldest for block in self.order):
                del self.order[oldest]
                return
            self.order.move_to_end(oldest)


prompts_of_a_few = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40
)


@given(prompts=prompts_of_a_few, capacity=st.integers(6, 25))
def test_hits_are_those_of_a_naive_lru(prompts: list[list[int]], capacity: int) -> None:
    naive, cache = NaiveLRU(capacity), SimulatedCache(plan(capacity), COSTS, most_blocks=1000)
    expected = found = 0
    for ids in prompts:
        request = chained(ids)
        expected += naive.request(request.blocks.tolist())
        cache.request(Spooled(request, 0))
        found = cache.outcome().host_hits
        assert found == expected
    cache.check()


# -- against the optimum -------------------------------------------------------------------------


def most(made: Spool, blocks: int) -> int:
    return find_optimum(made, find_reuse(made), blocks, COSTS.prefill_seconds).hit_blocks


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("write", WRITES)
@settings(max_examples=25)
@given(
    prompts=prompts_of_a_few,
    host=st.integers(1, 12),
    disk=st.integers(0, 12),
    device=st.integers(0, 6),
)
def test_no_policy_has_more_hits_than_the_optimum(
    policy: Eviction, write: WriteWhen, prompts: list[list[int]], host: int, disk: int, device: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = spool(Path(folder), [chained(ids) for ids in prompts], device_blocks=device)
        cache = SimulatedCache(plan(host, disk, policy, write), COSTS, most_blocks=1000)
        for event in made:
            cache.request(event)
            cache.check()
        bound = most(made, host + disk)
    outcome = cache.outcome()
    assert outcome.hits <= bound
    assert outcome.host_hits + outcome.disk_hits + outcome.declined <= made.lookup_blocks


@pytest.mark.parametrize("policy", POLICIES)
def test_with_room_for_all_every_possible_hit_is_one(tmp_path: Path, policy: Eviction) -> None:
    dice = np.random.default_rng(7)
    prompts = [chained(dice.integers(0, 3, 1 + n % 8).tolist()) for n in range(200)]
    made = spool(tmp_path, prompts)
    possible = find_reuse(made).possible_hits
    outcome = simulate(made, COSTS, plan(3000, policy=policy), most_blocks=made.blocks)
    assert outcome.hits == possible
    assert outcome.evicted_host == 0


def test_room_for_more_than_there_is_changes_nothing(tmp_path: Path) -> None:
    dice = np.random.default_rng(8)
    prompts = [chained(dice.integers(0, 3, 1 + n % 8).tolist()) for n in range(200)]
    made = spool(tmp_path, prompts)
    distinct = find_reuse(made).distinct_blocks
    large = CachePlan("lru", Sizes(1 << 50, 1 << 50))
    capped = simulate(made, COSTS, large, most_blocks=distinct)
    assert capped.hits == find_reuse(made).possible_hits
    assert capped.written == distinct
