"""Before anything is blended: are this model's keys turned as we would turn them?

The same tokens are run at two positions. Values must be equal, and keys equal once they are moved;
a model for which that is not so (another rope in some layers, positions that act on attention in
other ways, a scaling that is not in the table) is refused. Needs no weights and no reference.

A forward that is stopped at the last layer must have written the KV of every layer: so ends what is
computed anew.
"""

from typing import Final

import numpy as np
import torch

from kvstrata.blend.position import GATE_LIMIT, PositionCorrector, gate_shifts, relative_difference
from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.blend.nested import NestedForward, Part
from kvstrata.integration.vllm.blend.pages import TokenPages
from kvstrata.integration.vllm.blend.taps import QueryTaps
from kvstrata.integration.vllm.metadata import NULL_BLOCK

__all__ = ["check_model"]

_TOKENS: Final = 24


def check_model(
    nested: NestedForward,
    layers: dict[str, TokenPages],
    correctors: list[PositionCorrector],
    taps: QueryTaps,
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

    def run(shift: int, tokens: torch.Tensor = tokens) -> list[tuple[torch.Tensor, torch.Tensor]]:
        nested.run([Part(tokens, torch.from_numpy(sources), scratch, shift=shift)])
        read = (layer.read_blocks(scratch) for layer in layers.values())
        return [(keys[:count], values[:count]) for keys, values in read]

    stored = run(0)
    for shift in gate_shifts(min(positions, *(c.positions for c in correctors)), count):
        for name, corrector, (keys, values), (found_keys, found_values) in zip(
            layers, correctors, stored, run(shift), strict=True
        ):
            moved = corrector.correct(keys, sources, sources + shift)
            wrong = {
                "keys": relative_difference(moved, found_keys),
                "values": relative_difference(values, found_values),
            }
            for what, difference in wrong.items():
                if difference > GATE_LIMIT:
                    raise ConfigError(
                        f"the {what} of layer {name} are not those of the model when its tokens "
                        f"are {shift} positions further on: they differ by {difference:.2g}",
                        hint="set kv_connector to KVStrataConnector, which does not blend",
                    )

    others = tokens.flip(0)
    whole = run(0, others)
    run(0)
    with taps.until(len(layers) - 1, wanted=()):
        nested.run([Part(others, torch.from_numpy(sources), scratch)])
    for (name, layer), (keys, values) in zip(layers.items(), whole, strict=True):
        found_keys, found_values = layer.read_blocks(scratch)
        if not (
            torch.equal(found_keys[:count], keys) and torch.equal(found_values[:count], values)
        ):
            raise ConfigError(
                f"layer {name} has other KV where a forward ends at the attention of the last layer",
                hint="set kv_connector to KVStrataConnector, which does not blend",
            )
