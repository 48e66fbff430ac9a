"""vLLM's KV cache plan and tensors → the geometry of this worker's device blocks.

Sizes come from ``KVCacheConfig`` (the same in both processes), never from the rank of a tensor;
what the worker registers must then agree with it byte for byte. Anything else is a ``ConfigError``
at start.
"""

from dataclasses import dataclass
from math import lcm, prod
from typing import Any, Final

import torch
from vllm.config import VllmConfig
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
    get_kv_cache_spec_kind,
    group_kernel_blocks,
    iter_layer_specs,
)

from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.compat import SUPPORTED
from kvstrata.integration.vllm.reach import UNLIMITED, Reach
from kvstrata.integration.vllm.recurrent import check_recurrent, is_recurrent, state_bytes

__all__ = [
    "ONE_NODE",
    "DeviceGeometry",
    "GroupGeometry",
    "geometry_from_config",
    "pages_from_tensors",
]

_RUN_WITHOUT: Final = "run vLLM without the connector (drop --kv-transfer-config)"
ONE_NODE: Final = (
    "run each engine on one node, with several engines by data parallelism or a router; "
    f"or {_RUN_WITHOUT}"
)
_UNKNOWN_PLAN: Final = (
    f"install a vLLM that KVStrata was tested with ({SUPPORTED}), or {_RUN_WITHOUT}"
)
_SLOT_ALIGNMENT_BYTES: Final = 4096
_SUPPORTED_SPECS: Final = (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    ChunkedLocalAttentionSpec,
)


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """A KV cache group: layers with one block table. A device block is one page of each."""

    block_size: int  # tokens per device block
    layers: tuple[str, ...]  # layers that own memory, as in the KV cache group
    page_bytes: tuple[int, ...]  # of each layer, alignment padding included
    reach: Reach = UNLIMITED
    is_recurrent: bool = False  # a device block is the state at its end, and no tokens

    @property
    def device_block_bytes(self) -> int:
        return sum(self.page_bytes)

    def device_blocks(self, tokens_per_block: int) -> int:
        """Device blocks of this group in a slot that has any of it."""
        return 1 if self.is_recurrent else tokens_per_block // self.block_size

    def rank_bytes(self, tokens_per_block: int) -> int:
        """Bytes of this group in one rank's region of such a slot."""
        return self.device_blocks(tokens_per_block) * self.device_block_bytes


