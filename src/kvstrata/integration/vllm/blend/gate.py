"""Before anything is blended: are this model's keys turned as we would turn them?

The same tokens are run at two positions. Values must be equal, and keys equal once they are moved;
a model for which that is not so (another rope in some layers, positions that act on attention in
other ways, a scaling that is not in the table) is refused. Needs no weights and no reference.

A forward that is stopped at the last layer must have written the KV of every layer: so ends what is
computed anew. Tokens here and there, computed once more behind KV that is exact, must become what they
were, and all of them, where attention is not the engine's, what they are with the engine's own.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from kvstrata.blend.position import (
    GATE_LIMIT,
    QUANTISED_GATE_LIMIT,
    PositionCorrector,
    gate_shifts,
    mean_difference,
    relative_difference,
)
from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.blend.moves import TokenMoves
from kvstrata.integration.vllm.blend.nested import NestedForward, Part
from kvstrata.integration.vllm.blend.pages import TokenPages
from kvstrata.integration.vllm.blend.taps import AttentionTaps
from kvstrata.integration.vllm.metadata import NULL_BLOCK

__all__ = ["check_model"]

_TOKENS: Final = 24


def check_model(
    nested: NestedForward,
    layers: dict[str, TokenPages],
    correctors: list[PositionCorrector],
    taps: AttentionTaps,
    *,
    vocabulary: int,
    positions: int,
) -> None:
    """Raises ``ConfigError`` unless K and V of all *layers* are as blending needs them.

    Args:
        correctors: Of each of *layers*.
        taps: Of *layers*, too.
        vocabulary: Token ids are below it.
        positions: The model takes those below it.
    """
    first = next(iter(layers.values()))
    count = min(_TOKENS, first.tokens)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, vocabulary, count))
    sources = np.arange(count)
    scratch = torch.tensor([NULL_BLOCK], dtype=torch.int32)

    def part(tokens: torch.Tensor, shift: int = 0) -> Part:
        return Part(tokens, torch.from_numpy(sources), scratch, shift=shift)

    def forward(tokens: torch.Tensor, shift: int = 0) -> None:
        nested.run([part(tokens, shift)])

    def written() -> list[tuple[torch.Tensor, torch.Tensor]]:
        read = (layer.read_blocks(scratch) for layer in layers.values())
        return [(keys[:count], values[:count]) for keys, values in read]

    nested.run_as_the_engine(part(tokens))
    stored = written()
    pages = [layer.copy_blocks(scratch) for layer in layers.values()]
    slots = NULL_BLOCK * first.tokens + torch.from_numpy(sources)
    for shift in gate_shifts(min(positions, *(c.positions for c in correctors)), count):
        forward(tokens, shift)
        further_on = written()
        moves = TokenMoves(sources, slots, sources, sources + shift, first.device)
        for layer, page, corrector in zip(layers.values(), pages, correctors, strict=True):
            layer.move(page, moves, corrector)
        _compare(layers, written(), further_on, f"its tokens are {shift} positions further on")
    forward(tokens.flip(0))  # all layers have other KV now
    with taps.until(len(layers) - 1, wanted=()):
        forward(tokens)
    _compare(layers, stored, written(), "the model stops at the last layer's attention")
    some = torch.from_numpy(sources[::2])
    for computed in (tokens.flip(0), tokens):
        nested.run([Part(computed[some], some, scratch)])
    _compare(layers, stored, written(), "every other token is computed once more")


def _compare(
    layers: dict[str, TokenPages],
    expected: Sequence[tuple[torch.Tensor, torch.Tensor]],
    found: Sequence[tuple[torch.Tensor, torch.Tensor]],
    when: str,
) -> None:
    """Keys and values of each of *layers*; raises ``ConfigError`` where they are others."""
    for (name, layer), ours, theirs in zip(layers.items(), expected, found, strict=True):
        differs = mean_difference if layer.is_quantised else relative_difference
        limit = QUANTISED_GATE_LIMIT if layer.is_quantised else GATE_LIMIT
        for what, one, other in zip(("keys", "values"), ours, theirs, strict=True):
            difference = differs(one, other)
            if difference > limit:
                raise ConfigError(
                    f"the {what} of layer {name} are not those of the model when {when}: they "
                    f"differ by {difference:.2g}",
                    hint="set kv_connector to KVStrataConnector, which does not blend",
                )
