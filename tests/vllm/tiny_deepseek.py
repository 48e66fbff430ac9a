"""A small DeepSeek V2, made on the spot: its layers keep a latent of 512 and a turned key of 64 each."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from tests.vllm.oracle import VOCABULARY
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

with_amx = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="without AMX vLLM goes on from no latents"
)
LAYERS: Final = 3
LATENT: Final = 576  # numbers of a token in a layer
QUERY: Final = 96  # of a head
DEEPSEEK: Final[dict[str, Any]] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": LAYERS,
    "moe_intermediate_size": 64,
    "max_position_embeddings": 4096,
}
YARN: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


def write_deepseek(folder: Path, *, is_scaled: bool = True) -> None:
    """With weights so large that KV of another token tells in the logits.

    If its positions are not scaled, as those of real ones are, vLLM 0.32 turns wrong elements on a CPU:
    its kernel takes queries and keys for tensors without gaps, and here they are parts of others.
    """
    model = DEEPSEEK | ({"rope_parameters": YARN} if is_scaled else {})
    config = DeepseekV2Config(**model, initializer_range=0.1)
    torch.manual_seed(0)
    DeepseekV2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(model))
