"""The engine's own tensors as a tier: by reference, and only if they are what they are said to be."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError
from kvstrata.core.layout import ElementType, KVCacheLayout, KVCacheLayoutType, KVGroup
from kvstrata.storage.engine import StorageEngine
from kvstrata.storage.handles import DeviceType

BF16 = ElementType.BFLOAT16
LAYERWISE, LAYERBLOCK, BLOCKWISE = (
    KVCacheLayoutType.LAYERWISE,
    KVCacheLayoutType.LAYERBLOCK,
    KVCacheLayoutType.BLOCKWISE,
)


def layout(kind: KVCacheLayoutType, **changes: Any) -> KVCacheLayout:
    sizes = {
        "num_layer": 3,
        "num_block": 5,
        "tokens_per_block": 8,
        "num_head": 4,
        "head_size": 16,
    } | changes
    return KVCacheLayout(kind, **sizes)


def tensor(of: KVCacheLayout, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(of.shape, dtype=dtype)


@pytest.fixture
def engine() -> Iterator[StorageEngine]:
    groups = [KVGroup(layout(BLOCKWISE, tokens_per_block=32), BF16)]
    made = StorageEngine(groups, Config.model_validate({"tiers": "host:1MiB"}).tiers)
    yield made
    made.close()


@pytest.mark.parametrize("kind", [LAYERWISE, LAYERBLOCK, BLOCKWISE])
def test_one_tensor_of_all_layers_is_taken_by_reference(
    engine: StorageEngine, kind: KVCacheLayoutType
) -> None:
    cache = tensor(layout(kind))
    handle = engine.register_device_blocks([cache], layout(kind), 1, BF16)
    assert engine.get_storage_handle(DeviceType.DEVICE, 1) is handle
    assert handle.data[0] is cache
    assert (handle.capacity_blocks, handle.bytes_per_block) == (5, 3 * 2 * 8 * 4 * 16 * 2)


@pytest.mark.parametrize("kind", [LAYERWISE, LAYERBLOCK])
def test_a_tensor_for_each_layer_is_taken(engine: StorageEngine, kind: KVCacheLayoutType) -> None:
    layers = [tensor(layout(kind))[0] for _ in range(3)]
    assert engine.register_device_blocks(layers, layout(kind), 0, BF16).data == tuple(layers)


def test_a_latent_cache_may_leave_out_its_axes_of_one(engine: StorageEngine) -> None:
    sizes: dict[str, Any] = {"is_mla": True, "num_head": 1, "head_size": 576}
    groups = [KVGroup(layout(BLOCKWISE, **sizes), BF16)]
    with_latent = StorageEngine(groups, Config.model_validate({"tiers": "host:1MiB"}).tiers)
    layers = [torch.empty(5, 8, 576, dtype=torch.bfloat16) for _ in range(3)]
    with_latent.register_device_blocks(layers, layout(LAYERWISE, **sizes), 0, BF16)
    with_latent.close()


def test_quantised_elements_may_be_in_tensors_of_bytes() -> None:
    for dtype, row in (("float8_e4m3fn", 16), ("int4", 8)):
        element = ElementType.named(dtype)
        groups = [KVGroup(layout(BLOCKWISE), element)]
        engine = StorageEngine(groups, Config.model_validate({"tiers": "host:1MiB"}).tiers)
        cache = torch.empty(3, 2, 5, 8, 4, row, dtype=torch.uint8)
        engine.register_device_blocks([cache], layout(LAYERWISE), 0, element)
        engine.close()


def test_an_element_type_is_never_guessed(engine: StorageEngine) -> None:
    wanted = layout(LAYERWISE)
    for dtype in (torch.float16, torch.float32, torch.uint8):
        with pytest.raises(ConfigError, match=r"tensor 0 of device 0 holds \w+, not bfloat16"):
            engine.register_device_blocks([tensor(wanted, dtype)], wanted, 0, BF16)


def test_a_tensor_of_another_shape_or_stride_is_refused(engine: StorageEngine) -> None:
    wanted = layout(LAYERWISE)
    cache = tensor(wanted)
    for other in (
        cache[:, :, :4],  # fewer blocks
        torch.empty(3, 2, 6, 8, 4, 16, dtype=torch.bfloat16)[:, :, :5],  # gaps between K and V
        cache.transpose(3, 4),  # heads before tokens
        tensor(layout(LAYERBLOCK)),
        cache[0],
    ):
        with pytest.raises(ConfigError, match=r"has the shape .* strides"):
            engine.register_device_blocks([other], wanted, 0, BF16)


def test_a_wrong_number_of_tensors_is_refused(engine: StorageEngine) -> None:
    with pytest.raises(ConfigError, match="2 tensors for a LAYERWISE cache of 3 layers"):
        engine.register_device_blocks([tensor(layout(LAYERWISE))] * 2, layout(LAYERWISE), 0, BF16)
    with pytest.raises(ConfigError, match="3 tensors for a BLOCKWISE cache"):
        engine.register_device_blocks([tensor(layout(BLOCKWISE))] * 3, layout(BLOCKWISE), 0, BF16)


@pytest.mark.parametrize(
    "changes",
    [{"num_layer": 2}, {"head_size": 8}, {"tokens_per_block": 12}, {"num_head": 3}],
)
def test_device_blocks_of_which_no_block_is_made_are_refused(
    engine: StorageEngine, changes: dict[str, int]
) -> None:
    other = layout(LAYERWISE, **changes)
    with pytest.raises(ConfigError, match="no block of host memory is made of blocks of"):
        engine.register_device_blocks([tensor(other)], other, 0, BF16)


def test_a_rank_may_hold_some_of_the_heads(engine: StorageEngine) -> None:
    half = layout(LAYERWISE, num_head=2)
    for rank in (0, 1):
        engine.register_device_blocks([tensor(half)], half, rank, BF16)
    assert engine.get_storage_handle(DeviceType.DEVICE, 1).device_id == 1


def test_a_device_is_registered_once_until_it_is_freed(engine: StorageEngine) -> None:
    wanted = layout(LAYERWISE)
    engine.register_device_blocks([tensor(wanted)], wanted, 0, BF16)
    with pytest.raises(ConfigError, match="device 0 is registered already"):
        engine.register_device_blocks([tensor(wanted)], wanted, 0, BF16)
    engine.free(DeviceType.DEVICE)
    engine.register_device_blocks([tensor(wanted)], wanted, 0, BF16)
