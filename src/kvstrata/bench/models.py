"""The model that all contenders run: the user's, or a small random one."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.tiny_model import TinyLlama, write_tiny_llama

__all__ = [
    "MOST_TOKENS",
    "VOCABULARY",
    "DType",
    "Model",
    "random_model",
    "small_llama",
    "users_model",
]

DType = Literal["float32", "bfloat16"]

MOST_TOKENS: Final = 8448  # of a prompt and its answer
VOCABULARY: Final = 1024  # of the random model
_CPU_BLOCK_TOKENS: Final = 32  # what vLLM's CPU backend needs a multiple of
_BLOCK_TOKENS: Final = 16
_DTYPE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Model:
    path: str
    dtype: str
    vocabulary: int
    token_bytes: int  # of KV
    most_tokens: int
    engine_block_tokens: int
    title: str


def small_llama(*, layers: int = 6, hidden: int = 384, dtype: DType = "float32") -> TinyLlama:
    """Its KV takes 6 KiB a token, so that a hit saves little and all costs show.

    *hidden* is a multiple of 128.
    """
    return TinyLlama(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        layers=layers,
        heads=hidden // 32,
        kv_heads=4,
        vocab_size=VOCABULARY,
        max_position=MOST_TOKENS,
        dtype=dtype,
    )


def random_model(folder: Path, on_cpu: bool, shape: TinyLlama | None = None) -> Model:
    """A Llama of *shape*, else a small one."""
    shape = shape or small_llama()
    write_tiny_llama(folder, shape)
    return Model(
        str(folder),
        shape.dtype,
        shape.vocab_size,
        shape.layers * 2 * shape.kv_heads * shape.head_dim * _DTYPE_BYTES[shape.dtype],
        MOST_TOKENS,
        _CPU_BLOCK_TOKENS if on_cpu else _BLOCK_TOKENS,
        f"random Llama, {shape.layers} layers, hidden size {shape.hidden_size}, {shape.dtype}",
    )


def users_model(name: str, on_cpu: bool) -> Model:
    """A model by its folder or by its name on the hub; ``ConfigError`` if it says too little."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name).get_text_config()
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"--model {name}: {e}", hint="name a folder with config.json, or a model of the hub"
        ) from e
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    dtype = str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch.")
    element_bytes = _DTYPE_BYTES.get(dtype, 2)
    most = min(MOST_TOKENS, config.max_position_embeddings)
    if most < MOST_TOKENS:
        raise ConfigError(
            f"--model {name}: it takes {most} tokens and the bench asks up to {MOST_TOKENS}",
            hint="name a model with a longer context",
        )
    return Model(
        name,
        "auto",
        config.vocab_size,
        config.num_hidden_layers * 2 * kv_heads * head_dim * element_bytes,
        most,
        _CPU_BLOCK_TOKENS if on_cpu else _BLOCK_TOKENS,
        json.dumps(name),
    )
