"""vLLM's blocks and KVStrata's: how token counts, block hashes and block ids translate."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Final, NamedTuple

from blake3 import blake3
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from kvstrata.core.types import BLOCK_KEY_BYTES, BlockKey
from kvstrata.integration.vllm.metadata import NULL_BLOCK
from kvstrata.integration.vllm.reach import UNLIMITED, Reach

DEFAULT_TOKENS_PER_BLOCK: Final = 64

BlockIds = Sequence[list[int]]  # of each KV cache group, the device blocks of a request


class GroupMath(NamedTuple):
    """A KV cache group: tokens of its device blocks, and how far its layers attend.

    Those of a recurrent group hold the state at their end.
    """

    device_tokens: int
    reach: Reach = UNLIMITED
    is_recurrent: bool = False

    @property
    def needs_beginning(self) -> bool:
        """Whether all device blocks from the first on are needed, at any length."""
        return not self.is_recurrent and not self.reach.is_limited

    def first_needed(self, tokens: int) -> int:
        """The first position whose device block is needed after *tokens*."""
        return tokens - 1 if self.is_recurrent else self.reach.first_needed(tokens)


def key_of_hash(block_hash: bytes) -> BlockKey:
    """The key of the block that ends where vLLM's *block_hash* does, whatever its length."""
    if len(block_hash) == BLOCK_KEY_BYTES:
        return bytes(block_hash)
    return blake3(block_hash).digest(length=BLOCK_KEY_BYTES)


