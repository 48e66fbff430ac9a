"""KV by token, read and written by kernels where its elements lie in strides."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvstrata.blend.attend_triton import PagedKV, attend
from kvstrata.blend.move_triton import Moves, Rope, move_tokens
from kvstrata.blend.position import PositionCorrector
from kvstrata.integration.vllm.blend.elements import scales_of
from kvstrata.integration.vllm.blend.moves import TokenMoves
from kvstrata.integration.vllm.blend.pages import PageMap, Queries, Strides, TokenPages

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

__all__ = ["StridedPages", "StridedPairs"]


@dataclass(frozen=True, slots=True)
class StridedPairs:
    """Where a page has the K of each head of each token, with its V behind it."""

    keys: Strides
    shape: tuple[int, int, int]  # heads, tokens, K and V

    @classmethod
    def of(cls, page_map: PageMap) -> "StridedPairs | None":
        """None if elements lie otherwise."""
        tokens, heads, size = page_map.keys.shape
        if page_map.values.shape != page_map.keys.shape:
            return None
        keys, values = Strides.of(page_map.keys), Strides.of(page_map.values)
        if keys is None or keys.element != 1 or values != keys._replace(first=keys.first + size):
            return None
        return cls(keys, (heads, tokens, 2 * size))

    def view(self, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Of *pages*, uint8 (pages, page bytes): (pages, heads, tokens, K and V)."""
        elements = pages.view(dtype)
        return elements.as_strided(
            (len(pages), *self.shape),
            (elements.stride(0), self.keys.head, self.keys.token, 1),
            elements.storage_offset() + self.keys.first,
        )


class StridedPages(TokenPages):
    """``TokenPages`` on a GPU: nothing lies between the pages and what is made of them."""

    def __init__(
        self, attention: "Attention", pages: torch.Tensor, page_map: PageMap, pairs: StridedPairs
    ) -> None:
        super().__init__(attention, pages, page_map)
        self._pairs = pairs
        self._cache = pairs.view(pages, self._elements.number_type)

    def move(self, pages: torch.Tensor, moves: TokenMoves, corrector: PositionCorrector) -> None:
        move_tokens(
            self._pairs.view(pages.to(self.device), self._cache.dtype),
            self._cache,
            Moves(moves.rows, moves.slots, *moves.positions(corrector)),
            Rope(corrector.table, corrector.is_neox, corrector.first_dim),
        )

    def attend(self, queries: torch.Tensor, of: Queries) -> torch.Tensor:
        key_scale, value_scale = scales_of(self._attention)
        kv = PagedKV(
            self._cache,
            of.device_blocks,
            key_size=queries.shape[-1],
            key_scale=key_scale,
            value_scale=value_scale,
        )
        scale, window = self._attention.impl.scale, self._attention.sliding_window
        return attend(queries, of.positions, kv, scale, window)
