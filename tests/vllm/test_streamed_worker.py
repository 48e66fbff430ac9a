"""A worker half whose device copies on streams, as a GPU does: the same plans, the same reports."""

import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.simulated_device import SimulatedDevice, SimulatedEvent, SimulatedPins
from tests.vllm.plans import (
    FP8,
    FP8_DS_MLA,
    full,
    group,
    mla,
    model_folder,
    sliding,
    tensors,
    vllm_config,
)
from tests.vllm.plans import plan as plan_of
from tests.vllm.test_worker_half import NUM_BLOCKS, PATIENCE_SECONDS, SERVER, Bench
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

from kvstrata.integration.vllm import worker
from kvstrata.integration.vllm.geometry import geometry_from_config
from kvstrata.integration.vllm.metadata import Load, Save, StepPlan, WorkerReport
from kvstrata.integration.vllm.ranks import Region
from kvstrata.integration.vllm.worker import WorkerHalf, WorkerSettings
from kvstrata.storage.mapping import HostMapping
from kvstrata.transfer.descriptors import PagePlace, PagePlaces
from kvstrata.transfer.streamed import StreamedDevice
from kvstrata.transfer.streams import CopyLimits

LIMITS = CopyLimits(chunk_bytes=1 << 14, chunk_spans=5, patience_seconds=0.0)
FROM, TO = [3, 1, 2, 9, 8, 7], [4, 5, 6, 10, 11, 12]


