import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.vllm.plans import (
    BLOCK_SIZE,
    chunked,
    full,
    group,
    mla,
    model_folder,
    plan,
    sliding,
    tensors,
    vllm_config,
)
from tests.vllm.tiny_deepseek import DEEPSEEK
from vllm import EngineArgs
from vllm.config import ParallelConfig, VllmConfig
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
)

from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.geometry import (
    DeviceGeometry,
    GroupGeometry,
    geometry_from_config,
    pages_from_tensors,
)
from kvstrata.integration.vllm.reach import Reach
from kvstrata.integration.vllm.setup import EngineIdentity

WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "is_encoder_decoder": True,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 1024,
    "max_target_positions": 448,
    "torch_dtype": "bfloat16",
}


@contextmanager
def refused(problem: str) -> Iterator[None]:
    """Within, a ``ConfigError`` is raised that also says what to do."""
    with pytest.raises(ConfigError, match=problem) as caught:
        yield
    assert caught.value.hint


def layer(number: int) -> str:
    return f"model.layers.{number}.self_attn.attn"


PAGE = 4 * BLOCK_SIZE * 16 * 2  # heads, tokens, K and V of 8 values, bytes per value


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return vllm_config(model_folder(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_pages_are_exactly_the_registered_bytes(config: VllmConfig, layout: str) -> None:
    planned = plan(config, group(full()), layout=layout, num_blocks=5)
    geometry = geometry_from_config(config, planned)
    only = GroupGeometry(
        block_size=32,
        layers=tuple(f"model.layers.{i}.self_attn.attn" for i in range(4)),
        page_bytes=(PAGE,) * 4,
    )
    assert geometry == DeviceGeometry(num_blocks=5, groups=(only,))
    caches = tensors(planned)
    (pages,) = pages_from_tensors(caches, geometry, planned)
    for i, (name, page) in enumerate(zip(geometry.layers, pages, strict=True)):
        assert (page.shape, page.dtype) == ((5, PAGE), torch.uint8)
        caches[name].view(torch.int8)[3] = i + 1
        assert (page[3] == i + 1).all()
    assert sum(int((page != 0).sum()) for page in pages) == 4 * PAGE


def test_mla_page_has_one_latent_per_token(config: VllmConfig) -> None:
    planned = plan(config, group(mla()), layout="LBNHC")
    geometry = geometry_from_config(config, planned)
    assert geometry.page_bytes == (BLOCK_SIZE * 24 * 2,) * 4
    assert [len(each) for each in pages_from_tensors(tensors(planned), geometry, planned)] == [4]


def test_mla_alignment_padding_belongs_to_the_page(config: VllmConfig) -> None:
    planned = plan(config, group(mla(alignment=1000)), layout="LBNHC")
    geometry = geometry_from_config(config, planned)
    assert geometry.page_bytes == (2000,) * 4
    assert [len(each) for each in pages_from_tensors(tensors(planned), geometry, planned)] == [4]


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
    assert [p.shape[1] for p in pages_from_tensors(tensors(planned), worker, planned)[0]] == [
        PAGE,
        2 * PAGE,
        PAGE,
    ]


def test_device_blocks_of_several_kernel_blocks(config: VllmConfig) -> None:
    planned = plan(config, group(full(block_size=64)), num_blocks=3)
    geometry = geometry_from_config(config, planned)
    caches = tensors(planned, kernel_block_size=16)
    assert next(iter(caches.values())).shape[0] == 12
    (pages,) = pages_from_tensors(caches, geometry, planned)
    assert pages[0].shape == (3, 2 * PAGE)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_groups_have_their_layers_in_the_same_memory(config: VllmConfig, layout: str) -> None:
    groups = [group(full(), 2), group(sliding(), 2, first=2), group(chunked(), 1, first=4)]
    planned = plan(config, *groups, layout=layout, num_blocks=5)
    geometry = geometry_from_config(config, planned)
    assert geometry_from_config(config, generate_scheduler_kv_cache_config([planned])) == geometry
    assert [each.reach for each in geometry.groups] == [
        Reach(),
        Reach(window=64),
        Reach(chunk=128),
    ]
    assert geometry.rank_bytes(64) == 2 * 5 * PAGE
    caches = tensors(planned)
    pages = pages_from_tensors(caches, geometry, planned)
    assert [len(each) for each in pages] == [2, 2, 1]
    caches[geometry.groups[1].layers[1]].view(torch.int8)[3] = 7
    assert (pages[1][1][3] == 7).all()
    assert (pages[0][1][3] == 7).all()  # block 3 is the one group's or the other's
    assert not pages[1][1][2].any()


def test_groups_with_device_blocks_of_different_size(config: VllmConfig) -> None:
    groups = [
        group(full(block_size=64), 2),
        group(sliding(sliding_window=4 * BLOCK_SIZE), 3, first=2),
    ]
    planned = plan(config, *groups, layout="BLHNC")
    geometry = geometry_from_config(config, planned)
    assert (geometry.block_size, geometry.layers) == (64, tuple(layer(i) for i in range(5)))
    assert geometry.rank_bytes(128) == 2 * 2 * 2 * PAGE + 4 * 3 * PAGE
    with refused("multiple of 64"):
        geometry.rank_bytes(32)
    pages = pages_from_tensors(tensors(planned), geometry, planned)
    assert [[page.shape[1] for page in each] for each in pages] == [[2 * PAGE] * 2, [PAGE] * 3]


@pytest.mark.parametrize(
    ("reach", "tokens", "problem"),
    [
        (Reach(window=64), 96, "sliding window of 64 tokens[\\s\\S]*multiple of 32 up to 64"),
        (Reach(window=100), 128, "up to 96"),
        (Reach(chunk=128), 96, "does not divide the model's attention chunks of 128"),
    ],
)
def test_block_that_cannot_be_saved_whole_is_refused(
    reach: Reach, tokens: int, problem: str
) -> None:
    geometry = DeviceGeometry(1, (GroupGeometry(32, ("a",), (1000,), reach),))
    geometry.check_block(64)
    with refused(problem):
        geometry.check_block(tokens)


@pytest.mark.parametrize(
    ("reach", "tokens", "first"),
    [
        (Reach(), 1000, 0),
        (Reach(window=5), 4, 0),
        (Reach(window=5), 5, 1),
        (Reach(chunk=8), 15, 8),
        (Reach(chunk=8), 16, 16),
    ],
)
def test_first_token_in_reach_is_vllms(reach: Reach, tokens: int, first: int) -> None:
    assert reach.first_needed(tokens) == first
    managers = {"window": SlidingWindowManager, "chunk": ChunkedLocalAttentionManager}
    for name, manager in managers.items():
        if (size := getattr(reach, name)) is None:
            continue
        sizes = {"sliding_window": size, "attention_chunk_size": size, "extra_retained_tokens": 0}
        assert manager.get_num_skipped_tokens(SimpleNamespace(**sizes), tokens) == first


def test_layer_that_shares_a_cache_is_not_copied_twice(config: VllmConfig) -> None:
    planned = plan(config, group(full()))
    caches = tensors(planned)
    shared = "model.layers.9.self_attn.attn"
    caches[shared] = caches[planned.kv_cache_groups[0].layer_names[1]]
    planned.kv_cache_groups[0].layer_names.append(shared)
    geometry = geometry_from_config(config, planned)
    assert len(geometry.layers) == 4
    assert [len(each) for each in pages_from_tensors(caches, geometry, planned)] == [4]


def test_scheduler_without_a_placement_uses_the_spec(config: VllmConfig) -> None:
    bare = KVCacheConfig(num_blocks=7, kv_cache_tensors=[], kv_cache_groups=[group(full())])
    assert geometry_from_config(config, bare).page_bytes == (PAGE,) * 4


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (SlidingWindowMLASpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.bfloat16,
                              sliding_window=64), "sliding_window_mla"),
        (CrossAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.bfloat16),
         "cross_attention"),
        (SinkFullAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.bfloat16,
                               sink_len=4), "sink_full_attention"),
        (RSWASpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.bfloat16,
                  rswa_window=64), "RSWASpec"),
        (MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,)), "recurrent state"),
        (full(non_causal=True), "non-causal"),
    ],
    ids=lambda v: type(v).__name__ if not isinstance(v, str) else "",
)  # fmt: skip
def test_unsupported_kinds_are_named_with_the_way_out(
    config: VllmConfig, spec: Any, kind: str
) -> None:
    bare = KVCacheConfig(8, [], [KVCacheGroupSpec(["a"], spec)])
    with refused(rf"{kind}[\s\S]*without the connector"):
        geometry_from_config(config, bare)


