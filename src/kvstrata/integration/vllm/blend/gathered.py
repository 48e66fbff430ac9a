"""Attention of chosen tokens by their positions, in the place of the engine's kernels.

Those want the tokens of a sequence side by side. Chosen ones mostly stand alone, and each would be a
sequence of its own, for which a GPU reads all KV before it once more. Here all of a prompt's are
the queries of one attention, each of which sees the KV up to its own position.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch

from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.blend.pages import Queries, TokenPages
from kvstrata.integration.vllm.blend.taps import AttentionTaps

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

__all__ = ["GatheredAttention"]

_UNKNOWN: Final = {
    "alibi_slopes": "adds to its products what grows with the distance (ALiBi)",
    "sinks": "has sinks",
    "logits_soft_cap": "caps its products",
}
"""What an implementation of vLLM's may do besides, by its attribute."""


class GatheredAttention:
    def __init__(
        self, attention: Sequence["Attention"], pages: Sequence[TokenPages], taps: AttentionTaps
    ) -> None:
        """All of the same layers, in the same order.

        Raises:
            ConfigError: A layer's attention is more than a softmax of products.
        """
        for layer in attention:
            _check(layer)
        self._pages = pages
        self._taps = taps

    @contextmanager
    def over(self, prompts: Sequence[Queries]) -> Iterator[None]:
        """Run the model in this context over the tokens of *prompts*, one behind the other."""

        def attend(number: int, queries: torch.Tensor, output: torch.Tensor) -> None:
            start = 0
            for prompt in prompts:
                part = slice(start, start + len(prompt.positions))
                attended = self._pages[number].attend(queries[part], prompt)
                output[part].copy_(attended.view_as(output[part]))
                start = part.stop

        with self._taps.attending(attend):
            yield


def _check(layer: "Attention") -> None:
    also = [what for name, what in _UNKNOWN.items() if _is_set(getattr(layer.impl, name, None))]
    if getattr(layer, "query_quant", None) is not None:
        also.append("quantises its queries")
    if also:
        raise ConfigError(
            f"the attention of layer {layer.layer_name} {', and '.join(also)}, which blending "
            "does not know",
            hint="set kv_connector to KVStrataConnector, which does not blend",
        )


def _is_set(value: object) -> bool:
    return value is not None and (isinstance(value, torch.Tensor) or bool(value))
