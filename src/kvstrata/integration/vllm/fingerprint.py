"""The namespace: everything outside a block's key that its bytes depend on.

vLLM's block hash holds tokens, salt, multimodal hashes and LoRA (by name and path), and neither
the model, nor its weights, nor any of the below.
"""

import json
from dataclasses import dataclass, fields
from typing import Any, Final

import vllm
from blake3 import blake3
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    iter_layer_specs,
)

from kvstrata.core.types import NAMESPACE_ID_BYTES, NamespaceId
from kvstrata.integration.vllm.geometry import DeviceGeometry
from kvstrata.integration.vllm.multimodal import multimodal_settings
from kvstrata.integration.vllm.ranks import slot_regions
from kvstrata.integration.vllm.recurrent import is_recurrent
from kvstrata.integration.vllm.weights import model_name, weights_fingerprint

__all__ = ["NamespaceFingerprint", "hash_seed", "namespace_id"]

# Where the config lies and which library wrote it change nothing.
_HF_CONFIG_NOISE: Final = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
# Specs say how they are scheduled, too; the page interior does not depend on that.
_SPEC_NOISE: Final = frozenset({"sliding_window", "attention_chunk_size", "max_tp_shards"})


@dataclass(frozen=True, slots=True)
class NamespaceFingerprint:
    """``id`` is equal if and only if all ``parts`` are."""

    id: NamespaceId
    parts: dict[str, str]  # readable, free of secrets; for `kvstrata inspect`
    persistent_problem: str | None  # why blocks must not outlive this process, and what to do

    @property
    def persistent_ok(self) -> bool:
        """Whether a later process with the same ``id`` would compute the same bytes and keys."""
        return self.persistent_problem is None


def namespace_id(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    geometry: DeviceGeometry,
    tokens_per_block: int,
    weights_override: str | None,
) -> NamespaceFingerprint:
    """The namespace of this engine's exact blocks.

    Call it in the scheduler process; reads a few KiB of every weight tensor. *weights_override* is
    the setting ``weights_fingerprint``, and stands for the weights unread.
    """
    weights, weights_problem = _weights(vllm_config, weights_override)
    seed, seed_problem = hash_seed(vllm_config.cache_config.prefix_caching_hash_algo)
    parts = {
        "model": model_name(vllm_config.model_config),
        "weights": weights,
        **_computation(vllm_config),
        **_page_interior(vllm_config, kv_cache_config, geometry),
        **_rank_order(vllm_config, kv_cache_config, geometry, tokens_per_block),
        "tokens_per_block": str(tokens_per_block),
        "world_size": str(vllm_config.parallel_config.world_size),
        "tensor_parallel_size": str(vllm_config.parallel_config.tensor_parallel_size),
        "hash_algorithm": vllm_config.cache_config.prefix_caching_hash_algo,
        "hash_seed": seed,
    }
    return NamespaceFingerprint(
        id=blake3(_canonical(parts)).digest(length=NAMESPACE_ID_BYTES),
        parts=parts,
        persistent_problem=weights_problem or seed_problem,
    )


def _weights(vllm_config: VllmConfig, override: str | None) -> tuple[str, str | None]:
    """The weights of the model and of its draft model, and what is wrong with that."""
    if override is not None:
        return f"given:{override}", None
    models = [(vllm_config.model_config, vllm_config.load_config)]
    draft = vllm_config.speculative_config
    if draft is not None and draft.draft_model_config is not None:
        models.append((draft.draft_model_config, draft.draft_load_config or models[0][1]))
    found = [weights_fingerprint(model, load) for model, load in models]
    if None not in found:
        return "+".join(str(f) for f in found), None
    missing = models[found.index(None)][0].model
    return "unknown", (
        f"the weights of {missing!r} cannot be told apart from others: no local files found. "
        "Set weights_fingerprint to a text that names them, and change it when they change"
    )


