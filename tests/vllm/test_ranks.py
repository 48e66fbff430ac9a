"""Every worker has bytes of its own in a slot, and its own only."""

import time
from collections.abc import Callable

import pytest
import torch
from tests.vllm.plans import full, group, mla, model_folder, plan, tensors, vllm_config
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import kv_cache_groups_tp_replicas
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.fingerprint import namespace_id
from kvstrata.integration.vllm.geometry import geometry_from_config
from kvstrata.integration.vllm.metadata import Load, Save, StepPlan
from kvstrata.integration.vllm.ranks import SlotRegions, slot_regions
from kvstrata.integration.vllm.worker import WorkerHalf, WorkerSettings
from kvstrata.storage.mapping import HostMapping

TOKENS = 64  # two device blocks
SERVER = bytes(16)


@pytest.fixture
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """Of a model of four layers."""
    return vllm_config(model_folder(tmp_path_factory.mktemp("model")))


def regions(config: VllmConfig, planned: KVCacheConfig, *, stage: int = 0) -> SlotRegions:
    return slot_regions(config, planned, geometry_from_config(config, planned), TOKENS, stage=stage)


@pytest.mark.parametrize("stage_bytes", [(96,), (96, 32), (64, 96, 96, 32)], ids=len)
@pytest.mark.parametrize(("tensor", "replicas"), [(1, 1), (2, 1), (2, 2), (8, 2), (8, 8)])
def test_savers_fill_a_block_without_gap_or_overlap(
    stage_bytes: tuple[int, ...], tensor: int, replicas: int
) -> None:
    split = SlotRegions(stage_bytes, tensor, replicas)
    writers = [0] * split.block_bytes
    for stage, size in enumerate(stage_bytes):
        for rank in range(tensor):
            region = split.of(stage, rank)
            assert region.block_bytes == split.block_bytes
            if region.saves:
                for byte in range(region.start_bytes, region.start_bytes + size):
                    writers[byte] += 1
            else:  # reads what the first of the replicas has written
                first = split.of(stage, rank - rank % replicas)
                assert (region.start_bytes, first.saves) == (first.start_bytes, True)
    assert set(writers) == {1}


class Worker:
    """The worker half of one rank, with random KV."""

    def __init__(
        self, config: VllmConfig, mapping: HostMapping, stage: int, tensor_rank: int, layers: int
    ) -> None:
        planned = plan(config, group(full(), layers=layers))
        geometry = geometry_from_config(config, planned)
        split = slot_regions(config, planned, geometry, TOKENS, stage=stage)
        self._done = {1: 1 << (2 * stage + tensor_rank)}  # of task 1, in a report
        self._caches = tensors(planned)
        self._half = WorkerHalf(
            WorkerSettings(split.of(stage, tensor_rank), TOKENS), config, planned
        )
        self._half.register_kv_caches(self._caches)
        self._half.mapping = mapping

    def fill(self) -> None:
        for cache in self._caches.values():
            cache.view(torch.uint8).random_(0, 256)

    def block(self, device_blocks: list[int]) -> bytes:
        """What belongs into the worker's region: device block by device block, layer by layer."""
        return b"".join(
            cache[i].contiguous().view(torch.uint8).numpy().tobytes()
            for i in device_blocks
            for cache in self._caches.values()
        )

    def save(self, device_blocks: list[int]) -> None:
        self._half.start_save(StepPlan(SERVER, saves=[Save(1, device_blocks, [0], [0])]))
        self._until(self._has_saved)

    def load(self, device_blocks: list[int]) -> None:
        self._half.start_load(StepPlan(SERVER, loads=[Load("r", 1, device_blocks, [0], [0])]))
        self._until(lambda: self._half.collect() == ({"r"}, set()))

    def close(self) -> None:
        self._half.shutdown()

    def _has_saved(self) -> bool:
        self._half.collect()
        report = self._half.report()
        assert report is None or (report.saved, report.save_failed) == (self._done, {})
        return report is not None

    def _until(self, done: Callable[[], bool]) -> None:
        give_up = time.monotonic() + 30
        while not done():
            assert time.monotonic() < give_up
            time.sleep(0.001)  # the copies run on another thread


def test_stages_and_tensor_ranks_lie_side_by_side_and_come_back(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config.parallel_config, "pipeline_parallel_size", 2)
    monkeypatch.setattr(config.parallel_config, "tensor_parallel_size", 2)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,1")
    first = regions(config, plan(config, group(full(), layers=3)))
    mapping = HostMapping.create(1, -(-first.block_bytes // 4096) * 4096, SERVER)
    workers = [
        Worker(config, mapping, stage, rank, layers)
        for stage, layers in enumerate((3, 1))
        for rank in range(2)
    ]
    for worker in workers:
        worker.fill()
    saved = [worker.block([5, 2]) for worker in workers]
    for worker in workers:
        worker.save([5, 2])
    assert bytes(mapping.data[0][: first.block_bytes]) == b"".join(saved)
    for worker, block in zip(workers, saved, strict=True):
        worker.fill()
        assert worker.block([3, 7]) != block
        worker.load([3, 7])
        assert worker.block([3, 7]) == block
        worker.close()
    mapping.close()


def test_one_copy_of_what_all_ranks_hold(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan(config, group(mla(max_tp_shards=1)), layout="LBNHC")
    alone = regions(config, planned)
    for tensor in (2, 4):
        monkeypatch.setattr(config.parallel_config, "tensor_parallel_size", tensor)
        planned.kv_tp_replicas = kv_cache_groups_tp_replicas(planned.kv_cache_groups, tensor)
        split = regions(config, planned)
        assert split.block_bytes == alone.block_bytes
        assert [split.of(0, rank).saves for rank in range(tensor)] == [True] + [False] * (
            tensor - 1
        )


def test_all_stages_agree_on_sizes_that_differ(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config.parallel_config, "pipeline_parallel_size", 3)
    first, middle, last = (plan(config, group(full(), layers=n)) for n in (1, 2, 1))
    split = regions(config, first)
    assert split.stage_bytes[1] == 2 * split.stage_bytes[0] == 2 * split.stage_bytes[2]
    assert regions(config, middle, stage=1) == split == regions(config, last, stage=2)


def test_stage_with_other_layers_than_expected_is_refused(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config.parallel_config, "pipeline_parallel_size", 2)
    with pytest.raises(ConfigError, match=r"stage 0 has 3 layers[\s\S]*2 of them here"):
        regions(config, plan(config, group(full(), layers=3)))
    mixed = {"a": full(), "b": full(head_size=16)}
    with pytest.raises(ConfigError, match=r"pages take 4096, 8192 bytes.* all 4 layers must"):
        regions(config, plan(config, group(mixed)))


def test_order_of_the_ranks_is_part_of_the_namespace(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel = config.parallel_config
    monkeypatch.setattr(parallel, "world_size", 4)
    monkeypatch.setattr(parallel, "tensor_parallel_size", 4)
    ids = set()
    for replicas in (1, 4):
        planned = plan(config, group(full(), layers=2))
        planned.kv_tp_replicas = replicas
        geometry = geometry_from_config(config, planned)
        ids.add(namespace_id(config, planned, geometry, TOKENS, "w").id)
    monkeypatch.setattr(parallel, "pipeline_parallel_size", 2)
    planned = plan(config, group(full(), layers=2))
    geometry = geometry_from_config(config, planned)
    ids.add(namespace_id(config, planned, geometry, TOKENS, "w").id)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "2,2")
    ids.add(namespace_id(config, planned, geometry, TOKENS, "w").id)
    assert len(ids) == 3
