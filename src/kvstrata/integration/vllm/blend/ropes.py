"""The rotary embedding of each attention layer of a model that vLLM has built."""

from typing import TYPE_CHECKING

import torch

from kvstrata.blend.position import PositionCorrector, check_rope_settings
from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

__all__ = ["check_ropes", "correctors"]


def correctors(
    model: torch.nn.Module, attention: "dict[str, Attention]"
) -> list[PositionCorrector]:
    """One for each layer of *attention*, equal for layers that share a table.

    A layer's rope is the module beside it that has a table of cosines and sines
    (``RotaryEmbedding.cos_sin_cache``).

    Raises:
        ConfigError: A layer has none or several: it is not known how its keys are turned.
    """
    by_layer = {id(module): parent for parent in model.modules() for module in parent.children()}
    made: dict[int, PositionCorrector] = {}
    found = []
    for name, layer in attention.items():
        beside = by_layer[id(layer)].modules()
        ropes = {id(module): module for module in beside if _is_rope(module)}
        if len(ropes) != 1:
            raise ConfigError(
                f"layer {name} has {len(ropes)} rotary embeddings beside it, and one is needed",
                hint="set kv_connector to KVStrataConnector, which does not blend",
            )
        ((key, rope),) = ropes.items()
        if key not in made:
            made[key] = _corrector(rope)
        found.append(made[key])
    return found


def check_ropes(model: torch.nn.Module, config: Config, head_dim: int) -> None:
    """Raises ``ConfigError`` if *config* says of the model's ropes or heads what they are not."""
    bases = {getattr(rope, "base", None) for rope in model.modules() if _is_rope(rope)}
    for base in bases:
        check_rope_settings(
            rope_theta=config.rope_theta,
            head_dim=config.head_dim,
            model_rope_theta=base,
            model_head_dim=head_dim,
        )


def _is_rope(module: object) -> bool:
    return isinstance(getattr(module, "cos_sin_cache", None), torch.Tensor)


def _corrector(rope: "RotaryEmbeddingBase") -> PositionCorrector:
    return PositionCorrector(
        rope.cos_sin_cache, rotary_dim=rope.rotary_dim, is_neox=rope.is_neox_style
    )
