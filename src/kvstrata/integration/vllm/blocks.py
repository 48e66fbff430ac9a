"""vLLM's blocks and KVStrata's: how token counts, block hashes and block ids translate."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from blake3 import blake3
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from kvstrata.core.types import BLOCK_KEY_BYTES, BlockKey

DEFAULT_TOKENS_PER_BLOCK: Final = 64


@dataclass(frozen=True, slots=True)
class BlockMath:
    """Sizes in tokens: of a device block, of one of vLLM's block hashes, of a block of ours."""

    device_tokens: int
    hash_tokens: int
    tokens: int

    @property
    def ratio(self) -> int:
        """Device blocks in a block."""
        return self.tokens // self.device_tokens

    def known_blocks(self, request: Request) -> int:
        """Leading blocks of *request* whose every token is known and hashed."""
        return len(request.block_hashes) * self.hash_tokens // self.tokens

    def key(self, request: Request, block: int) -> BlockKey:
        """The chained hash at the end of *block*, which names all before it (``hash_block_tokens``)."""
        block_hash = bytes(request.block_hashes[(block + 1) * self.tokens // self.hash_tokens - 1])
        if len(block_hash) == BLOCK_KEY_BYTES:
            return block_hash
        return blake3(block_hash).digest(length=BLOCK_KEY_BYTES)

    def keys(self, request: Request, first: int, end: int) -> list[BlockKey]:
        return [self.key(request, block) for block in range(first, end)]

    def cached_on_device(self, request: Request, pool: BlockPool) -> int:
        """About how many leading tokens of *request* the prefix cache holds. Changes nothing there.

        A binary search: the cache evicts the end of a prompt first, so presence hardly ever comes
        back after it has ended. If it does the caller asks the server for too much or too little.
        """
        present = bisect_left(
            request.block_hashes,
            True,
            key=lambda block_hash: pool.get_cached_block(block_hash, [0]) is None,
        )
        return present * self.hash_tokens


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
