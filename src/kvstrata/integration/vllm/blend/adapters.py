"""Running a model that serves LoRA adapters as it is without them.

Its layers look up which adapter each token of the step has. What is blended has none, and none of
these tokens; and what of the step is still to be computed, its logits, must find its own again.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.config import VllmConfig
from vllm.lora.layers import LoRAMapping
from vllm.lora.model_manager import LoRAModelManager

from kvstrata.core.errors import ConfigError

__all__ = ["check_adapters", "without_adapters"]

_NO_ADAPTER = 0


def check_adapters(model: torch.nn.Module, vllm_config: VllmConfig) -> None:
    """Raises ``ConfigError`` if *model* serves adapters and could not be run without them."""
    if vllm_config.lora_config is not None and _adapters_of(model) is None:
        raise ConfigError(
            "this vLLM keeps its LoRA adapters where KVStrata does not find them",
            hint="start vLLM without --enable-lora, or set kv_connector to KVStrataConnector",
        )


@contextmanager
def without_adapters(model: torch.nn.Module, tokens: int) -> Iterator[None]:
    """Within, *model* can be run over so many *tokens*, and the logits of one; none has an adapter."""
    manager = _adapters_of(model)
    if manager is None:
        yield
        return
    of_step = manager._last_mapping
    manager.set_adapter_mapping(
        LoRAMapping((_NO_ADAPTER,) * tokens, (_NO_ADAPTER,), is_prefill=True)
    )
    try:
        yield
    finally:
        if of_step is not None:
            manager.set_adapter_mapping(of_step)


def _adapters_of(model: torch.nn.Module) -> LoRAModelManager | None:
    return getattr(model, "lora_manager", None)
