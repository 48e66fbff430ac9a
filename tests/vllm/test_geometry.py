from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.vllm.plans import BLOCK_SIZE, full, group, mla, model_folder, plan, tensors, vllm_config
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.geometry import (
    DeviceGeometry,
    geometry_from_config,
    pages_from_tensors,
)

PAGE = 4 * BLOCK_SIZE * 16 * 2  # heads, tokens, K and V of 8 values, bytes per value


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return vllm_config(model_folder(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_pages_are_exactly_the_registered_bytes(config: VllmConfig, layout: str) -> None:
    planned = plan(config, group(full()), layout=layout, num_blocks=5)
    geometry = geometry_from_config(config, planned)
    assert geometry == DeviceGeometry(
        num_blocks=5,
        block_size=32,
        layers=tuple(f"model.layers.{i}.self_attn.attn" for i in range(4)),
        page_bytes=(PAGE,) * 4,
    )
    caches = tensors(planned)
    pages = pages_from_tensors(caches, geometry, planned)
    for i, (name, page) in enumerate(zip(geometry.layers, pages, strict=True)):
        assert (page.shape, page.dtype) == ((5, PAGE), torch.uint8)
        caches[name].view(torch.int8)[3] = i + 1
        assert (page[3] == i + 1).all()
    assert sum(int((page != 0).sum()) for page in pages) == 4 * PAGE


def test_mla_page_has_one_latent_per_token(config: VllmConfig) -> None:
    planned = plan(config, group(mla()), layout="LBNHC")
    geometry = geometry_from_config(config, planned)
    assert geometry.page_bytes == (BLOCK_SIZE * 24 * 2,) * 4
    assert len(pages_from_tensors(tensors(planned), geometry, planned)) == 4


def test_mla_alignment_padding_belongs_to_the_page(config: VllmConfig) -> None:
    planned = plan(config, group(mla(alignment=1000)), layout="LBNHC")
    geometry = geometry_from_config(config, planned)
    assert geometry.page_bytes == (2000,) * 4
    assert len(pages_from_tensors(tensors(planned), geometry, planned)) == 4


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_layers_of_different_size_agree_in_both_processes(config: VllmConfig, layout: str) -> None:
    mixed = {"a": full(), "b": full(head_size=16), "c": full()}
    planned = plan(config, group(mixed), layout=layout)
    worker = geometry_from_config(config, planned)
    assert worker.layers == ("a", "b", "c")
    assert worker.page_bytes == (PAGE, 2 * PAGE, PAGE)
    scheduler = generate_scheduler_kv_cache_config([planned])
    assert isinstance(scheduler.kv_cache_groups[0].kv_cache_spec, FullAttentionSpec)
    assert geometry_from_config(config, scheduler) == worker
    assert [p.shape[1] for p in pages_from_tensors(tensors(planned), worker, planned)] == [
        PAGE,
        2 * PAGE,
        PAGE,
    ]


def test_device_blocks_of_several_kernel_blocks(config: VllmConfig) -> None:
    planned = plan(config, group(full(block_size=64)), num_blocks=3)
    geometry = geometry_from_config(config, planned)
    caches = tensors(planned, kernel_block_size=16)
    assert next(iter(caches.values())).shape[0] == 12
    pages = pages_from_tensors(caches, geometry, planned)
    assert pages[0].shape == (3, 2 * PAGE)


def test_layer_that_shares_a_cache_is_not_copied_twice(config: VllmConfig) -> None:
    planned = plan(config, group(full()))
    caches = tensors(planned)
    shared = "model.layers.9.self_attn.attn"
    caches[shared] = caches[planned.kv_cache_groups[0].layer_names[1]]
    planned.kv_cache_groups[0].layer_names.append(shared)
    geometry = geometry_from_config(config, planned)
    assert len(geometry.layers) == 4
    assert len(pages_from_tensors(caches, geometry, planned)) == 4


def test_scheduler_without_a_placement_uses_the_spec(config: VllmConfig) -> None:
    bare = KVCacheConfig(num_blocks=7, kv_cache_tensors=[], kv_cache_groups=[group(full())])
    assert geometry_from_config(config, bare).page_bytes == (PAGE,) * 4


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (SlidingWindowSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.bfloat16,
                           sliding_window=64), "sliding_window"),
        (SlidingWindowMLASpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.bfloat16,
                              sliding_window=64), "sliding_window_mla"),
        (ChunkedLocalAttentionSpec(block_size=32, num_kv_heads=1, head_size=8,
                                   dtype=torch.bfloat16, attention_chunk_size=64),
         "chunked_local_attention"),
        (CrossAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.bfloat16),
         "cross_attention"),
        (SinkFullAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.bfloat16,
                               sink_len=4), "sink_full_attention"),
        (RSWASpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.bfloat16,
                  rswa_window=64), "RSWASpec"),
        (MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,)), "mamba"),
        (full(non_causal=True), "non-causal"),
    ],
    ids=lambda v: type(v).__name__ if not isinstance(v, str) else "",
)  # fmt: skip
def test_unsupported_kinds_are_named_with_the_way_out(
    config: VllmConfig, spec: Any, kind: str
) -> None:
    bare = KVCacheConfig(8, [], [KVCacheGroupSpec(["a"], spec)])
    with pytest.raises(ConfigError, match=rf"{kind}[\s\S]*without the connector"):
        geometry_from_config(config, bare)