@dataclass(frozen=True, slots=True)
class DeviceGeometry:
    """The device blocks of one rank, by KV cache group.

    A slot holds all groups of a block: those device blocks of the first group that its tokens
    take, then those of the second, and so on. So its key need not name a group. The state of a
    recurrent group is not among them: it has a slot of its own.

    Example: 4 layers, 32 tokens of 4 KV heads of 32 + 32 bfloat16 values.

    >>> group = GroupGeometry(block_size=32, layers=tuple("abcd"), page_bytes=(16384,) * 4)
    >>> g = DeviceGeometry(num_blocks=100, groups=(group,))
    >>> group.device_block_bytes, g.rank_bytes(256), g.slot_bytes(256, world_size=2)
    (65536, 524288, 1048576)
    """

    num_blocks: int  # that all groups share
    groups: tuple[GroupGeometry, ...]

    @property
    def block_size(self) -> int:
        """Tokens that are whole device blocks in every group."""
        return lcm(*(group.block_size for group in self.groups))

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(name for group in self.groups for name in group.layers)

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Of each of ``layers``."""
        return tuple(size for group in self.groups for size in group.page_bytes)

    def check_block(self, tokens_per_block: int) -> None:
        """Raises ``ConfigError`` unless such a block can be saved whole, in every group."""
        if tokens_per_block < self.block_size or tokens_per_block % self.block_size:
            raise ConfigError(
                f"tokens_per_block = {tokens_per_block} is no multiple of "
                f"vLLM's block size of {self.block_size} tokens",
                hint=f"set tokens_per_block to a multiple of {self.block_size}",
            )
        for group in self.groups:
            group.reach.check(tokens_per_block, group.block_size)

    @property
    def states(self) -> int:
        """Recurrent groups."""
        return sum(group.is_recurrent for group in self.groups)

    def rank_bytes(self, tokens_per_block: int) -> int:
        """Bytes of one rank's region of a slot, which takes a block or the state of a group."""
        self.check_block(tokens_per_block)
        sizes = [(group.rank_bytes(tokens_per_block), group.is_recurrent) for group in self.groups]
        block = sum(size for size, is_state in sizes if not is_state)
        return max(block, *(size for size, is_state in sizes if is_state), 0)

    def starts(self, tokens_per_block: int) -> tuple[int, ...]:
        """Where in that region each group's part begins."""
        starts, end = [], 0
        for group in self.groups:
            starts.append(0 if group.is_recurrent else end)
            end += 0 if group.is_recurrent else group.rank_bytes(tokens_per_block)
        return tuple(starts)

    def slot_bytes(self, tokens_per_block: int, world_size: int) -> int:
        """Stride of a slot: the ranks' regions side by side, padded to 4 KiB."""
        used = self.rank_bytes(tokens_per_block) * world_size
        return -(-used // _SLOT_ALIGNMENT_BYTES) * _SLOT_ALIGNMENT_BYTES


def geometry_from_config(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> DeviceGeometry:
    """The geometry as both processes know it, before there are tensors.

    In the scheduler process vLLM has replaced ``UniformTypeKVCacheSpecs`` by its first member
    (``generate_scheduler_kv_cache_config``), so page sizes come from the placement of the layers.
    Without any placement (schedulers in unit tests) the group's one spec holds for all layers.
    """
    _refuse_vllm_config(vllm_config)
    _refuse_groups(kv_cache_config)
    check_recurrent(vllm_config, kv_cache_config)
    placed = _page_bytes_by_layer(kv_cache_config)
    groups = tuple(_group(each, placed) for each in kv_cache_config.kv_cache_groups)
    geometry = DeviceGeometry(kv_cache_config.num_blocks, groups)
    if outside := set(placed) - {*geometry.layers}:
        raise ConfigError(
            f"layers are placed outside the KV cache groups: {sorted(outside)}", hint=_UNKNOWN_PLAN
        )
    return geometry


def _group(group: KVCacheGroupSpec, placed: dict[str, int]) -> GroupGeometry:
    """*placed* are the bytes of the pages of all layers; empty without a placement."""
    spec = group.kv_cache_spec
    if placed:
        layers = tuple(name for name in group.layer_names if name in placed)
        pages = tuple(placed[name] for name in layers)
        _check_pages_hold_specs(group, dict(zip(layers, pages, strict=True)))
    else:
        layers = tuple(group.layer_names)
        pages = tuple(_spec_of(group, name).page_size_bytes for name in layers)
    reach = Reach.of(next(iter(iter_layer_specs(spec))))
    return GroupGeometry(spec.block_size, layers, pages, reach, is_recurrent(spec))


def pages_from_tensors(
    kv_caches: dict[str, torch.Tensor], geometry: DeviceGeometry, kv_cache_config: KVCacheConfig
) -> list[list[torch.Tensor]]:
    """By group and layer of *geometry* a uint8 view (num_blocks, page_bytes) of what vLLM registered.

    Groups may lie in the same memory: a device block belongs to one at a time. Raises
    ``ConfigError`` if a tensor does not lie where ``KVCacheConfig.kv_cache_tensors`` places it, if
    a page is not one contiguous run, or if a registered cache is not covered.
    """
    placement = _placement_by_layer(kv_cache_config)
    found = []
    for group in geometry.groups:
        pages = []
        for name, page_bytes in zip(group.layers, group.page_bytes, strict=True):
            if name not in kv_caches or name not in placement:
                raise ConfigError(
                    f"vLLM registered no KV cache for layer {name}", hint=_UNKNOWN_PLAN
                )
            cache = _by_device_block(name, kv_caches[name], geometry.num_blocks)
            _check_cache(name, cache, placement[name], page_bytes)
            offset, block_stride = placement[name]
            pages.append(
                torch.empty(0, dtype=torch.uint8, device=cache.device).set_(
                    cache.untyped_storage(),
                    offset,
                    (geometry.num_blocks, page_bytes),
                    (block_stride, 1),
                )
            )
        found.append(pages)
    _refuse_uncovered(kv_caches, geometry)
    return found


def _refuse_vllm_config(vllm_config: VllmConfig) -> None:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model is not None and model.is_encoder_decoder:
        raise ConfigError(
            f"{model.model!r} is an encoder-decoder model: its decoder's KV depends on the "
            "encoder's input, which no block hash names",
            hint=_RUN_WITHOUT,
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (ranks := getattr(parallel, name)) > 1:
            raise ConfigError(
                f"{name} = {ranks}: context parallelism spreads the tokens of a block over "
                "ranks, which this version of KVStrata does not support",
                hint=f"set {name} to 1, or {_RUN_WITHOUT}",
            )
    if (nodes := parallel.nnodes_within_dp) > 1:
        raise ConfigError(
            f"the engine's workers are on {nodes} nodes: they all copy to and from the host tier of one "
            "cache server, which is the memory of one node",
            hint=ONE_NODE,
        )
    if not (
        vllm_config.scheduler_config.enable_chunked_prefill
        or vllm_config.cache_config.enable_prefix_caching
    ):
        raise ConfigError(
            "vLLM runs with neither chunked prefill nor prefix caching: its attention may not "
            "be able to go on from KV that it did not compute in the same step",
            hint="set --enable-chunked-prefill; where vLLM turns both off by itself (MLA on a "
            f"CPU without AMX, models with bidirectional attention), {_RUN_WITHOUT}",
        )


def _refuse_groups(kv_cache_config: KVCacheConfig) -> None:
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise ConfigError("the model has no KV cache: there is nothing to keep", hint=_RUN_WITHOUT)
    hosted = any(tensor.host_resident for tensor in kv_cache_config.kv_cache_tensors)
    hosted |= kv_cache_config.hisparse_host_num_blocks is not None
    for group in groups:
        kind = get_kv_cache_spec_kind(group.kv_cache_spec).value
        if group.host_resident or hosted:
            raise _unsupported(f"a host-resident KV cache ({kind})")
        if not group.enable_kv_transfer:
            raise _unsupported(f"a KV cache group that vLLM excludes from transfer ({kind})")
        _refuse_specs(group)


def _refuse_specs(group: KVCacheGroupSpec) -> None:
    """By exact class: a subclass may recycle or add blocks."""
    specs = list(iter_layer_specs(group.kv_cache_spec))
    if not specs or not group.layer_names:
        raise _unsupported("a KV cache group without layers")
    for spec in specs:
        kind = get_kv_cache_spec_kind(spec).value
        if type(spec) is MambaSpec:
            continue
        if type(spec) not in _SUPPORTED_SPECS:
            raise _unsupported(f"a KV cache of kind {kind} ({type(spec).__name__})")
        if isinstance(spec, FullAttentionSpec) and spec.non_causal:
            raise _unsupported(f"non-causal attention ({kind})")
        if spec.tokens_per_state != 1:
            raise _unsupported(f"{spec.tokens_per_state} tokens per state ({kind})")
        if not spec.has_layer_views:
            raise _unsupported(f"a KV cache without layer views ({type(spec).__name__})")


def _unsupported(found: str) -> ConfigError:
    return ConfigError(
        f"the model has {found}: this kind of model is not supported in this version of KVStrata",
        hint=_RUN_WITHOUT,
    )


def _placement_by_layer(kv_cache_config: KVCacheConfig) -> dict[str, tuple[int, int]]:
    """Layer → (byte offset of its block 0, bytes from block to block), from ``KVCacheTensor``."""
    return {
        name: (tensor.offset + i * tensor.layer_stride, tensor.block_stride)
        for tensor in kv_cache_config.kv_cache_tensors
        for i, name in enumerate(tensor.layers)
    }


def _page_bytes_by_layer(kv_cache_config: KVCacheConfig) -> dict[str, int]:
    """Layer → bytes of a page, padding included.

    With layers outermost the next page of the layer follows, with blocks outermost the page of
    the next layer: the smaller of the two strides.
    """
    return {
        name: min(tensor.layer_stride, tensor.block_stride)
        for tensor in kv_cache_config.kv_cache_tensors
        for name in tensor.layers
    }


def _spec_of(group: KVCacheGroupSpec, layer: str) -> KVCacheSpec:
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _check_pages_hold_specs(group: KVCacheGroupSpec, page_bytes: dict[str, int]) -> None:
    """Every layer whose spec is known fits its page; heads outside blocks leave pages in pieces.

    In the scheduler process only the first layer's spec is certain.
    """
    wrapped = isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
    for name in page_bytes if wrapped else [next(iter(page_bytes))]:
        spec = _spec_of(group, name)
        needed = state_bytes(spec) if isinstance(spec, MambaSpec) else spec.unpadded_page_size_bytes
        if page_bytes[name] < needed:
            raise ConfigError(
                f"layer {name}: a page of {needed} bytes lies in pieces of {page_bytes[name]} "
                "bytes; this KV cache layout is not supported in this version of KVStrata",
                hint="set VLLM_KV_CACHE_LAYOUT to LBHNC, LBNHC, BLHNC or BLNHC",
            )


def _by_device_block(name: str, cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """*cache* with device blocks, not kernel blocks, as dim 0."""
    if cache.ndim < 2 or cache.shape[0] == 0 or cache.shape[0] % num_blocks:
        raise ConfigError(
            f"layer {name}: KV cache of shape {tuple(cache.shape)} for {num_blocks} blocks",
            hint=_UNKNOWN_PLAN,
        )
    return group_kernel_blocks(cache, num_blocks)


def _check_cache(
    name: str, cache: torch.Tensor, placement: tuple[int, int], page_bytes: int
) -> None:
    offset, block_stride = placement
    found = (cache.storage_offset() * cache.element_size(), cache.stride(0) * cache.element_size())
    if found != placement:
        raise ConfigError(
            f"layer {name}: KV cache at byte {found[0]} with a stride of {found[1]}, "
            f"planned were byte {offset} and a stride of {block_stride}",
            hint=_UNKNOWN_PLAN,
        )
    end = offset + (cache.shape[0] - 1) * block_stride + page_bytes
    if end > cache.untyped_storage().nbytes():
        raise ConfigError(
            f"layer {name}: KV cache ends at byte {end} of a storage of "
            f"{cache.untyped_storage().nbytes()}",
            hint=_UNKNOWN_PLAN,
        )
    run = _contiguous_bytes(cache)
    if run is None or run > page_bytes:
        raise ConfigError(
            f"layer {name}: a device block of shape {tuple(cache.shape[1:])} and strides "
            f"{cache.stride()[1:]} is not one page of {page_bytes} bytes",
            hint=f"choose another --attention-backend, or {_RUN_WITHOUT}",
        )


def _contiguous_bytes(cache: torch.Tensor) -> int | None:
    """Bytes of ``cache[b]`` if they are one run in some order of its axes, else None."""
    axes: list[tuple[int, int]] = sorted(
        (stride, size)
        for stride, size in zip(cache.stride()[1:], cache.shape[1:], strict=True)
        if size > 1
    )
    expected = 1
    for stride, size in axes:
        if stride != expected:
            return None
        expected *= size
    elements: int = prod(cache.shape[1:])
    return elements * int(cache.element_size())


def _refuse_uncovered(kv_caches: dict[str, Any], geometry: DeviceGeometry) -> None:
    """Layers that share another layer's cache may be registered too; unknown memory may not."""
    covered = {kv_caches[name].data_ptr() for name in geometry.layers}
    unknown = [name for name, cache in kv_caches.items() if cache.data_ptr() not in covered]
    if unknown:
        raise ConfigError(
            f"vLLM registered KV caches that its plan does not place: {unknown}",
            hint=_UNKNOWN_PLAN,
        )