def hash_seed(algorithm: str) -> tuple[str, str | None]:
    """A digest of the seed of vLLM's block hashes, and what is wrong with the seed.

    ``resolve_none_hash_seed`` draws a fresh seed at every call where none is set and the
    algorithm needs a secret one. Then the digest differs in every process, as the hashes do.
    """
    hash_fn = get_hash_fn_by_name(algorithm)
    first, second = resolve_none_hash_seed(hash_fn), resolve_none_hash_seed(hash_fn)
    digest = _digest(first.encode())
    if first == second:
        return digest, None
    return digest, (
        f"block hashes of {algorithm!r} are random in every process. "
        "Set PYTHONHASHSEED, or use --prefix-caching-hash-algo sha256"
    )


def _computation(vllm_config: VllmConfig) -> dict[str, str]:
    """What decides which numbers the model computes."""
    model = vllm_config.model_config
    hf_config = {k: v for k, v in model.hf_config.to_dict().items() if k not in _HF_CONFIG_NOISE}
    hf_json = _canonical(hf_config).decode()
    parts = {
        "engine": f"vllm {vllm.__version__}",
        "hf_config": hf_json,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization),
        "quantization_config": _digest(_canonical(model.quantization_config)),
    }
    if "longrope" in hf_json:  # vLLM chooses the factors by it (Phi3LongRoPE...)
        parts["max_model_len"] = str(model.max_model_len)
    if prepared := multimodal_settings(model, vllm_config.load_config):
        parts["multimodal"] = _digest(_canonical(prepared))
    draft = vllm_config.speculative_config
    if draft is not None and draft.draft_model_config is not None:
        parts["draft_model"] = f"{draft.method} {model_name(draft.draft_model_config)}"
    return parts


def _page_interior(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, geometry: DeviceGeometry
) -> dict[str, str]:
    """What decides where in a page a number lies."""
    # One spec of each group is all that the scheduler process knows; page_bytes has every layer.
    specs = [
        next(iter(iter_layer_specs(group.kv_cache_spec)))
        for group in kv_cache_config.kv_cache_groups
    ]
    backend = vllm_config.attention_config.backend
    return {
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "layers": _digest(_canonical(_alone([group.layers for group in geometry.groups]))),
        "layer_count": str(len(geometry.layers)),
        "page_bytes": ",".join(str(n) for n in sorted(set(geometry.page_bytes))),
        "pages": _digest(_canonical(geometry.page_bytes)),
        "device_block_tokens": ",".join(str(group.block_size) for group in geometry.groups),
        "spec": _canonical(_alone([_spec_fields(spec) for spec in specs])).decode(),
        "kv_cache_layout": str(
            kv_cache_config.kv_cache_layout or vllm_config.cache_config.kv_cache_layout
        ),
        "attention_backend": "auto" if backend is None else backend.name,
        "device": "; ".join(
            dict.fromkeys(_device(vllm_config, s) for s in specs if not is_recurrent(s))
        ),
    }


def _rank_order(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    geometry: DeviceGeometry,
    tokens_per_block: int,
) -> dict[str, str]:
    """What decides whose bytes lie where in a block, beside the number of ranks."""
    regions = slot_regions(vllm_config, kv_cache_config, geometry, tokens_per_block)
    parts = {}
    if len(regions.stage_bytes) > 1:
        parts["stage_bytes"] = ",".join(str(n) for n in regions.stage_bytes)
    if regions.replicas > 1:
        parts["kv_tp_replicas"] = str(regions.replicas)
    return parts


def _alone(of_groups: list[Any]) -> Any:
    """The one of a single group as it is, so that the names of most models are short."""
    return of_groups[0] if len(of_groups) == 1 else of_groups


def _spec_fields(spec: KVCacheSpec) -> dict[str, str]:
    return {
        "class": type(spec).__name__,
        **{f.name: str(getattr(spec, f.name)) for f in fields(spec) if f.name not in _SPEC_NOISE},
    }


def _device(vllm_config: VllmConfig, spec: AttentionSpec) -> str:
    """Device kind, and the instruction set or capability by which vLLM picks a page order."""
    if not current_platform.is_cpu():
        return f"{current_platform.device_type} {current_platform.get_device_capability()}"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(
        spec.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype
    )
    return f"cpu {current_platform.get_cpu_architecture().name.lower()} {isa}"


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()


def _digest(data: bytes) -> str:
    return blake3(data).hexdigest()[:32]
