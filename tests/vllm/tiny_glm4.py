"""A small GLM-4, made on the spot: neighbouring elements of the first half of a head are turned."""

from pathlib import Path
from typing import Any, Final

import torch
from tests.vllm.oracle import VOCABULARY
from transformers import Glm4Config, Glm4ForCausalLM

GLM4: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def write_glm4(folder: Path) -> Path:
    """With weights so large that KV of another token tells in what follows; float32."""
    torch.manual_seed(0)
    Glm4ForCausalLM(Glm4Config(**GLM4, initializer_range=0.1)).save_pretrained(folder)
    return folder
