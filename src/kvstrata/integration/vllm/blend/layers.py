"""The KV of each attention layer by token, in the way that is quickest where it is."""

from typing import TYPE_CHECKING

import torch

from kvstrata.integration.vllm.blend.pages import TokenPages, learn_page_map

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

__all__ = ["token_pages"]


def token_pages(
    attention: "Attention", pages: torch.Tensor, scratch_block: int, block_size: int
) -> TokenPages:
    """As ``learn_page_map`` finds it; on a GPU with kernels, if its elements lie as they read them."""
    page_map = learn_page_map(attention, pages, scratch_block, block_size)
    if pages.device.type != "cpu":
        from kvstrata.integration.vllm.blend.strided import (  # needs triton
            StridedPages,
            StridedPairs,
        )

        if (pairs := StridedPairs.of(page_map)) is not None:
            return StridedPages(attention, pages, page_map, pairs)
    return TokenPages(attention, pages, page_map)
