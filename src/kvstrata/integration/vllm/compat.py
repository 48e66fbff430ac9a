"""The surface of vLLM that KVStrata uses, whole; and what stands in for it in older versions.

It is checked by feature when the connector is loaded, before anything else of vLLM is imported: a
version that lacks something is refused in words, not with an ``ImportError`` or, in the middle of
a request, an ``AttributeError``.
"""

import dis
import importlib
import inspect
import logging
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cache
from math import gcd
from typing import TYPE_CHECKING, Any, Final

import vllm
from packaging.specifiers import SpecifierSet

from kvstrata.core.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # before 0.32, which does not ask where hits come from

    class CacheHitSource(Enum):  # type: ignore[no-redef]  # it stands in for the other
        """The tiers that vLLM tells apart."""

        HOST = "host"
        DISK = "disk"
        EXTERNAL_UNSPECIFIED = "external_unspecified"


try:
    from vllm.v1.core.kv_cache_utils import to_event_extra_keys
except ImportError:  # before 0.31, whose block hashes take the keys as the events name them

    def to_event_extra_keys(extra_keys: Iterable[Any]) -> list[Any] | None:
        """What an event says of *extra_keys*, one entry for each block."""
        return list(extra_keys) or None


_log = logging.getLogger(__name__)

__all__ = [
    "BLENDING",
    "HOOKING",
    "NEWER",
    "RECURRENT",
    "SUPPORTED",
    "SURFACE",
    "CacheHitSource",
    "check_vllm",
    "has_attribute",
    "kv_tp_replicas",
    "lacking",
    "placeholders",
    "to_event_extra_keys",
    "tokens_per_hash",
]

SUPPORTED: Final = ">=0.30,<0.33"

# Module → name in it → attributes of that, or of its instances.
Surface = dict[str, dict[str, str]]

