"""Block hashes of blended requests: private ones, from the first approximate block on.

KV that is blended is another value than what its tokens name. vLLM chains the hash of a block to
the one before, so a random one in their place makes all after it random too: no prefix cache, no
store and no KV event ever takes such a block for exact, and those before it stay shared.
"""

import secrets

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

__all__ = ["TaintChain"]


class TaintChain:
    def __init__(self, hash_tokens: int) -> None:
        """*hash_tokens*: of each of a request's block hashes."""
        self._hash_tokens = hash_tokens
        self._first_block: dict[str, int] = {}  # by request id, in block hashes

    def taint(self, request: Request, first_token: int) -> None:
        """Rename the blocks of *request* from the one of *first_token* on, which must be full.

        Those that it fills later are named after these. A request can be tainted again, and only
        the last time counts.
        """
        self.lift(request)
        first = first_token // self._hash_tokens
        length = len(request.block_hashes[first])
        del request.block_hashes[first:]
        request.block_hashes.append(BlockHash(secrets.token_bytes(length)))
        request.update_block_hashes()
        self._first_block[request.request_id] = first

    def lift(self, request: Request) -> None:
        """Give *request* the names of its tokens again; it must hold no approximate block then."""
        first = self._first_block.pop(request.request_id, None)
        if first is not None:
            del request.block_hashes[first:]
            request.update_block_hashes()

    def first_token(self, request_id: str) -> int | None:
        """Where the request's blocks begin to be approximate; None if none is."""
        first = self._first_block.get(request_id)
        return None if first is None else first * self._hash_tokens

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._first_block.pop(request_id, None)