@dataclass(frozen=True, slots=True)
class BlockMath:
    """Sizes in tokens: of device blocks, of one of vLLM's block hashes, of a block of ours."""

    groups: tuple[GroupMath, ...]
    hash_tokens: int
    tokens: int
    recurrent: tuple[int, ...] = field(init=False)  # groups that a state has a device block of

    def __post_init__(self) -> None:
        numbers = (number for number, group in enumerate(self.groups) if group.is_recurrent)
        object.__setattr__(self, "recurrent", tuple(numbers))

    @property
    def ratio(self) -> int:
        """Device blocks in a block, of all groups; states are in none."""
        return sum(
            self.tokens // group.device_tokens for group in self.groups if not group.is_recurrent
        )

    @property
    def most_held_at_once(self) -> int:
        """Device blocks of a block and a state."""
        return self.ratio + len(self.recurrent)

    def known_blocks(self, request: Request) -> int:
        """Leading blocks of *request* whose every token is known and hashed."""
        return len(request.block_hashes) * self.hash_tokens // self.tokens

    def key(self, request: Request, block: int) -> BlockKey:
        """The chained hash at the end of *block*, which names all before it (``hash_block_tokens``)."""
        return key_of_hash(request.block_hashes[(block + 1) * self.tokens // self.hash_tokens - 1])

    def keys(self, request: Request, first: int, end: int) -> list[BlockKey]:
        return [self.key(request, block) for block in range(first, end)]

    def findable_blocks(self, request: Request, blocks: int) -> int:
        """How many of the *blocks* of *request* are worth asking for.

        A state cannot be taken back by the token that vLLM computes again, of a whole prompt.
        """
        if not self.recurrent:
            return blocks
        before_the_last: int = (request.num_tokens - 1) // self.tokens
        return min(blocks, before_the_last)

    def loadable_tokens(self, request: Request, tokens: int, *, runs_at_once: bool) -> int:
        """How far *request* may be loaded of *tokens* that the cache has.

        Of a whole prompt vLLM computes the last token again. Where the reach is limited, it has by
        then given out no device blocks for what only that token needs. And where the request runs
        while it is loaded, no device block may be written by both.
        """
        if not runs_at_once and not any(group.reach.is_limited for group in self.groups):
            return tokens
        step = lcm(*(group.device_tokens for group in self.groups))
        before_the_last: int = (request.num_tokens - 1) // step * step
        return min(tokens, before_the_last)

    def has_all(self, block_ids: BlockIds, block: int) -> bool:
        """Whether every group still has its device blocks of *block*."""
        for group, ids in zip(self.groups, block_ids, strict=True):
            if group.reach.is_limited:
                ratio = self.tokens // group.device_tokens
                if NULL_BLOCK in ids[block * ratio : (block + 1) * ratio]:
                    return False
        return True

    def device_blocks(self, block_ids: BlockIds, first: int, end: int) -> list[int]:
        """Those of blocks *first* to *end*, in the order of a slot: ``ratio`` of them a block."""
        return self._in_slots(block_ids, first, end, first * self.tokens, end * self.tokens)

    def device_blocks_of_load(self, block_ids: BlockIds, start: int, end: int) -> list[int]:
        """Those of the tokens *start* to *end*, with ``NULL_BLOCK`` for the rest of the slots.

        Then those of the states after *end*, if there are recurrent groups.
        """
        first, last = start // self.tokens, -(-end // self.tokens)
        blocks = self._in_slots(block_ids, first, last, start, end)
        if not (recurrent := self.recurrent):
            return blocks
        states = {g: block_ids[g][end // self.groups[g].device_tokens - 1] for g in recurrent}
        return [*self.laid_out(blocks), *self.laid_out_states(states)]

    def laid_out(self, device_blocks: list[int]) -> list[int]:
        """*device_blocks*, ``ratio`` of them a block, with ``NULL_BLOCK`` for a slot's states."""
        if not self.recurrent:
            return device_blocks
        laid_out, rest = [], iter(device_blocks)
        for _ in range(len(device_blocks) // self.ratio):
            for group in self.groups:
                count = 0 if group.is_recurrent else self.tokens // group.device_tokens
                laid_out += [next(rest) for _ in range(count)] or [NULL_BLOCK]
        return laid_out

    def laid_out_states(self, device_blocks: Mapping[int, int]) -> list[int]:
        """Slots of states: each has the device block of its group, and no other."""
        laid_out = []
        for state in sorted(device_blocks):
            for number, group in enumerate(self.groups):
                count = 1 if group.is_recurrent else self.tokens // group.device_tokens
                laid_out += [device_blocks[state] if number == state else NULL_BLOCK] * count
        return laid_out

    def cached_on_device(self, request: Request, pool: BlockPool) -> int:
        """About how many leading tokens of *request* the prefix cache holds. Changes nothing there.

        Of groups that attend to everything by a binary search: the cache evicts the end of a
        prompt first, so presence hardly ever comes back after it has ended. The others must have
        what is in reach of that end, or of one before it. If this is wrong the caller asks the
        server for too much or too little.
        """
        unlimited = [i for i, group in enumerate(self.groups) if group.needs_beginning]
        limited = [i for i, group in enumerate(self.groups) if not group.needs_beginning]
        tokens = len(request.block_hashes) * self.hash_tokens
        for i in unlimited:
            tokens = min(tokens, self._beginning_on_device(request, pool, i, tokens))
        before = -1
        while tokens != before:
            before = tokens
            for i in limited:
                tokens = self._end_on_device(request, pool, i, tokens)
        return tokens

    def _in_slots(
        self, block_ids: BlockIds, first: int, last: int, start: int, end: int
    ) -> list[int]:
        """Device blocks of the tokens *start* to *end*, laid out in the slots *first* to *last*."""
        parts = []
        for group, ids in zip(self.groups, block_ids, strict=True):
            if group.is_recurrent:
                continue
            size, ratio = group.device_tokens, self.tokens // group.device_tokens
            wanted = ids[start // size : -(-end // size)]
            lead = start // size - first * ratio
            rest = (last - first) * ratio - lead - len(wanted)
            parts.append([*[NULL_BLOCK] * lead, *wanted, *[NULL_BLOCK] * rest])
        if len(parts) == 1:
            return parts[0]
        ratios = [self.tokens // g.device_tokens for g in self.groups if not g.is_recurrent]
        return [
            id
            for slot in range(last - first)
            for part, ratio in zip(parts, ratios, strict=True)
            for id in part[slot * ratio : (slot + 1) * ratio]
        ]

    def _beginning_on_device(
        self, request: Request, pool: BlockPool, group: int, tokens: int
    ) -> int:
        size = self.groups[group].device_tokens
        present = bisect_left(
            range(tokens // size),
            True,
            key=lambda block: not self._is_on_device(request, pool, group, block),
        )
        return present * size

    def _end_on_device(self, request: Request, pool: BlockPool, group: int, tokens: int) -> int:
        """The last length, up to *tokens*, at which all that is in reach is there."""
        size = self.groups[group].device_tokens
        end = tokens // size
        while end:
            needed = range(self.groups[group].first_needed(end * size) // size, end)
            missing = (b for b in needed if not self._is_on_device(request, pool, group, b))
            first_missing = next(missing, None)
            if first_missing is None:
                break
            end = first_missing
        return end * size

    def _is_on_device(self, request: Request, pool: BlockPool, group: int, block: int) -> bool:
        last = (block + 1) * self.groups[group].device_tokens // self.hash_tokens - 1
        return pool.get_cached_block(request.block_hashes[last], [group]) is not None


class HeldBlocks:
    """Device blocks kept from reuse while they are copied (``BlockPool.touch``), a bounded number."""

    def __init__(self, pool: BlockPool, limit: int) -> None:
        self._pool = pool
        self._limit = limit
        self.count = 0

    @property
    def room(self) -> int:
        return self._limit - self.count

    def hold(self, block_ids: list[int]) -> list[KVCacheBlock]:
        """The blocks, each with one more reference. The caller minds ``room``."""
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.touch(blocks)
        self.count += len(blocks)
        return blocks

    def release(self, blocks: list[KVCacheBlock]) -> None:
        """Give the references back; the last of a prompt is reused first, as vLLM frees."""
        self._pool.free_blocks(reversed(blocks))
        self.count -= len(blocks)