# What every connector needs, and no supported version lacks.
SURFACE: Final[Surface] = {
    "vllm": {
        "__version__": "",
    },
    "vllm.config": {
        "LoadConfig": "",
        "ModelConfig": "",
        "VllmConfig": "",
    },
    "vllm.config.attention": {
        "AttentionConfig": "backend",
    },
    "vllm.config.cache": {
        "CacheConfig": "cache_dtype enable_prefix_caching kv_cache_layout prefix_caching_hash_algo",
    },
    "vllm.config.device": {
        "DeviceConfig": "device_type",
    },
    "vllm.config.kv_events": {
        "KVEventsConfig": "enable_kv_cache_events",
    },
    "vllm.config.kv_transfer": {
        "KVTransferConfig": (
            "engine_id is_kv_consumer is_kv_producer kv_connector_extra_config "
            "kv_load_failure_policy"
        ),
    },
    "vllm.config.load": {
        "LoadConfig": "download_dir load_format",
    },
    "vllm.config.model": {
        "ModelConfig": (
            "dtype get_total_num_hidden_layers hf_config is_encoder_decoder max_model_len model "
            "model_weights multimodal_config quantization quantization_config revision seed"
        ),
    },
    "vllm.config.parallel": {
        "ParallelConfig": (
            "decode_context_parallel_size nnodes_within_dp pipeline_parallel_size "
            "prefill_context_parallel_size tensor_parallel_size use_ray world_size"
        ),
    },
    "vllm.config.scheduler": {
        "SchedulerConfig": "async_scheduling enable_chunked_prefill",
    },
    "vllm.config.speculative": {
        "SpeculativeConfig": "draft_load_config draft_model_config method",
    },
    "vllm.config.vllm": {
        "VllmConfig": (
            "attention_config cache_config device_config kv_events_config kv_transfer_config "
            "load_config model_config parallel_config scheduler_config speculative_config "
            "use_v2_model_runner"
        ),
    },
    "vllm.distributed.kv_events": {
        "AllBlocksCleared": "",
        "BlockRemoved": "",
        "BlockStored": "",
        "KVCacheEvent": "",
    },
    "vllm.distributed.kv_transfer.kv_connector.factory": {
        "KVConnectorFactory": "_registry register_connector",
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        "KVConnectorBase_V1": (
            "_get_connector_metadata _kv_transfer_config bind_connector_metadata "
            "bind_gpu_block_pool build_connector_meta "
            "build_connector_worker_meta build_kv_connector_stats build_prom_metrics "
            "get_block_ids_with_load_errors get_kv_connector_stats get_num_new_matched_tokens "
            "get_required_kvcache_layout get_transfer_results has_connector_metadata "
            "has_pending_block_frees has_pending_push_work on_new_request "
            "register_kv_caches request_finished requires_kv_delivery "
            "requires_piecewise_for_cudagraph reset_cache save_kv_layer shutdown start_load_kv "
            "take_events update_connector_output update_state_after_alloc wait_for_layer_load "
            "wait_for_save"
        ),
        "KVConnectorMetadata": "",
        "KVConnectorRole": "SCHEDULER",
        "KVConnectorTransferResults": "",
        "KVConnectorWorkerMetadata": "aggregate",
        "SupportsHMA": "request_finished_all_groups",
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {
        "KVConnectorPromMetrics": "observe per_engine_labelvalues",
        "KVConnectorStats": "aggregate data is_empty reduce reset",
    },
    "vllm.distributed.parallel_state": {
        "GroupCoordinator": "rank_in_group",
        "get_pp_group": "",
        "get_tp_group": "",
    },
    "vllm.distributed.utils": {
        "get_pp_indices": "",
    },
    "vllm.forward_context": {
        "ForwardContext": "",
    },
    "vllm.lora.request": {
        "LoRARequest": "adapter_id name",
    },
    "vllm.platforms": {
        "current_platform": "device_type get_cpu_architecture get_device_capability is_cpu",
    },
    "vllm.utils.hashing": {
        "get_hash_fn_by_name": "",
    },
    "vllm.v1.attention.backend": {
        "AttentionMetadata": "",
    },
    "vllm.v1.attention.backends.cpu_attn": {
        "_get_attn_isa": "",
    },
    "vllm.v1.core.block_pool": {
        "BlockPool": "blocks evict_blocks free_blocks get_cached_block touch",
    },
    "vllm.v1.core.kv_cache_manager": {
        "KVCacheBlocks": "get_block_ids",
    },
    "vllm.v1.core.kv_cache_utils": {
        "BlockHash": "",
        "KVCacheBlock": "ref_cnt",
        "generate_block_hash_extra_keys": "",
        "hash_block_tokens": "",
        "init_none_hash": "",
        "maybe_convert_block_hash": "",
        "resolve_kv_cache_block_sizes": "",
        "resolve_none_hash_seed": "",
    },
    "vllm.v1.core.sched.output": {
        "KVConnectorBlockState": "get_block_ids",
        "SchedulerOutput": (
            "kv_connector_block_state num_scheduled_tokens scheduled_new_reqs "
            "total_num_scheduled_tokens"
        ),
    },
    "vllm.v1.kv_cache_interface": {
        "AttentionSpec": "block_size dtype head_size",
        "ChunkedLocalAttentionSpec": "attention_chunk_size unpadded_page_size_bytes",
        "FullAttentionSpec": "non_causal unpadded_page_size_bytes",
        "KVCacheConfig": (
            "hisparse_host_num_blocks kv_cache_groups kv_cache_layout kv_cache_tensors num_blocks"
        ),
        "KVCacheGroupSpec": "enable_kv_transfer host_resident kv_cache_spec layer_names",
        "KVCacheSpec": "block_size has_layer_views page_size_bytes tokens_per_state",
        "KVCacheTensor": "block_stride host_resident layer_stride layers offset",
        "MLAAttentionSpec": "non_causal unpadded_page_size_bytes",
        "MambaSpec": "",
        "SlidingWindowSpec": "sliding_window unpadded_page_size_bytes",
        "UniformTypeKVCacheSpecs": "kv_cache_specs",
        "get_kv_cache_spec_kind": "",
        "get_kv_cache_spec_sliding_window": "",
        "group_kernel_blocks": "",
        "iter_layer_specs": "",
    },
    "vllm.v1.outputs": {
        "KVConnectorOutput": "invalid_block_ids kv_connector_worker_meta",
    },
    "vllm.v1.request": {
        "Request": (
            "all_token_ids block_hashes cache_salt kv_transfer_params lora_request "
            "num_computed_tokens num_in_flight_tokens num_prompt_tokens num_tokens request_id "
            "skip_reading_prefix_cache status trace_headers update_block_hashes"
        ),
        "RequestStatus": "FINISHED_ABORTED RUNNING WAITING_FOR_REMOTE_KVS",
    },
}
# What ``BlendConnector`` needs besides, and no supported version lacks.
BLENDING: Final[Surface] = {
    "vllm.config.compilation": {
        "CompilationConfig": "static_forward_context",
    },
    "vllm.config.model": {
        "ModelConfig": "get_vocab_size is_multimodal_model",
    },
    "vllm.config.parallel": {
        "ParallelConfig": "data_parallel_size",
    },
    "vllm.config.scheduler": {
        "SchedulerConfig": "max_num_batched_tokens",
    },
    "vllm.config.vllm": {
        "VllmConfig": "compilation_config lora_config",
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        "KVConnectorBase_V1": "_kv_cache_config _vllm_config",
    },
    "vllm.distributed.parallel_state": {
        "GroupCoordinator": "cpu_group world_size",
    },
    "vllm.forward_context": {
        "set_forward_context": "",
    },
    "vllm.lora.layers": {
        "LoRAMapping": "",
    },
    "vllm.lora.model_manager": {
        "LoRAModelManager": "_last_mapping set_adapter_mapping",
    },
    "vllm.model_executor.layers.attention": {
        "Attention": "",
        "MLAAttention": "",
    },
    "vllm.model_executor.layers.attention.attention": {
        "Attention": (
            "attn_backend dtype get_attn_backend head_size impl kv_cache kv_cache_dtype "
            "layer_name num_kv_heads query_quant sliding_window"
        ),
    },
    "vllm.model_executor.layers.attention.mla_attention": {
        "MLAAttention": (
            "forward_impl impl kv_cache kv_cache_dtype kv_lora_rank layer_name num_heads "
            "qk_rope_head_dim v_head_dim"
        ),
    },
    "vllm.model_executor.layers.rotary_embedding.base": {
        "RotaryEmbeddingBase": "is_neox_style rotary_dim",
    },
    "vllm.model_executor.models.interfaces_base": {
        "VllmModelForTextGeneration": "compute_logits",
    },
    "vllm.v1.attention.backend": {
        "AttentionBackend": "forward_includes_kv_cache_update get_builder_cls",
        "AttentionImpl": "scale",
        "AttentionLayer": "_k_scale_float _v_scale_float",
        "AttentionMetadataBuilder": "build reorder_batch_threshold",
        "CommonAttentionMetadata": "",
    },
    "vllm.v1.core.block_pool": {
        "BlockPool": "get_new_blocks get_num_free_blocks",
    },
    "vllm.v1.core.kv_cache_utils": {
        "KVCacheBlock": "block_id",
    },
    "vllm.v1.request": {
        "Request": "mm_features prompt_embeds prompt_token_ids",
    },
}
# What ``DirectConnector`` needs besides, and no supported version lacks.
HOOKING: Final[Surface] = {
    "vllm.config": {
        "CUDAGraphMode": "",
        "CompilationMode": "",
        "get_layers_from_vllm_config": "",
    },
    "vllm.config.compilation": {
        "CUDAGraphMode": "NONE",
        "CompilationConfig": "cudagraph_mode mode",
        "CompilationMode": "NONE",
    },
    "vllm.config.vllm": {
        "VllmConfig": "compilation_config",
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        "KVConnectorBase_V1": "_vllm_config",
    },
    "vllm.model_executor.layers.attention": {
        "Attention": "",
    },
    "vllm.model_executor.layers.attention.attention": {
        "Attention": "forward head_size head_size_v num_heads num_kv_heads",
    },
}
# What models with recurrent state need besides, and older versions lack.
RECURRENT: Final[Surface] = {
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        "KVConnectorBase_V1": "get_loaded_kv_cache_group_ids",  # which vLLM does not zero meanwhile
    },
    "vllm.v1.core.sched.output": {
        "KVConnectorBlockState": "boundary_state_offloads",
    },
    "vllm.v1.kv_cache_interface": {
        "MambaSpec": "mamba_cache_mode state_content_size_bytes",
    },
}
# What older ones lack, and KVStrata can do without.
NEWER: Final[Surface] = {
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        "KVConnectorBase_V1": "get_external_cache_hit_sources",
    },
    "vllm.v1.core.kv_cache_utils": {
        "to_event_extra_keys": "",
    },
    "vllm.v1.kv_cache_interface": {
        "KVCacheConfig": "hash_block_size kv_tp_replicas",
    },
    "vllm.v1.metrics.cache_hit_source": {
        "CacheHitSource": "",
    },
}