class Gpus:
    """A simulated device for each worker half that is made."""

    def __init__(self) -> None:
        self.drivers: list[SimulatedDevice] = []
        self.pages: list[list[torch.Tensor]] = []  # of each half's groups

    def open_device(self, pages: list[list[torch.Tensor]]) -> StreamedDevice:
        chance = random.Random(len(self.drivers))
        driver = SimulatedDevice(lambda names: names[-1] if chance.random() < 0.8 else names[0])
        self.drivers.append(driver)
        self.pages += pages
        groups = [
            PagePlaces([PagePlace(p.data_ptr(), p.stride(0), p.shape[1]) for p in own], len(own[0]))
            for own in pages
        ]
        streams = driver.loads, driver.saves
        return StreamedDevice(driver, groups, streams, SimulatedPins(), LIMITS)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    found = Gpus()
    monkeypatch.setattr(worker, "open_device", found.open_device)
    return found


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return vllm_config(model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture
def make_bench(config: VllmConfig) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(*groups: KVCacheGroupSpec, layout: str) -> Bench:
        made.append(Bench(config, *groups, layout=layout))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


GROUPS = {
    "heads": [group(full(), layers=3)],
    "mla": [group(mla(), layers=3)],
    "fp8": [group(full(**FP8), layers=3)],
    "fp8_ds_mla": [group(mla(**FP8_DS_MLA), layers=3)],
    "two page sizes": [
        group(full(), layers=2),
        group(sliding(block_size=96, sliding_window=96), layers=1, first=2),
    ],
}
ORDERS = ["LBHNC", "LBNHC", "BLHNC", "BLNHC"]
ANY_CACHE = [
    *((kind, order) for kind in GROUPS if kind != "two page sizes" for order in ORDERS),
    *(("two page sizes", order) for order in ORDERS if order[0] == "B"),  # vLLM has no others
]


def in_slots(blocks: list[list[int]]) -> list[int]:
    """Those of each group, as a plan names them for two slots."""
    halves = [(own[: len(own) // 2], own[len(own) // 2 :]) for own in blocks]
    return [block for half in zip(*halves, strict=True) for own in half for block in own]


def rows(pages: list[torch.Tensor], blocks: list[int]) -> np.ndarray:
    """(blocks, bytes), layer by layer."""
    found: np.ndarray = torch.cat([page[blocks] for page in pages], dim=1).numpy()
    return found


@pytest.mark.parametrize(("kind", "layout"), ANY_CACHE)
def test_blocks_that_the_forward_writes_are_saved_and_come_back(
    make_bench: Callable[..., Bench], gpus: Gpus, kind: str, layout: str
) -> None:
    groups = GROUPS[kind]
    bench = make_bench(*groups, layout=layout)
    rank, driver = bench.ranks[0], gpus.drivers[0]
    rank.fill(1)
    caches = gpus.pages[: len(groups)]
    saved, loaded = [FROM, [10, 11]][: len(groups)], [TO, [3, 1]][: len(groups)]
    others = sorted({*range(1, NUM_BLOCKS)} - {*in_slots(loaded)})

    plan = StepPlan(SERVER, saves=[Save(1, in_slots(saved), [0, 2], [10, 12])])
    rank.half.begin_step(plan)
    rank.half.start_load(plan)
    expected = []
    for pages, blocks in zip(caches, saved, strict=True):
        new = [torch.randint(0, 256, page[blocks].shape, dtype=torch.uint8) for page in pages]
        expected.append(torch.cat(new, dim=1).numpy())
        for page, values in zip(pages, new, strict=True):  # the forward, which runs some time later
            driver.launch(partial(page.__setitem__, blocks, values))
    rank.half.start_save(plan)
    _, _, report = rank.drain()
    assert (report.saved, report.save_failed) == ({1: 1}, {})
    for number, values in enumerate(expected):
        found = [bench.host_rows(0, slot, number) for slot in (0, 2)]
        assert np.array_equal(np.concatenate(found), values)

    plan = StepPlan(SERVER, loads=[Load("request", 2, in_slots(loaded), [0, 2], [10, 12])])
    before = [rows(pages, others) for pages in caches]
    for pages, blocks in zip(caches, loaded, strict=True):
        for page in pages:  # as vLLM does with new blocks
            driver.launch(partial(page.__setitem__, blocks, 0))
    rank.half.begin_step(plan)
    rank.half.start_load(plan)
    received, failed, report = rank.drain()
    assert (received, failed) == ({"request"}, set())
    driver.run_all()
    for pages, blocks, values, kept in zip(caches, loaded, expected, before, strict=True):
        assert np.array_equal(rows(pages, blocks), values)
        assert np.array_equal(rows(pages, others), kept)


def test_a_load_does_not_wait_for_the_forward_of_its_own_step(
    make_bench: Callable[..., Bench], gpus: Gpus
) -> None:
    bench = make_bench(group(full(), layers=2), layout="BLNHC")
    rank, driver = bench.ranks[0], gpus.drivers[0]
    plan = StepPlan(SERVER, loads=[Load("request", 2, TO, [0, 2], [10, 12])])
    forward: list[str] = []
    driver._adversary = lambda names: next((n for n in names if n != "engine"), "engine")
    rank.half.begin_step(plan)
    driver.launch(lambda: forward.append("done"))
    rank.half.start_load(plan)
    rank.half.start_save(plan)
    received, failed, _ = rank.drain()
    assert (received, failed, forward) == ({"request"}, set(), [])


def test_no_hook_of_a_step_waits_for_the_device(
    make_bench: Callable[..., Bench], gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []  # threads
    wait = SimulatedEvent.wait

    def note_and_wait(event: SimulatedEvent) -> None:
        waited.append(threading.get_ident())
        wait(event)

    monkeypatch.setattr(SimulatedEvent, "wait", note_and_wait)
    rank = make_bench(group(full(), layers=2), layout="BLNHC").ranks[0]
    plan = StepPlan(
        SERVER,
        loads=[Load("request", 2, TO, [0, 2], [10, 12])],
        saves=[Save(1, FROM, [4, 6], [10, 12])],
    )
    rank.half.begin_step(plan)
    rank.half.start_load(plan)
    rank.half.wait_for_layer("layer.0")
    rank.half.start_save(plan)
    rank.half.collect()
    rank.drain()
    assert waited
    assert threading.get_ident() not in waited


@pytest.mark.parametrize("fault", ["fails", "refused", "lost"])
def test_what_fails_on_the_device_is_a_load_that_failed(
    make_bench: Callable[..., Bench], gpus: Gpus, fault: str
) -> None:
    bench = make_bench(group(full(), layers=2), layout="LBHNC")
    rank, driver = bench.ranks[0], gpus.drivers[0]
    plan = StepPlan(
        SERVER,
        loads=[Load("request", 2, TO, [0, 2], [10, 12])],
        saves=[Save(1, FROM, [1, 3], [11, 13])],
    )
    if fault == "fails":
        driver.fails_at = 3
    elif fault == "refused":
        driver.refuses_after = 1
    else:
        driver.lose()
    rank.half.begin_step(plan)
    rank.half.start_load(plan)
    rank.half.start_save(plan)
    received, failed, report = rank.drain()
    assert received == {"request"}
    assert report.load_done == {2: 1}
    assert (failed == received) == (report.load_failed == {2})
    assert report.load_failed or report.save_failed
    if fault == "lost":
        assert report.load_failed
        assert report.save_failed == {1: 0}


def layerwise_half(config: VllmConfig, **settings: Any) -> WorkerHalf:
    """With the blocks 1 to 12 of three layers, and a slot of three of them whose bytes are 1."""
    planned = plan_of(config, group(full(), layers=3), layout="LBHNC", num_blocks=13)
    region = Region(0, geometry_from_config(config, planned).rank_bytes(96))
    half = WorkerHalf(WorkerSettings(region, 96, layerwise=True, **settings), config, planned)
    half.register_kv_caches(tensors(planned))
    half.mapping = HostMapping.create(2, -(-region.block_bytes // 4096) * 4096, SERVER)
    half.mapping.data[:] = 1
    return half


@pytest.mark.parametrize("is_idle", [False, True])
def test_saves_make_way_for_steps_that_compute(
    make_bench: Callable[..., Bench], gpus: Gpus, is_idle: bool
) -> None:
    half: Any = make_bench(group(full(), layers=2), layout="BLNHC").ranks[0].half
    assert not half._device._pace.is_shared
    half.begin_step(StepPlan(SERVER, idle=is_idle))
    assert half._device._pace.is_shared is not is_idle


def test_nothing_is_pinned_before_the_first_step(
    make_bench: Callable[..., Bench], gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM may be recording CUDA graphs."""
    bench = make_bench(group(full(), layers=2), layout="BLNHC")
    half: Any = bench.ranks[0].half
    pinned: list[HostMapping] = []
    monkeypatch.setattr(half._device, "pin", lambda mapping, is_over: pinned.append(mapping))
    assert not half.pin(bench.mapping, lambda: False)
    assert pinned == []
    half.begin_step(StepPlan(SERVER, idle=True))
    assert half.pin(bench.mapping, lambda: False)
    assert pinned == [bench.mapping]


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """What is asked for on a machine of two nodes."""
    asked: list[tuple[int, ...]] = []

    def bring_near(mapping: HostMapping, *where: int) -> bool:
        asked.append(where)
        return True

    monkeypatch.setattr(worker, "bring_near", bring_near)
    monkeypatch.setattr(worker, "memory_nodes", lambda: [0, 1])
    return asked


def test_each_rank_has_its_share_of_the_slots_near_its_gpu(
    make_bench: Callable[..., Bench], gpus: Gpus, near: list[tuple[int, ...]]
) -> None:
    bench = make_bench(group(full(), layers=2), layout="BLNHC")
    for node, rank in enumerate(bench.ranks):
        half: Any = rank.half
        half._device.numa_node = node
        half.bring_near(bench.mapping)
    share = 3 * bench.row_bytes
    assert near == [(0, share, 0), (share, share, 1)]


@pytest.mark.parametrize("why", ["a CPU", "one node", "another rank writes it"])
def test_where_nothing_is_nearer_nothing_is_asked_for(
    config: VllmConfig,
    near: list[tuple[int, ...]],
    gpus: Gpus,
    monkeypatch: pytest.MonkeyPatch,
    why: str,
) -> None:
    bench = Bench(config, group(mla(), layers=2), layout="LBHNC", replicas=2)
    half: Any = bench.ranks[1 if why == "another rank writes it" else 0].half
    half._device.numa_node = None if why == "a CPU" else 1
    if why == "one node":
        monkeypatch.setattr(worker, "memory_nodes", lambda: [1])
    half.bring_near(bench.mapping)
    assert near == []
    bench.close()


def test_a_kernel_that_refuses_a_node_does_not_keep_the_worker_from_its_memory(
    make_bench: Callable[..., Bench],
    gpus: Gpus,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(worker, "memory_nodes", lambda: [0, 1])
    bench = make_bench(group(full(), layers=2), layout="BLNHC")
    half: Any = bench.ranks[0].half
    half._device.numa_node = 999
    with caplog.at_level("INFO"):
        half.bring_near(bench.mapping)
    assert "is taken from any NUMA node: there is no NUMA node 999" in caplog.text


class Attention:
    """The forward of a step: launches each layer, which then reads three blocks some time later."""

    def __init__(
        self, half: WorkerHalf, driver: SimulatedDevice, pages: list[torch.Tensor]
    ) -> None:
        self.half, self.driver, self.pages = half, driver, pages
        self.seen: list[set[int]] = []  # by layer

    def run(self, plan: StepPlan, blocks: list[int]) -> None:
        self.half.begin_step(plan)
        self.half.start_load(plan)
        for layer, page in zip(self.half.geometry.layers, self.pages, strict=True):
            self.half.wait_for_layer(layer)
            self.driver.launch(lambda page=page: self._read(page, blocks))  # type: ignore[misc]  # binds the loop's value
            self.half.save_layer(plan, layer)
        self.half.start_save(plan)

    def _read(self, page: torch.Tensor, blocks: list[int]) -> None:
        self.seen.append({*page[blocks].flatten().tolist()})


LOAD = StepPlan(SERVER, loads=[Load("request", 2, [4, 5, 6], [0], [0], at_once=True)])


@pytest.fixture
def forward(config: VllmConfig, gpus: Gpus) -> Iterator[Attention]:
    half = layerwise_half(config)
    driver = gpus.drivers[0]
    driver._adversary = lambda names: names[0]  # the engine's stream, whenever it can
    yield Attention(half, driver, gpus.pages[0])
    half.shutdown()
    assert half.mapping is not None
    half.mapping.close()


def test_a_layer_reads_what_its_step_loads(forward: Attention) -> None:
    forward.run(LOAD, [4, 5, 6])
    forward.half.collect()
    report = forward.half.report()
    forward.driver.run_all()
    assert report == WorkerReport(load_done={2: 1})
    assert forward.half.take_invalid_blocks() == set()
    assert forward.seen == [{1}, {1}, {1}]


def test_the_engine_launches_a_layer_whose_load_has_not_arrived(
    forward: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread waits until the copies have been asked for, and nothing has been copied then."""
    copied: list[int] = []
    late = threading.Event()
    forward.driver.during_copy = lambda: copied.append(1)
    step: Callable[[], bool] = forward.driver.step

    def steps_late() -> bool:
        assert late.wait(PATIENCE_SECONDS)
        return step()

    monkeypatch.setattr(forward.driver, "step", steps_late)
    forward.run(LOAD, [4, 5, 6])
    assert copied == []
    late.set()
    forward.half.collect()
    forward.driver.run_all()
    assert forward.seen == [{1}, {1}, {1}]


@pytest.mark.parametrize("fault", ["fails", "refused", "lost", "cannot follow", "stale"])
def test_a_layerwise_load_that_fails_is_reported_in_its_step_and_nothing_waits_for_it(
    forward: Attention, fault: str
) -> None:
    driver = forward.driver
    if fault == "fails":
        driver.fails_at = 5  # the second layer's
    elif fault == "refused":
        driver.refuses_after = 1
    elif fault == "lost":
        driver.lose()
    elif fault == "cannot follow":
        driver.refuses_to_follow = True
    else:
        assert forward.half.mapping is not None
        forward.half.mapping.generations[0] += 1
    forward.run(LOAD, [4, 5, 6])
    forward.half.collect()
    report = forward.half.report()
    driver.fault = None
    driver.run_all()
    if fault == "cannot follow":  # the thread has waited instead
        assert (report, forward.seen) == (WorkerReport(load_done={2: 1}), [{1}, {1}, {1}])
        return
    assert report == WorkerReport(load_done={2: 1}, load_failed={2})
    assert forward.half.take_invalid_blocks() == {4, 5, 6}
    assert len(forward.seen) == 3 or fault == "lost"


def test_a_load_that_is_not_asked_for_by_its_deadline_is_stopped(
    config: VllmConfig, gpus: Gpus
) -> None:
    half = layerwise_half(config, load_timeout_seconds=0.05)
    driver, held, asked = gpus.drivers[0], threading.Event(), threading.Event()

    def enter() -> None:
        asked.set()
        assert held.wait(PATIENCE_SECONDS)
        SimulatedDevice.enter(driver)

    driver.enter = enter  # type: ignore[method-assign]
    cancel = half._lanes.cancel

    def cancelled(handle: Any) -> None:
        assert asked.wait(PATIENCE_SECONDS)
        cancel(handle)
        held.set()

    half._lanes.cancel = cancelled  # type: ignore[method-assign]
    forward = Attention(half, driver, gpus.pages[0])
    forward.run(LOAD, [4, 5, 6])
    half.collect()
    report = half.report()
    driver.run_all()
    assert report == WorkerReport(load_done={2: 1}, load_given_up={2})
    assert half.take_invalid_blocks() == {4, 5, 6}
    half.shutdown()


def test_a_load_that_does_not_stop_is_waited_for_and_that_is_said(
    config: VllmConfig, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of a failed load are computed anew, and a copy that is under way would be on top."""
    half = layerwise_half(config, load_timeout_seconds=0.0)
    driver, asked, told = gpus.drivers[0], threading.Event(), threading.Event()
    said: list[str] = []

    def during_copy() -> None:
        asked.set()
        assert told.wait(PATIENCE_SECONDS)

    def warning(text: str, *values: object) -> None:
        said.append(text % values)
        assert half.report() is None
        told.set()

    driver.during_copy = during_copy
    monkeypatch.setattr(worker, "_STOP_SECONDS", 0.05)
    monkeypatch.setattr(worker._log, "warning", warning)
    cancel = half._lanes.cancel

    def cancelled(handle: Any) -> None:
        assert asked.wait(PATIENCE_SECONDS)
        cancel(handle)

    half._lanes.cancel = cancelled  # type: ignore[method-assign]
    half.begin_step(LOAD)
    half.start_load(LOAD)
    half.collect()
    assert "still runs 0.05 s after it was told to stop" in said[0]
    assert half.report() == WorkerReport(load_done={2: 1})  # it has arrived after all
    driver.during_copy = lambda: None
    half.shutdown()


def test_a_part_that_is_stale_takes_no_other_load_of_its_step_with_it(forward: Attention) -> None:
    plan = StepPlan(
        SERVER,
        loads=[
            Load("a", 2, [4, 5, 6], [0], [0], at_once=True),
            Load("b", 3, [7, 8, 9], [1], [77], at_once=True),
        ],
    )
    forward.run(plan, [4, 5, 6])
    forward.half.collect()
    report = forward.half.report()
    forward.driver.run_all()
    assert report == WorkerReport(load_done={2: 1, 3: 1}, load_failed={3})
    assert forward.half.take_invalid_blocks() == {7, 8, 9}
    assert forward.seen == [{1}, {1}, {1}]


def test_a_slot_that_changes_hands_while_its_layers_are_copied_is_noticed(
    forward: Attention,
) -> None:
    mapping, left = forward.half.mapping, [4]
    assert mapping is not None

    def during_copy() -> None:
        left[0] -= 1
        if left[0] == 0:
            mapping.generations[0] += 1

    forward.driver.during_copy = during_copy
    forward.run(LOAD, [4, 5, 6])
    forward.half.collect()
    assert left[0] <= 0
    assert forward.half.report() == WorkerReport(load_done={2: 1}, load_failed={2})
    assert forward.half.take_invalid_blocks() == {4, 5, 6}
    forward.driver.run_all()


def test_a_layers_save_runs_behind_what_the_layer_has_launched(forward: Attention) -> None:
    """A layer of the forward may be long in coming; what is saved before it is of earlier steps."""
    order: list[str] = []
    driver = forward.driver
    driver._adversary = lambda names: names[-1]  # saves, whenever they can
    driver.during_copy = lambda: order.append("save")
    plan = StepPlan(SERVER, saves=[Save(7, [1, 2, 3], [0], [0])])
    half = forward.half
    half.begin_step(plan)
    half.start_load(plan)
    for layer in half.geometry.layers:
        half.wait_for_layer(layer)
        driver.launch(lambda: order.append("layer"))
        half.save_layer(plan, layer)
    half.start_save(plan)
    while half._tasks_of:
        half.collect()
    report = half.report()
    assert report == WorkerReport(saved={7: 1})
    assert [order[:i].count("layer") for i, what in enumerate(order) if what == "save"] == [
        1,
        1,
        1,
        2,
        2,
        2,
        3,
        3,
        3,
    ]
