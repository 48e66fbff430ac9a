"""Device blocks for what a blended prompt needs behind a sliding window.

Of a prompt that is loaded, vLLM gives out device blocks only for what is in reach of its end. But
whatever is computed anew attends to tokens out of that reach, and they to others before: until a
request is blended, all of it must be somewhere, and of its exact prefix what its first token
attends to.
"""

from dataclasses import dataclass

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from kvstrata.blend.plan import BlendPlan
from kvstrata.integration.vllm.blocks import BlockMath

__all__ = ["Room"]


@dataclass(frozen=True, slots=True)
class _Reserve:
    first: int  # where its blocks begin, in device blocks of the prompt
    blocks: list[KVCacheBlock]  # as many as vLLM gives none for


class Room:
    """Blocks of vLLM's pool, held with a reference each as a request would hold them.

    They are reserved when vLLM is offered the request's tokens, which asks for the rest of its
    blocks in the same step, and taken if it does; what nobody has taken is released with the step.
    """

    def __init__(self, pool: BlockPool, math: BlockMath) -> None:
        """*math* has one group."""
        (self._group,) = math.groups
        self._hash_tokens = math.hash_tokens
        self._pool = pool
        self._reserved: dict[str, _Reserve] = {}  # by request id
        self._taken = 0

    @property
    def is_held(self) -> bool:
        return bool(self._reserved or self._taken)

    def reserve(self, request: Request, plan: BlendPlan, computed_tokens: int) -> bool:
        """Hold what *plan* needs beyond vLLM's own blocks, if there is enough for both.

        Of the exact prefix the first *computed_tokens* are in the prefix cache.
        """
        if (before := self._reserved.pop(request.request_id, None)) is not None:
            self._free(before.blocks)
        size, reach = self._group.device_tokens, self._group.reach
        first = reach.first_needed(plan.exact_end) // size
        end = reach.first_needed(plan.end) // size  # vLLM's blocks begin here
        if first >= end:
            return True
        cached = self._cached(request, first, min(end, computed_tokens // size))
        if cached is None:
            return False
        self._pool.touch(cached)
        new = end - first - len(cached)
        wanted = -(-request.num_tokens // size) + 1 - end  # of vLLM, for the rest of the prompt
        if new + wanted > self._pool.get_num_free_blocks():
            self._free(cached)
            return False
        self._reserved[request.request_id] = _Reserve(
            first, cached + self._pool.get_new_blocks(new)
        )
        return True

    def take(self, request_id: str, block_ids: list[int]) -> tuple[list[int], list[KVCacheBlock]]:
        """*block_ids* with what was reserved for the request in its place, and what that is.

        The latter is to be given back when the request has been blended.
        """
        reserve = self._reserved.pop(request_id, None)
        if reserve is None:
            return block_ids, []
        first, blocks = reserve.first, reserve.blocks
        self._taken += len(blocks)
        theirs = [block.block_id for block in blocks]
        return [*block_ids[:first], *theirs, *block_ids[first + len(theirs) :]], blocks

    def is_shared(self, block_ids: list[int]) -> bool:
        """Whether another request holds one of a request's own *block_ids*."""
        blocks = (self._pool.blocks[block_id] for block_id in block_ids)
        return any(block.ref_cnt > 1 for block in blocks if not block.is_null)

    def give_back(self, blocks: list[KVCacheBlock]) -> None:
        """What was taken is needed no longer."""
        self._taken -= len(blocks)
        self._free(blocks)

    def release(self) -> None:
        """The step is planned: vLLM will not take what is still reserved."""
        for reserve in self._reserved.values():
            self._free(reserve.blocks)
        self._reserved.clear()

    def _cached(self, request: Request, first: int, end: int) -> list[KVCacheBlock] | None:
        """Device blocks *first* to *end* in the prefix cache; None if they are not all there."""
        found = []
        for block in range(first, end):
            last = (block + 1) * self._group.device_tokens // self._hash_tokens - 1
            cached = self._pool.get_cached_block(request.block_hashes[last], [0])
            if cached is None:
                return None
            found += cached
        return found

    def _free(self, blocks: list[KVCacheBlock]) -> None:
        """The last of a prompt is reused first, as vLLM frees."""
        self._pool.free_blocks(reversed(blocks))