def check_vllm(besides: Surface | None = None) -> None:
    """Raises ``ConfigError`` naming what this vLLM lacks; warns once of what it can do without.

    *besides*: what the connector that asks needs, and ``KVStrataConnector`` does not.
    """
    remedy = f"install vLLM {SUPPORTED}"
    if missing := lacking(SURFACE):
        raise ConfigError(f"vLLM {vllm.__version__} lacks {', '.join(missing)}", hint=remedy)
    if missing := lacking(besides or {}):
        raise ConfigError(
            f"vLLM {vllm.__version__} lacks {', '.join(missing)}",
            hint=f"{remedy}, or set kv_connector to KVStrataConnector",
        )
    _warn_of_version()


def lacking(surface: Surface) -> list[str]:
    """What of *surface* this vLLM lacks."""
    return sorted(_missing(surface))


@cache
def _warn_of_version() -> None:
    """A process loads the connector more than once."""
    version = vllm.__version__
    if not SpecifierSet(SUPPORTED).contains(version, prereleases=True):
        _log.warning(
            "vLLM %s has all that KVStrata uses of it, but KVStrata was tested with vLLM %s only; "
            "install one of these",
            version,
            SUPPORTED,
        )
    elif without := lacking(NEWER):
        _log.warning(
            "going on without %s, which vLLM %s lacks (docs/compatibility.md says what that "
            "means); install the newest vLLM %s",
            ", ".join(without),
            version,
            SUPPORTED,
        )


