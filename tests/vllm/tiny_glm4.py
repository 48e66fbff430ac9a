"""A small GLM-4, made on the spot: neighbouring elements of the first half of a head are turned."""

from pathlib import Path
from typing import Any, Final

import torch
from tests.vllm.plans import LLAMA
from transformers import Glm4Config, Glm4ForCausalLM

GLM4: Final[dict[str, Any]] = LLAMA | {
    "architectures": ["Glm4ForCausalLM"],
    "model_type": "glm4",
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
    model = Glm4ForCausalLM(Glm4Config(**GLM4, initializer_range=0.1))
    model.to(torch.float32).save_pretrained(folder)
    return folder
