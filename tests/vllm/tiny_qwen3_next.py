"""A small Qwen3-Next, made on the spot: of four layers the last has full attention, three are linear.

In the type and of a head size that vLLM's linear attention on a CPU takes. Its states are small beside its
KV, so that vLLM has blocks of 64 tokens.
"""

import json
from pathlib import Path
from typing import Any, Final

import torch
from tests.vllm.oracle import VOCABULARY
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

STEP: Final = 64  # tokens of vLLM's blocks, and of KVStrata's
STATES: Final = 3  # recurrent groups: of a layer each
QWEN3_NEXT: Final[dict[str, Any]] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "max_position_embeddings": 4096,
}
SETTINGS: Final[dict[str, Any]] = {"dtype": "bfloat16"}
CACHED: Final[dict[str, Any]] = {"enable_prefix_caching": True, "num_gpu_blocks_override": 96}


def write_qwen3_next(folder: Path) -> None:
    """With weights so large that a state tells in the logits."""
    config = Qwen3NextConfig(**QWEN3_NEXT, initializer_range=0.1)
    torch.manual_seed(0)
    Qwen3NextForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(QWEN3_NEXT))
