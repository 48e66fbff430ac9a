"""What the requests of an engine have left in the cache that later ones can reuse anywhere."""

from typing import NamedTuple

from blake3 import blake3
from vllm.v1.request import Request

from kvstrata.blend.fingerprints import Fingerprints, Tokens, tokens_of
from kvstrata.blend.runs import Runs
from kvstrata.blend.source_index import BLENDED_GENERATION, EXACT_GENERATION, SourceIndex
from kvstrata.core.config import Config
from kvstrata.core.keys import KeyArray
from kvstrata.core.types import BlockKey, NamespaceId
from kvstrata.integration.vllm.blend.wishes import can_be_reused
from kvstrata.integration.vllm.blocks import BlockMath

__all__ = ["Learning"]


class _Piece(NamedTuple):
    """The arguments of ``SourceIndex.add``."""

    domain: bytes
    tokens: Tokens
    first_position: int
    keys: list[BlockKey]
    generation: int


class Learning:
    """A ``SourceIndex`` of requests, filled as their blocks are saved.

    Blocks come one by one while a request decodes, and a piece that is shorter than a chunk would
    never be found: what is learned waits until it is as long. To index it takes half a millisecond
    of a step that has just computed something else, so that is left to ``catch_up``.
    """

    def __init__(self, config: Config, math: BlockMath) -> None:
        self._math = math
        self._index = SourceIndex(
            Fingerprints(config.blend_chunk_size),
            tokens_per_block=math.tokens,
            capacity_tokens=config.blend_index_tokens,
        )
        self._next: dict[tuple[str, int], int] = {}  # block, by request id and generation
        self._due: list[_Piece] = []  # saved, and not in the index yet

    def runs(self, request: Request, namespace: NamespaceId, first_token: int) -> Runs:
        """Of *request*, from *first_token* up to its last token but one, what is known."""
        self.catch_up()
        assert request.prompt_token_ids is not None  # such requests are not blended
        tokens = tokens_of(request.prompt_token_ids)
        return self._index.match(_domain(request, namespace), tokens, first_token, len(tokens) - 1)

    def saved(
        self,
        request: Request,
        namespace: NamespaceId,
        first: int,
        end: int,
        generation: int = EXACT_GENERATION,
    ) -> None:
        """Blocks *first* to *end* of *request* are in the cache, or will be in a moment."""
        entry, tokens = (request.request_id, generation), self._math.tokens
        first = min(self._next.get(entry, first), first)
        if (end - first) * tokens >= self._index.grid_tokens:
            if can_be_reused(request):
                piece = _Piece(
                    _domain(request, namespace),
                    tokens_of(request.all_token_ids[first * tokens : end * tokens]),
                    first * tokens,
                    self._math.keys(request, first, end),
                    generation,
                )
                self._due.append(piece)
            first = end
        self._next[entry] = first

    def catch_up(self) -> None:
        """Index what has been saved since. Lookups and losses do it themselves before."""
        for piece in self._due:
            self._index.add(*piece)
        self._due.clear()

    def lost(self, keys: KeyArray) -> None:
        """The cache does not have these blocks any more."""
        self.catch_up()
        self._index.forget(keys)

    def finished(self, request_id: str) -> None:
        for generation in (EXACT_GENERATION, BLENDED_GENERATION):
            self._next.pop((request_id, generation), None)

    def clear(self) -> None:
        self._due.clear()
        self._index.clear()


def _domain(request: Request, namespace: NamespaceId) -> bytes:
    """What else than its tokens and their places the KV of *request* depends on."""
    return blake3(namespace + (request.cache_salt or "").encode()).digest()
