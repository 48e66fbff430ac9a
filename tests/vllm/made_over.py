"""A tiny Llama made into a model of another kind."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file

from kvstrata.integration.vllm.tiny_model import TinyLlama, write_tiny_llama

Config = dict[str, Any]
Weights = dict[str, torch.Tensor]


def made_over(
    folder: Path,
    llama: TinyLlama,
    config: Callable[[Config], Config],
    weights: Callable[[Weights], Weights],
) -> Path:
    """Write *llama* to *folder* as what *config* and *weights* make of its configuration and tensors."""
    write_tiny_llama(folder, llama)
    settings = folder / "config.json"
    settings.write_text(json.dumps(config(json.loads(settings.read_text()))))
    tensors = folder / "model.safetensors"
    save_file(weights(load(tensors.read_bytes())), tensors, metadata={"format": "pt"})
    return folder
