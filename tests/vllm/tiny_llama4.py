"""A Llama 4 of text alone: chunked attention and full, and a mixture of experts in every other layer."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

import torch
from tests.vllm.made_over import Config, Weights, made_over

from kvstrata.integration.vllm.tiny_model import TinyLlama

_LLAMA: Final = TinyLlama(dtype="float32", intermediate_size=256)
_SIGNS: Final = 2  # elements of each token's state that are its own sign, and nothing is added to
_EXPERTS: Final = 2**_SIGNS
_EVERY: Final = 2  # layers, of which the last has experts


def write_tiny_llama4(folder: Path, chunk: int) -> Path:
    """All layers but the last attend over chunks of *chunk* tokens; one expert answers beside a shared one.

    Which one depends on the token alone: it would be another where two are equal but for the order
    of a sum, and so would the answer.
    """
    return made_over(folder, _LLAMA, partial(_config, chunk), _weights)


def _config(chunk: int, llama: Config) -> Config:
    return llama | {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "intermediate_size_mlp": _LLAMA.intermediate_size,
        "attention_chunk_size": chunk,
        "no_rope_layers": [1] * (_LLAMA.layers - 1) + [0],  # 0: no positions, and attends to all
        "interleave_moe_layer_step": _EVERY,
        "num_local_experts": _EXPERTS,
        "num_experts_per_tok": 1,
    }


def _weights(llama: Weights) -> Weights:
    generator = torch.Generator().manual_seed(_LLAMA.seed)

    def normal(*shape: int, inputs: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / inputs**0.5

    hidden, inner = _LLAMA.hidden_size, _LLAMA.intermediate_size
    router = torch.zeros(_EXPERTS, hidden)
    router[:, :_SIGNS] = torch.tensor(list(product((-2.0, 2.0), repeat=_SIGNS)))
    weights = {name.replace(".mlp.", ".feed_forward."): llama[name] for name in llama}
    weights["model.embed_tokens.weight"][:, :_SIGNS].sign_()
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[:_SIGNS] = 0
    for layer in range(_EVERY - 1, _LLAMA.layers, _EVERY):
        prefix = f"model.layers.{layer}.feed_forward"
        for name in ("gate_proj", "up_proj", "down_proj"):
            shared = weights.pop(f"{prefix}.{name}.weight")
            weights[f"{prefix}.shared_expert.{name}.weight"] = shared
        down = normal(_EXPERTS, inner, hidden, inputs=inner)
        down[..., :_SIGNS] = 0
        weights |= {
            f"{prefix}.router.weight": router.clone(),
            f"{prefix}.experts.gate_up_proj": normal(_EXPERTS, hidden, 2 * inner, inputs=hidden),
            f"{prefix}.experts.down_proj": down,
        }
    return weights
