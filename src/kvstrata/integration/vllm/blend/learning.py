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
from kvstrata.integration.vllm.blend.wishes import can_be_reused, salt_of
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
        # The next block to learn, by request and stretch: where that begins, or None if it is exact.
        self._next: dict[str, dict[int | None, int]] = {}
        self._due: list[_Piece] = []  # saved, and not in the index yet

    def can_find(self, blocks: int) -> bool:
        """Whether so many blocks are long enough to be found again."""
        return blocks * self._math.tokens >= self._index.grid_tokens

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
        over_reused_from: int | None = None,
    ) -> None:
        """Blocks *first* to *end* of *request* are in the cache, or will be in a moment.

        Args:
            over_reused_from: The first block of the stretch that they are a part of, if that is
                computed over reused KV.
        """
        tokens = self._math.tokens
        learned = self._next.setdefault(request.request_id, {})
        first = min(learned.get(over_reused_from, first), first)
        if self.can_find(end - first):
            if can_be_reused(request):
                piece = _Piece(
                    _domain(request, namespace),
                    tokens_of(request.all_token_ids[first * tokens : end * tokens]),
                    first * tokens,
                    self._math.keys(request, first, end),
                    EXACT_GENERATION if over_reused_from is None else BLENDED_GENERATION,
                )
                self._due.append(piece)
            first = end
        learned[over_reused_from] = first

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
        self._next.pop(request_id, None)

    def clear(self) -> None:
        self._due.clear()
        self._index.clear()


def _domain(request: Request, namespace: NamespaceId) -> bytes:
    """What else than its tokens and their places the KV of *request* depends on."""
    return blake3(namespace + salt_of(request).encode()).digest()