def tokens_per_hash(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> int:
    """Tokens for which a request has one block hash; before 0.32 the plan does not say."""
    if hasattr(kv_cache_config, "hash_block_size"):
        sizes = (group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups)
        return int(kv_cache_config.hash_block_size or gcd(*sizes))
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes  # once it is known to be

    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def kv_tp_replicas(kv_cache_config: "KVCacheConfig") -> int:
    """Consecutive ranks that hold the same KV; before 0.31 vLLM makes no such plan."""
    return int(getattr(kv_cache_config, "kv_tp_replicas", 1))


def placeholders(output: "SchedulerOutput", request_id: str) -> int:
    """Tokens of *request_id* that a step counts and nobody has sampled yet; 0: not told.

    No version tells up to 0.32. One that does may count this step's as well: then the last
    token that is known counts as not computed until the next step.
    """
    told: dict[str, int] = getattr(output, "num_output_placeholders", {})
    return told.get(request_id, 0)


def has_attribute(thing: Any, name: str) -> bool:
    """Whether *thing* has the attribute or, if it is a class, its instances do."""
    if hasattr(thing, name):
        return True
    kinds = thing.__mro__[:-1] if isinstance(thing, type) else ()
    return any(
        name in getattr(kind, "__annotations__", {}) or name in _set_at_start(kind)
        for kind in kinds
    )


def _missing(surface: Surface) -> Iterator[str]:
    for module_name, names in surface.items():
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError:
            yield module_name
            continue
        for name, attributes in names.items():
            found = getattr(module, name, None)
            if found is None:
                yield f"{module_name}.{name}"
                continue
            for attribute in attributes.split():
                if not has_attribute(found, attribute):
                    yield f"{name}.{attribute}"


def _set_at_start(kind: type) -> set[str]:
    """Names that ``__init__`` of *kind* gives its instances."""
    init = vars(kind).get("__init__")
    if not inspect.isfunction(init):
        return set()
    return {str(i.argval) for i in dis.get_instructions(init) if i.opname == "STORE_ATTR"}
