"""Which engines can blend; the others are refused before they serve."""

from collections.abc import Iterator
from typing import Final, NamedTuple

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

# Their drafts are found in the tokens; a draft model's own KV would not be there behind reused KV.
_DRAFTS_OF_TOKENS: Final = ("ngram", "ngram_gpu", "suffix")


class _Reason(NamedTuple):
    """Why an engine cannot blend, and how it could."""

    why: str
    remedy: str | None = None


def refuse_engine(config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises ``ConfigError`` with all reasons why this engine cannot blend, if there is any."""
    reasons = [
        *_of_engine(config, vllm_config),
        *_of_parallelism(vllm_config),
        *_of_cache(config, vllm_config, kv_cache_config),
    ]
    if reasons:
        remedies = [reason.remedy for reason in reasons if reason.remedy is not None]
        ways = [" and ".join(remedies)] if len(remedies) == len(reasons) else []
        ways.append("set kv_connector to KVStrataConnector, which does not blend")
        raise ConfigError(
            f"BlendConnector cannot blend here: {'; '.join(reason.why for reason in reasons)}",
            hint=", or ".join(ways),
        )


def _of_engine(config: Config, vllm_config: VllmConfig) -> Iterator[_Reason]:
    device, drafts = vllm_config.device_config.device_type, vllm_config.speculative_config
    if not vllm_config.kv_transfer_config.is_kv_producer:
        yield _Reason(
            "kv_role is 'kv_consumer': what can be reused is learned as it is saved, and this engine "
            "saves nothing",
            "set kv_role to kv_both",
        )
    if device not in {"cpu", "cuda"}:
        yield _Reason(f"it runs on CPUs and GPUs, and this is {device}")
    if device != "cpu" and config.blend_attention == "runs":
        yield _Reason(
            f"blend_attention is 'runs', which is for CPUs, and this is {device}",
            "take blend_attention away",
        )
    if config.load_mode == "layerwise":
        yield _Reason(
            "load_mode is 'layerwise', which runs a request before its blocks are there",
            "take load_mode away",
        )
    if drafts is not None and drafts.method not in _DRAFTS_OF_TOKENS:
        yield _Reason(
            f"the method of speculative_config is {drafts.method!r}: KV that a draft model has of its "
            "own is not blended",
            f"set it to one that finds drafts in the tokens ({', '.join(_DRAFTS_OF_TOKENS)})",
        )
    if vllm_config.model_config.is_multimodal_model:
        yield _Reason(
            f"the model is {vllm_config.model_config.model!r}: positions of a multimodal model are "
            "more than one number",
            "set model to one of text alone",
        )


def _of_parallelism(vllm_config: VllmConfig) -> Iterator[_Reason]:
    parallel = vllm_config.parallel_config
    if (stages := parallel.pipeline_parallel_size) > 1:
        yield _Reason(
            f"pipeline_parallel_size is {stages}, so that no rank has the whole model",
            "set pipeline_parallel_size to 1 (tensor_parallel_size may be more)",
        )
    # To vLLM each data parallel engine of a dense model is the only one.
    if (engines := parallel.data_parallel_size) > 1:
        yield _Reason(
            f"data_parallel_size is {engines}: data parallel engines share their experts, and one "
            "engine cannot run them alone",
            "set data_parallel_size to 1",
        )


def _of_cache(
    config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> Iterator[_Reason]:
    if (kept := vllm_config.cache_config.cache_dtype) not in ("auto", *FLOAT8):
        yield _Reason(
            f"kv_cache_dtype is {kept}, and must be auto or one of {', '.join(FLOAT8)}",
            "set kv_cache_dtype to auto",
        )
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) != 1:
        yield _Reason(
            f"the model has {len(specs)} KV cache groups",
            "start with --disable-hybrid-kv-cache-manager, with which layers with a sliding window "
            "and others share one",
        )
    for spec in specs:
        if isinstance(spec, MLAAttentionSpec):
            yield from _of_latents(config, vllm_config)
        elif not isinstance(spec, FullAttentionSpec | SlidingWindowSpec):
            yield _Reason(f"{type(spec).__name__} is neither full attention nor a sliding window")
        elif isinstance(spec, FullAttentionSpec) and spec.attention_chunk_size is not None:
            yield _Reason(
                "the model's attention reaches back to the beginning of a chunk in some layers"
            )


def _of_latents(config: Config, vllm_config: VllmConfig) -> Iterator[_Reason]:
    device = vllm_config.device_config.device_type
    if device != "cpu":
        yield _Reason(
            f"the model's attention is MLA, which blends on CPUs with AMX, and this is {device}"
        )
    elif config.blend_attention == "gathered":
        yield _Reason(
            "the model's attention is MLA, and blend_attention is 'gathered', which knows no latents",
            "set blend_attention to runs",
        )
    if (kept := vllm_config.cache_config.cache_dtype) != "auto":
        yield _Reason(
            f"kv_cache_dtype is {kept}, and must be auto where attention is MLA",
            "set kv_cache_dtype to auto",
        )
