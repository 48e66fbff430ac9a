"""vLLM's own configuration objects, plans and tensors, without an engine."""

import json
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_quant_mode,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
except ImportError:  # before 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

BLOCK_SIZE = 32
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
FP8: dict[str, Any] = {"dtype": torch.uint8, "kv_quant_mode": get_kv_quant_mode("fp8")}
FP8_DS_MLA: dict[str, Any] = FP8 | {  # a latent, its scales and what is turned, in one run
    "cache_dtype_str": "fp8_ds_mla",
    "head_size": 576,
    "state_content_bytes": 656,
}


def model_folder(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return folder


def vllm_config(folder: Path, **model: Any) -> VllmConfig:
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, **{"max_model_len": 512, **model}
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=512,
            max_model_len=512,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE),
        device_config=DeviceConfig("cpu"),
    )


def full(**changes: Any) -> FullAttentionSpec:
    sizes = {"block_size": BLOCK_SIZE, "num_kv_heads": 4, "head_size": 8, "dtype": torch.bfloat16}
    return FullAttentionSpec(**(sizes | changes))


def mla(**changes: Any) -> MLAAttentionSpec:
    sizes = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 24, "dtype": torch.bfloat16}
    return MLAAttentionSpec(**(sizes | changes))


def sliding(**changes: Any) -> SlidingWindowSpec:
    sizes = {"block_size": BLOCK_SIZE, "num_kv_heads": 4, "head_size": 8, "dtype": torch.bfloat16}
    return SlidingWindowSpec(**(sizes | {"sliding_window": 2 * BLOCK_SIZE} | changes))


def chunked(**changes: Any) -> ChunkedLocalAttentionSpec:
    sizes = {"block_size": BLOCK_SIZE, "num_kv_heads": 4, "head_size": 8, "dtype": torch.bfloat16}
    return ChunkedLocalAttentionSpec(**(sizes | {"attention_chunk_size": 128} | changes))


def recurrent(**changes: Any) -> MambaSpec:
    """A state that takes as much as the page of ``full`` of the same block size."""
    block_size = changes.get("block_size", BLOCK_SIZE)
    shape = (full(block_size=block_size).page_size_bytes,)
    spec: dict[str, Any] = {
        "block_size": block_size,
        "shapes": (shape,),
        "dtypes": (torch.uint8,),
        "mamba_cache_mode": "align",
    }
    return MambaSpec(**(spec | changes))


def group(
    spec: KVCacheSpec | dict[str, KVCacheSpec], layers: int = 4, *, first: int = 0
) -> KVCacheGroupSpec:
    """*spec* for every layer from *first* on, or one for each by name."""
    if isinstance(spec, dict):
        wrapped = UniformTypeKVCacheSpecs.from_specs(spec)
        assert wrapped is not None
        return KVCacheGroupSpec(list(spec), wrapped)
    return KVCacheGroupSpec(
        [f"model.layers.{i}.self_attn.attn" for i in range(first, first + layers)], spec
    )


def plan(
    config: VllmConfig, *groups: KVCacheGroupSpec, layout: str = "LBHNC", num_blocks: int = 8
) -> KVCacheConfig:
    """What EngineCore would plan for *groups*."""
    config.cache_config.kv_cache_layout = layout
    config.cache_config.num_gpu_blocks_override = num_blocks
    planned = get_kv_cache_config_from_groups(config, list(groups), 1 << 30)
    planned.kv_cache_layout = layout
    assert planned.num_blocks == num_blocks
    return planned


def tensors(
    planned: KVCacheConfig, kernel_block_size: int | None = None
) -> dict[str, torch.Tensor]:
    """What the model runner would register for *planned*."""
    assert planned.kv_cache_layout is not None
    caches: dict[str, torch.Tensor] = allocate_kv_cache(
        planned,
        torch.device("cpu"),
        KVCacheLayout[planned.kv_cache_layout],
        None if kernel_block_size is None else [kernel_block_size],
    )
    return caches


def copiers(half: object) -> Any:
    """Of each KV cache group of a ``WorkerHalf`` on the CPU, to be broken by tests."""
    device: Any = vars(half)["_device"]
    return device.copiers
