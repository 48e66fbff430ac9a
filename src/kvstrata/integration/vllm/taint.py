"""Block hashes of requests with approximate KV: private ones, from the first approximate block on.

KV that is blended, here or by the engine that sends it, is another value than what its tokens name.
vLLM chains the hash of a block to the one before, so a random one in their place makes all after it
random too: no prefix cache and no store ever takes such a block for exact, no KV event has the hash
of its tokens, and those before it stay shared.
"""

import secrets
from typing import Final, NamedTuple

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

from kvstrata.integration.vllm.blocks import BlockMath
from kvstrata.integration.vllm.request_params import TAINT_FROM

__all__ = ["TaintChain"]

_SALT_BYTES: Final = 16


class _Taint(NamedTuple):
    first_block: int  # in block hashes
    salt: str | None  # that the request came with


class TaintChain:
    def __init__(self, math: BlockMath) -> None:
        self._math = math
        self._taints: dict[str, _Taint] = {}  # by request id

    def receive(self, request: Request) -> None:
        """Taint *request* if its ``kv_transfer_params`` say so: ``{"taint_from": token}``.

        KV that another engine sends may be approximate from a token of the prompt on. Whatever else
        is said there is no such token, and taints nothing.
        """
        first = (request.kv_transfer_params or {}).get(TAINT_FROM)
        if type(first) is int and 0 <= first < request.num_prompt_tokens:
            self.taint(request, first)

    def taint(self, request: Request, first_token: int) -> None:
        """Rename the blocks of *request* from the one of *first_token* on.

        If that is not full yet, the last one that is full goes with it, or if none is, a salt that
        nobody has names the first. Those that it fills later are named after these. A request can be
        tainted again, and only the last time counts.
        """
        self.lift(request)
        salt = request.cache_salt
        if request.block_hashes:
            first = min(first_token // self._math.hash_tokens, len(request.block_hashes) - 1)
            length = len(request.block_hashes[first])
            del request.block_hashes[first:]
            request.block_hashes.append(BlockHash(secrets.token_bytes(length)))
            request.update_block_hashes()
        else:
            first = 0
            request.cache_salt = secrets.token_hex(_SALT_BYTES)
        self._taints[request.request_id] = _Taint(first, salt)

    def lift(self, request: Request) -> None:
        """Give *request* the names of its tokens again; it must hold no approximate block then."""
        taint = self._taints.pop(request.request_id, None)
        if taint is not None:
            request.cache_salt = taint.salt
            del request.block_hashes[taint.first_block :]
            request.update_block_hashes()

    def first_token(self, request_id: str) -> int | None:
        """Where the request's blocks begin to be approximate; None if none is."""
        taint = self._taints.get(request_id)
        return None if taint is None else taint.first_block * self._math.hash_tokens

    def exact_blocks(self, request: Request) -> int:
        """Leading blocks of *request* that are known by their tokens, and hashed."""
        known = self._math.known_blocks(request)
        first = self.first_token(request.request_id)
        return known if first is None else min(known, first // self._math.tokens)

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._taints.pop(request_id, None)
