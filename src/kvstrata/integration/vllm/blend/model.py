"""The engine's model, found from inside its connector without any help of vLLM."""

import sys
from types import FrameType
from typing import TYPE_CHECKING

import torch

from kvstrata.core.errors import ConfigError

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

__all__ = ["calling_model"]


def calling_model(attention: "dict[str, Attention]") -> torch.nn.Module:
    """The model whose runner is calling ``register_kv_caches`` right now.

    vLLM hands connectors the KV caches and no model; but its model runner is one of the callers
    (``GPUModelRunner.initialize_kv_cache``, in both of its generations).

    Args:
        attention: Layer name → attention layer, all of which must be the model's.

    Raises:
        ConfigError: No caller has such a model.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        model = _unwrapped(getattr(frame.f_locals.get("self"), "model", None))
        if model is not None and _has(model, attention):
            return model
        frame = frame.f_back
    raise ConfigError(
        "this vLLM's model runner keeps its model where KVStrata does not find it",
        hint="set kv_connector to KVStrataConnector, which does not blend",
    )


def _unwrapped(model: object) -> torch.nn.Module | None:
    """Without the wrapper that replays CUDA graphs (``CUDAGraphWrapper.unwrap``)."""
    while not isinstance(model, torch.nn.Module):
        unwrap = getattr(model, "unwrap", None)
        if unwrap is None:
            return None
        model = unwrap()
    return model


def _has(model: torch.nn.Module, attention: "dict[str, Attention]") -> bool:
    modules = {id(module) for module in model.modules()}
    return all(id(layer) in modules for layer in attention.values())
