"""KV by token, read and written by kernels where its elements lie in strides."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvstrata.blend.attend_triton import PagedKV, attend
from kvstrata.blend.move_triton import Moves, Rope, move_tokens
from kvstrata.blend.position import PositionCorrector
from kvstrata.integration.vllm.blend.elements import scales_of
from kvstrata.integration.vllm.blend.moves import TokenMoves
from kvstrata.integration.vllm.blend.pages import PageMap, Queries, TokenPages

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

__all__ = ["StridedPages", "Strides"]


@dataclass(frozen=True, slots=True)
class Strides:
    """Where a page has the K of each head of each token, with its V behind it; in elements."""

    first: int
    head: int
    token: int
    shape: tuple[int, int, int]  # heads, tokens, K and V

    @classmethod
    def of(cls, page_map: PageMap) -> "Strides | None":
        """None if elements lie otherwise."""
        keys = page_map.keys
        tokens, heads, size = keys.shape
        first = int(keys[0, 0, 0])
        token = int(keys[1, 0, 0]) - first if tokens > 1 else size
        head = int(keys[0, 1, 0]) - first if heads > 1 else size
        found = first + sum(
            stride * torch.arange(count, device=keys.device).view(shape)
            for stride, count, shape in (
                (token, tokens, (-1, 1, 1)),
                (head, heads, (1, -1, 1)),
                (1, size, (1, 1, -1)),
            )
        )
        if not torch.equal(keys, found) or not torch.equal(page_map.values, found + size):
            return None
        return cls(first, head, token, (heads, tokens, 2 * size))

    def view(self, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Of *pages*, uint8 (pages, page bytes): (pages, heads, tokens, K and V)."""
        elements = pages.view(dtype)
        return elements.as_strided(
            (len(pages), *self.shape),
            (elements.stride(0), self.head, self.token, 1),
            elements.storage_offset() + self.first,
        )


class StridedPages(TokenPages):
    """``TokenPages`` on a GPU: nothing lies between the pages and what is made of them."""

    def __init__(
        self, attention: "Attention", pages: torch.Tensor, page_map: PageMap, strides: Strides
    ) -> None:
        super().__init__(attention, pages, page_map)
        self._strides = strides
        self._cache = strides.view(pages, self._elements.number_type)

    def move(self, pages: torch.Tensor, moves: TokenMoves, corrector: PositionCorrector) -> None:
        move_tokens(
            self._strides.view(pages.to(self.device), self._cache.dtype),
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