@pytest.mark.parametrize("count", [0, 2])
def test_one_group_only(config: VllmConfig, count: int) -> None:
    bare = KVCacheConfig(8, [], [KVCacheGroupSpec([str(i)], full()) for i in range(count)])
    with pytest.raises(ConfigError, match=f"has {count} KV cache groups"):
        geometry_from_config(config, bare)


def test_hidden_and_host_resident_groups_are_refused(config: VllmConfig) -> None:
    for group_changes, problem in [
        ({"host_resident": True}, "host-resident"),
        ({"enable_kv_transfer": False}, "excludes from transfer"),
    ]:
        bare = KVCacheConfig(8, [], [KVCacheGroupSpec(["a"], full(), **group_changes)])
        with pytest.raises(ConfigError, match=problem):
            geometry_from_config(config, bare)


@pytest.mark.parametrize(
    "name",
    ["pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"],
)
def test_parallelism_that_splits_otherwise_is_refused(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(config.parallel_config, name, 2)
    with pytest.raises(ConfigError, match=f"{name} = 2"):
        geometry_from_config(config, plan(config, group(full())))


def test_replicated_cache_is_refused(config: VllmConfig) -> None:
    planned = plan(config, group(mla()), layout="LBNHC")
    planned.kv_tp_replicas = 2
    with pytest.raises(ConfigError, match="replicas"):
        geometry_from_config(config, planned)


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_layout_with_pages_in_pieces_is_refused(config: VllmConfig, layout: str) -> None:
    planned = plan(config, group(full()), layout=layout)
    with pytest.raises(ConfigError, match="lies in pieces"):
        geometry_from_config(config, planned)


def _moved(caches: dict[str, torch.Tensor]) -> None:
    name = next(iter(caches))
    caches[name] = caches[name].clone()[1:]


def _permuted(caches: dict[str, torch.Tensor]) -> None:
    name = list(caches)[2]
    cache = caches[name]
    caches[name] = torch.as_strided(
        cache, cache.shape, (cache.stride(0), 1, 1, 1), cache.storage_offset()
    )


def _missing(caches: dict[str, torch.Tensor]) -> None:
    caches.pop(next(iter(caches)))


def _unknown(caches: dict[str, torch.Tensor]) -> None:
    caches["else"] = torch.zeros(8, 4, 32, 16, dtype=torch.bfloat16)


def _swapped(caches: dict[str, torch.Tensor]) -> None:
    first, second, *_ = caches
    caches[first], caches[second] = caches[second], caches[first]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_moved, "for 8 blocks"),
        (_permuted, "is not one page"),
        (_missing, "registered no KV cache"),
        (_unknown, "does not place: \\['else'\\]"),
        (_swapped, "planned were byte 0"),
    ],
)
def test_tensors_that_differ_from_the_plan_are_refused(
    config: VllmConfig, damage: Callable[[dict[str, torch.Tensor]], None], problem: str
) -> None:
    planned = plan(config, group(full()))
    geometry = geometry_from_config(config, planned)
    caches = tensors(planned)
    damage(caches)
    with pytest.raises(ConfigError, match=problem):
        pages_from_tensors(caches, geometry, planned)


def test_tensors_of_another_layout_are_refused(config: VllmConfig) -> None:
    planned = plan(config, group(full()), layout="BLHNC")
    other = tensors(plan(config, group(full()), layout="LBHNC"))
    with pytest.raises(ConfigError, match="planned were"):
        pages_from_tensors(other, geometry_from_config(config, planned), planned)


def test_slot_holds_all_ranks_and_is_page_aligned() -> None:
    geometry = DeviceGeometry(num_blocks=1, block_size=32, layers=("a",), page_bytes=(1000,))
    assert geometry.rank_bytes(64) == 2000
    assert geometry.slot_bytes(64, world_size=1) == 4096
    assert geometry.slot_bytes(64, world_size=3) == 8192


@pytest.mark.parametrize("tokens", [0, 16, 33, 80])
def test_block_must_be_whole_device_blocks(tokens: int) -> None:
    geometry = DeviceGeometry(num_blocks=1, block_size=32, layers=("a",), page_bytes=(1000,))
    with pytest.raises(ConfigError, match=r"multiple of 32"):
        geometry.rank_bytes(tokens)
