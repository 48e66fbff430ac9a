"""Which engines can blend; the others are refused before they serve."""

from collections.abc import Iterator

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.blend.elements import FLOAT8

__all__ = ["refuse_engine"]


def refuse_engine(config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises ``ConfigError`` with all reasons why this engine cannot blend, if there is any."""
    reasons = [*_of_engine(config, vllm_config), *_of_cache(vllm_config, kv_cache_config)]
    if reasons:
        raise ConfigError(
            f"BlendConnector cannot blend here: {'; '.join(reasons)}",
            hint="set kv_connector to KVStrataConnector, which does not blend",
        )


def _of_engine(config: Config, vllm_config: VllmConfig) -> Iterator[str]:
    parallel, device = vllm_config.parallel_config, vllm_config.device_config.device_type
    if device not in {"cpu", "cuda"}:
        yield f"it runs on CPUs and GPUs, and this is {device}"
    if device != "cpu" and config.blend_attention == "runs":
        yield f"blend_attention is 'runs', which is for CPUs, and this is {device}"
    if config.load_mode == "layerwise":
        yield "load_mode is 'layerwise', which runs a request before its blocks are there"
    if parallel.pipeline_parallel_size > 1:
        yield "with pipeline parallelism no rank has the whole model"
    if parallel.data_parallel_size > 1:  # to vLLM each engine of a dense model is the only one
        yield "data parallel engines share their experts, and one engine cannot run it alone"
    if vllm_config.model_config.is_multimodal_model:
        yield "positions of a multimodal model are more than one number"


def _of_cache(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Iterator[str]:
    if (kept := vllm_config.cache_config.cache_dtype) not in ("auto", *FLOAT8):
        yield f"kv_cache_dtype is {kept}, and must be auto or one of {', '.join(FLOAT8)}"
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) != 1:
        yield (
            f"the model has {len(specs)} KV cache groups (layers with a sliding window and others "
            "share one with --disable-hybrid-kv-cache-manager)"
        )
    for spec in specs:
        if isinstance(spec, MLAAttentionSpec):
            yield (
                "the model's attention is MLA: without AMX vLLM's CPU build looks at the tokens of "
                "one step alone there, and with AMX blending has not been run"
            )
        elif not isinstance(spec, FullAttentionSpec | SlidingWindowSpec):
            yield f"{type(spec).__name__} is neither full attention nor a sliding window"
        elif isinstance(spec, FullAttentionSpec) and spec.attention_chunk_size is not None:
            yield "the model's attention reaches back to the beginning of a chunk in some layers"
