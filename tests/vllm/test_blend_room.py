"""Device blocks for blending behind a window, out of vLLM's own pool."""

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvstrata.blend.plan import BlendPlan, ReusedRuns
from kvstrata.integration.vllm.blend.room import Room
from kvstrata.integration.vllm.blocks import BlockMath, GroupMath
from kvstrata.integration.vllm.reach import Reach

SIZE = 32
WINDOW = 70
TOKENS = 10 * SIZE + 5
NONE = 0  # the block that vLLM puts where it gives out none


def room(pool: BlockPool, window: int | None = WINDOW) -> Room:
    return Room(pool, BlockMath((GroupMath(SIZE, Reach(window)),), SIZE, 2 * SIZE))


def pool_of(blocks: int) -> BlockPool:
    """So many free ones, and the one that stands for none."""
    return BlockPool(blocks + 1, True, SIZE)


def request() -> Request:
    init_none_hash(sha256)
    ids = list(range(TOKENS))
    hasher = get_request_block_hasher(SIZE, sha256)
    return Request("r", ids, SamplingParams(max_tokens=1), None, block_hasher=hasher)


def plan(exact_blocks: int) -> BlendPlan:
    """All but the exact prefix is one run."""
    exact_end = exact_blocks * SIZE
    start, length, delta = (np.array([each]) for each in (exact_end, TOKENS - exact_end, 7))
    runs = ReusedRuns(start, length, delta, np.zeros(1, np.bool_))
    return BlendPlan.of_runs(runs, prompt_tokens=TOKENS, block_tokens=SIZE, exact_end=exact_end)


def cache(pool: BlockPool, request: Request, blocks: int) -> list[int]:
    """The first *blocks* of *request* are computed, and free again; their ids."""
    held = pool.get_new_blocks(blocks)
    pool.cache_full_blocks(request, held, 0, blocks, SIZE, 0)
    pool.free_blocks(reversed(held))
    return [block.block_id for block in held]


# Of the last token's reach are blocks 7 to 9, of the one behind an exact prefix of 4 blocks 1 to 3.
THEIRS = [NONE] * 7 + [90, 91, 92]


def test_every_token_to_be_computed_has_a_place_and_so_has_what_it_reaches() -> None:
    pool = pool_of(30)
    ours = room(pool)
    assert ours.reserve(request(), plan(4), 0)
    ids, held = ours.take("r", THEIRS)
    assert ids[:1] == [NONE]
    assert ids[7:] == [90, 91, 92]
    assert len({*ids[1:7]} - {NONE}) == 6
    assert [block.block_id for block in held] == ids[1:7]
    ours.release()  # it is taken
    assert pool.get_num_free_blocks() == 24
    ours.give_back(held)
    assert pool.get_num_free_blocks() == 30


def test_a_request_that_is_offered_twice_holds_what_the_last_offer_needs() -> None:
    pool, asked = pool_of(11), request()
    ours = room(pool)
    assert ours.reserve(asked, plan(4), 0)
    assert ours.reserve(asked, plan(5), 0)
    assert pool.get_num_free_blocks() == 6
    ids, _ = ours.take("r", THEIRS)
    assert ids[:2] == [NONE, NONE]


def test_what_the_device_has_of_the_exact_prefix_stays_where_it_is() -> None:
    pool, asked = pool_of(30), request()
    cached = cache(pool, asked, 3)
    ours = room(pool)
    assert ours.reserve(asked, plan(4), 3 * SIZE)
    pool.get_new_blocks(20)  # nobody gets it meanwhile
    ids, _ = ours.take("r", THEIRS)
    assert ids[1:3] == cached[1:]
    assert ids[3] not in cached


def test_an_exact_prefix_that_the_device_has_lost_is_not_built_on() -> None:
    pool, asked = pool_of(30), request()
    cached = cache(pool, asked, 4)
    pool.evict_blocks({cached[2]})
    ours = room(pool)
    assert not ours.reserve(asked, plan(4), 4 * SIZE)
    assert (ours.is_held, pool.get_num_free_blocks()) == (False, 30)


# 6 of ours, 3 in reach of the last token, one for that token and one for what comes after it.
@pytest.mark.parametrize(("blocks", "enough"), [(11, True), (10, False)])
def test_nothing_is_held_unless_there_is_enough_for_the_whole_prompt(
    blocks: int, enough: bool
) -> None:
    pool = pool_of(blocks)
    ours = room(pool)
    assert ours.reserve(request(), plan(4), 0) is enough
    assert ours.is_held is enough
    ours.release()  # vLLM has not taken it after all
    assert not ours.is_held
    assert pool.get_num_free_blocks() == blocks
    assert ours.take("r", THEIRS) == (THEIRS, [])


@pytest.mark.parametrize("window", [None, TOKENS])
def test_where_everything_is_in_reach_vllm_has_given_all_blocks(window: int | None) -> None:
    ours = room(pool_of(0), window)
    assert ours.reserve(request(), plan(4), 0)
    assert not ours.is_held


def test_a_block_that_another_request_holds_is_shared() -> None:
    pool, asked = pool_of(4), request()
    ours = room(pool)
    cached = cache(pool, asked, 2)
    own = [block for id_ in cached for block in [pool.blocks[id_]]]
    pool.touch(own)  # as vLLM does for the request itself
    assert not ours.is_shared([NONE, *cached])
    pool.touch(own[1:])  # and for another one
    assert ours.is_shared([NONE, *cached])
    assert not ours.is_shared(cached[:1])
