"""A Llama of a few megabytes with random weights, for tests and demonstrations of a real engine.

The weights that an engine makes up by itself (``load_format="dummy"``) are nearly zero: every
prompt continues with the same token, so a test that compares tokens cannot see a wrong cache.
These are scaled so that attention picks out few of the tokens before it and outweighs the token
itself: the continuation depends on every part of the prompt.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

__all__ = ["TinyLlama", "write_tiny_llama"]

# Standard deviation of each product's output for inputs of variance 1.
_QUERY_KEY_GAIN: Final = 1.5  # attention scores with a deviation of its square
_OUTPUT_GAIN: Final = 2.0  # makes up for averaging the values
_LOGIT_GAIN: Final = 3.0
_GAINS: Final = {
    "self_attn.q_proj": _QUERY_KEY_GAIN,
    "self_attn.k_proj": _QUERY_KEY_GAIN,
    "self_attn.v_proj": 1.0,
    "self_attn.o_proj": _OUTPUT_GAIN,
    "mlp.gate_proj": 1.0,
    "mlp.up_proj": 1.0,
    "mlp.down_proj": 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyLlama:
    """Shape, type and seed of the weights. Equal values give equal files.

    An engine may choose a shorter type than ``float32`` unless told otherwise: pass the same
    ``dtype`` to vLLM. There is no end token: generation runs to ``max_tokens``.

    With a *window*, all layers but the last *full_layers* attend over that many tokens only: as in
    Mistral if there are none of them, else as in Gemma.

    *rope*: the ``rope_scaling`` of its configuration, if its positions are scaled.
    """

    hidden_size: int = 256
    intermediate_size: int = 512
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    vocab_size: int = 1024
    max_position: int = 8192
    window: int | None = None
    full_layers: int = 0
    rope: Mapping[str, Any] | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    seed: int = 0


def write_tiny_llama(folder: Path, model: TinyLlama | None = None) -> Path:
    """Write ``config.json`` and ``model.safetensors`` and return *folder*, created if needed.

    There is no tokenizer: use ``skip_tokenizer_init=True`` and prompts of token ids. An engine may
    be started in the same process.
    """
    from safetensors.torch import save_file

    model = model or TinyLlama()
    folder.mkdir(parents=True, exist_ok=True)
    with _one_thread():
        weights = _weights(model)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(model), indent=2) + "\n")
    return folder


@contextmanager
def _one_thread() -> Iterator[None]:
    """For torch. Where its threads have run, vLLM's engine hangs on a GPU: it is forked from here,
    without them, and waits for them.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _config(model: TinyLlama) -> dict[str, Any]:
    others: dict[str, Any] = {}
    if model.window is not None:
        sliding = model.layers - model.full_layers
        types = ["sliding_attention"] * sliding + ["full_attention"] * model.full_layers
        others |= {"sliding_window": model.window, "layer_types": types}
    if model.rope is not None:
        others["rope_scaling"] = dict(model.rope)
    return others | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": model.dtype,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _weights(model: TinyLlama) -> dict[str, Any]:
    """Tensors by their names in a Llama checkpoint, drawn in the order of the names below."""
    import torch

    dtype = getattr(torch, model.dtype)
    generator = torch.Generator().manual_seed(model.seed)

    def normal(rows: int, columns: int, gain: float) -> Any:
        drawn = torch.randn(rows, columns, generator=generator)
        return (drawn * (gain / columns**0.5)).to(dtype)

    hidden, inner = model.hidden_size, model.intermediate_size
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    ones = torch.ones(hidden, dtype=dtype)
    embeddings = normal(model.vocab_size, hidden, hidden**0.5)  # elements of variance 1
    weights = {"model.embed_tokens.weight": embeddings, "model.norm.weight": ones}
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns) in shapes.items():
            weights[f"{prefix}.{name}.weight"] = normal(rows, columns, _GAINS[name])
        weights[f"{prefix}.input_layernorm.weight"] = ones.clone()
        weights[f"{prefix}.post_attention_layernorm.weight"] = ones.clone()
    weights["lm_head.weight"] = normal(model.vocab_size, hidden, _LOGIT_GAIN)
    return weights
