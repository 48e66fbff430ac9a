"""A worker half whose device copies on streams, as a GPU does: the same plans, the same reports."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.simulated_device import SimulatedDevice, SimulatedPins
from tests.vllm.plans import full, group, mla, model_folder, tensors, vllm_config
from tests.vllm.plans import plan as plan_of
from tests.vllm.test_worker_half import PATIENCE_SECONDS, SERVER, Bench
from vllm.config import VllmConfig

from kvstrata.integration.vllm import worker
from kvstrata.integration.vllm.geometry import geometry_from_config
from kvstrata.integration.vllm.metadata import Load, Save, StepPlan
from kvstrata.integration.vllm.ranks import Region
from kvstrata.integration.vllm.worker import WorkerHalf, WorkerSettings
from kvstrata.storage.mapping import HostMapping
from kvstrata.transfer.descriptors import PagePlace, PagePlaces
from kvstrata.transfer.devices import NOW
from kvstrata.transfer.driver import DeviceFault, Event
from kvstrata.transfer.guarded import Copied, RankSlots, Run
from kvstrata.transfer.lanes import Handle
from kvstrata.transfer.streamed import StreamedDevice
from kvstrata.transfer.streams import CopyLimits

LIMITS = CopyLimits(chunk_bytes=1 << 14, chunk_spans=5, patience_seconds=0.0)
FROM, TO = [3, 1, 2, 9, 8, 7], [4, 5, 6, 10, 11, 12]


class Gpus:
    """A simulated device for each worker half that is made."""

    def __init__(self) -> None:
        self.drivers: list[SimulatedDevice] = []
        self.pages: list[list[torch.Tensor]] = []  # of each half's one group

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

    def make(spec: Any, layout: str) -> Bench:
        made.append(Bench(config, spec, layout))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("spec", [full, mla])
def test_blocks_that_the_forward_writes_are_saved_and_come_back(
    make_bench: Callable[..., Bench], gpus: Gpus, layout: str, spec: Any
) -> None:
    bench = make_bench(group(spec(), layers=3), layout)
    rank, driver = bench.ranks[0], gpus.drivers[0]
    rank.fill(1)
    caches = gpus.pages[0]
    new = [torch.randint(0, 256, cache[FROM].shape, dtype=torch.uint8) for cache in caches]

    def device_blocks(numbers: list[int]) -> np.ndarray:
        rows: np.ndarray = torch.cat([cache[numbers] for cache in caches], dim=1).numpy()
        return rows

    plan = StepPlan(SERVER, saves=[Save(1, FROM, [0, 2], [10, 12])])
    rank.half.begin_step(plan)
    rank.half.start_load(plan)
    for cache, values in zip(caches, new, strict=True):  # the forward, which runs some time later
        driver.launch(partial(cache.__setitem__, FROM, values))
    rank.half.start_save(plan)
    _, _, report = rank.drain()
    assert (report.saved, report.save_failed) == ({1: 1}, {})
    expected = device_blocks(FROM)
    assert np.array_equal(expected, torch.cat(new, dim=1).numpy())
    assert np.array_equal(bench.host_rows(0, 0), expected[:3])
    assert np.array_equal(bench.host_rows(0, 2), expected[3:])

    plan = StepPlan(SERVER, loads=[Load("request", 2, TO, [0, 2], [10, 12])])
    zeroes = [torch.zeros_like(values) for values in new]
    for cache, values in zip(caches, zeroes, strict=True):  # as vLLM does with new blocks
        driver.launch(partial(cache.__setitem__, TO, values))
    rank.half.begin_step(plan)
    rank.half.start_load(plan)
    received, failed, report = rank.drain()
    assert (received, failed) == ({"request"}, set())
    assert np.array_equal(device_blocks(TO), expected)
    driver.run_all()
    assert np.array_equal(device_blocks(TO), expected)


def test_a_load_does_not_wait_for_the_forward_of_its_own_step(
    make_bench: Callable[..., Bench], gpus: Gpus
) -> None:
    bench = make_bench(group(full(), layers=2), "BLNHC")
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


@pytest.mark.parametrize("fault", ["fails", "refused", "lost"])
def test_what_fails_on_the_device_is_a_load_that_failed(
    make_bench: Callable[..., Bench], gpus: Gpus, fault: str
) -> None:
    bench = make_bench(group(full(), layers=2), "LBHNC")
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


class TwoAtOnce:
    """A device whose first layer fails while the second is copied, which then ends well."""

    copy_threads = 2
    copies_at_once = False

    def __init__(self) -> None:
        self.begun = threading.Event()

    def fence(self) -> Event:
        return NOW

    def load_job(
        self, slots: RankSlots, runs: Sequence[Run], after: Event, layer: int | None = None
    ) -> Callable[[Handle[Copied]], Copied]:
        def job(handle: Handle[Copied]) -> Copied:
            if layer == 0:
                assert self.begun.wait(PATIENCE_SECONDS)
                raise DeviceFault("the first layer")
            self.begun.set()
            time.sleep(0.05)  # the other one ends first
            return Copied.WHOLE

        return job

    save_job = load_job

    def pin(self, mapping: HostMapping, is_over: Callable[[], bool]) -> None:
        return

    def let_go(self) -> None:
        return


def test_a_layer_that_ends_well_does_not_hide_one_that_failed(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "open_device", lambda _: TwoAtOnce())
    planned = plan_of(config, group(full(), layers=2), layout="LBHNC", num_blocks=13)
    region = Region(0, geometry_from_config(config, planned).rank_bytes(96))
    half = WorkerHalf(WorkerSettings(region, 96, layerwise=True), config, planned)
    half.register_kv_caches(tensors(planned))
    half.mapping = HostMapping.create(1, -(-region.block_bytes // 4096) * 4096, SERVER)
    half.start_load(StepPlan(SERVER, loads=[Load("request", 2, [4, 5, 6], [0], [0])]))
    half.collect()
    report = half.report()
    assert report is not None
    assert report.load_failed == {2}
    assert half.take_invalid_blocks() == {4, 5, 6}
    half.shutdown()
    half.mapping.close()
