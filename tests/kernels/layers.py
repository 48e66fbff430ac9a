"""One layer of a paged cache, as vLLM lays out the pages of several."""

import sys
from typing import NamedTuple

import torch
from hypothesis import strategies as st

__all__ = ["Layer", "a_layer", "tell"]


class Layer(NamedTuple):
    """Where the pages of one layer are: LBHNC, LBNHC, BLHNC or BLNHC, with what lies between."""

    layers: int
    number: int
    blocks_outermost: bool
    heads_first: bool
    page_tokens: int
    gap: int  # elements behind each page

    def make(self, pages: int, heads: int, elements: int) -> torch.Tensor:
        """A cache of all layers, float32: random numbers in this one, NaN everywhere else."""
        page = heads * self.page_tokens * elements + self.gap
        order = (pages, self.layers) if self.blocks_outermost else (self.layers, pages)
        whole = torch.full((*order, page), torch.nan)
        own = self.of(whole, heads)
        own.copy_(torch.randn(own.shape))
        return whole

    def of(self, whole: torch.Tensor, heads: int) -> torch.Tensor:
        """This layer of a cache, a view: (pages, heads, tokens, elements)."""
        rows = whole.select(1 if self.blocks_outermost else 0, self.number)
        rows = rows[:, : rows.shape[1] - self.gap]
        if self.heads_first:
            return rows.unflatten(1, (heads, self.page_tokens, -1))
        return rows.unflatten(1, (self.page_tokens, heads, -1)).transpose(1, 2)


@st.composite
def a_layer(draw: st.DrawFn) -> Layer:
    layers = draw(st.integers(1, 3))
    return Layer(
        layers,
        number=draw(st.integers(0, layers - 1)),
        blocks_outermost=draw(st.booleans()),
        heads_first=draw(st.booleans()),
        page_tokens=draw(st.integers(1, 7)),
        gap=draw(st.integers(0, 5)),
    )


def tell(*case: object) -> None:
    """Before a kernel runs: a GPU that it has harmed answers nobody, and hypothesis cannot try again."""
    sys.stdout.write(f"{case}\n")