def test_model_without_a_cache_is_refused(config: VllmConfig) -> None:
    with refused(r"no KV cache[\s\S]*without the connector"):
        geometry_from_config(config, KVCacheConfig(1, [], []))


def test_hidden_and_host_resident_groups_are_refused(config: VllmConfig) -> None:
    for group_changes, problem in [
        ({"host_resident": True}, "host-resident"),
        ({"enable_kv_transfer": False}, "excludes from transfer"),
    ]:
        bare = KVCacheConfig(8, [], [KVCacheGroupSpec(["a"], full(), **group_changes)])
        with refused(problem):
            geometry_from_config(config, bare)


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_parallelism_within_a_block_is_refused(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(config.parallel_config, name, 2)
    with refused(rf"{name} = 2: .*tokens of a block[\s\S]*set {name} to 1"):
        geometry_from_config(config, plan(config, group(full())))


def test_engine_with_workers_on_several_nodes_is_refused(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = ParallelConfig(tensor_parallel_size=4, nnodes=2, distributed_executor_backend="mp")
    monkeypatch.setattr(config, "parallel_config", two)
    with refused(r"workers are on 2 nodes: .*host tier[\s\S]*run each engine on one node"):
        geometry_from_config(config, plan(config, group(full())))


def test_encoder_decoder_is_refused_by_name(tmp_path: Path, config: VllmConfig) -> None:
    folder = tmp_path / "whisper"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(WHISPER))
    whisper = vllm_config(folder, max_model_len=448)
    with refused(r"whisper' is an encoder-decoder model: .*encoder's input"):
        geometry_from_config(whisper, plan(config, group(full())))


@pytest.mark.parametrize(("chunks", "caches"), [(True, False), (False, True), (False, False)])
def test_engine_that_cannot_go_on_from_loaded_tokens_is_refused(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, chunks: bool, caches: bool
) -> None:
    planned = plan(config, group(full()))
    monkeypatch.setattr(config.scheduler_config, "enable_chunked_prefill", chunks)
    monkeypatch.setattr(config.cache_config, "enable_prefix_caching", caches)
    if chunks or caches:
        geometry_from_config(config, planned)
        return
    with refused("neither chunked prefill nor prefix caching"):
        geometry_from_config(config, planned)


def test_mla_on_a_cpu_is_refused_where_vllm_would_ignore_what_was_loaded(
    tmp_path: Path, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own settings for a DeepSeek: without AMX a prefill there looks at itself alone."""
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    deepseek = EngineArgs(
        model=str(tmp_path), skip_tokenizer_init=True, max_model_len=512
    ).create_engine_config()
    assert deepseek.model_config.use_mla
    with refused(r"neither chunked prefill[\s\S]*without AMX"):
        geometry_from_config(deepseek, plan(config, group(mla())))


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_layout_with_pages_in_pieces_is_refused(config: VllmConfig, layout: str) -> None:
    planned = plan(config, group(full()), layout=layout)
    with refused("lies in pieces"):
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
    with refused(problem):
        pages_from_tensors(caches, geometry, planned)


def test_layers_that_are_placed_outside_the_groups_are_refused(config: VllmConfig) -> None:
    planned = plan(config, group(full()))
    outside = planned.kv_cache_groups[0].layer_names.pop()
    with refused(f"outside the KV cache groups: \\['{outside}'\\]"):
        geometry_from_config(config, planned)


def test_pages_that_end_beyond_their_memory_are_refused(config: VllmConfig) -> None:
    planned = plan(config, group(mla(alignment=1000)), layout="LBNHC")
    caches = tensors(planned)
    name, cache = caches.popitem()
    whole = torch.zeros(cache.untyped_storage().nbytes() - 1, dtype=torch.uint8)
    caches[name] = torch.empty(0, dtype=cache.dtype).set_(
        whole.untyped_storage(), cache.storage_offset(), cache.shape, cache.stride()
    )
    with refused("KV cache ends at byte"):
        pages_from_tensors(caches, geometry_from_config(config, planned), planned)


def test_an_engine_without_a_connector_is_refused(config: VllmConfig) -> None:
    with refused("without --kv-transfer-config"):
        EngineIdentity.of(Config(), config, plan(config, group(full())))


def test_tensors_of_another_layout_are_refused(config: VllmConfig) -> None:
    planned = plan(config, group(full()), layout="BLHNC")
    other = tensors(plan(config, group(full()), layout="LBHNC"))
    with refused("planned were"):
        pages_from_tensors(other, geometry_from_config(config, planned), planned)


def test_slot_holds_all_ranks_and_is_page_aligned() -> None:
    geometry = DeviceGeometry(1, (GroupGeometry(32, ("a",), (1000,)),))
    assert geometry.rank_bytes(64) == 2000
    assert geometry.slot_bytes(64, world_size=1) == 4096
    assert geometry.slot_bytes(64, world_size=3) == 8192


@pytest.mark.parametrize("tokens", [0, 16, 33, 80])
def test_block_must_be_whole_device_blocks(tokens: int) -> None:
    geometry = DeviceGeometry(1, (GroupGeometry(32, ("a",), (1000,)),))
    with refused(r"multiple of 32"):
        geometry.rank_bytes(tokens)
