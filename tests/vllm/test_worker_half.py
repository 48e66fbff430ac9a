import logging
import pickle
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.vllm.plans import full, group, mla, model_folder, plan, tensors, vllm_config
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.geometry import geometry_from_config
from kvstrata.integration.vllm.metadata import NULL_BLOCK, Load, Save, StepPlan, WorkerReport
from kvstrata.integration.vllm.ranks import Region, SlotRegions
from kvstrata.integration.vllm.worker import WorkerHalf, WorkerSettings
from kvstrata.storage.mapping import HostMapping

SERVER = b"server"
NUM_BLOCKS, SLOTS, PER_SLOT, WORLD = 13, 4, 3, 2
TOKENS = 32 * PER_SLOT  # of a block of ours
TIMEOUT_SECONDS = 5.0
PATIENCE_SECONDS = 10.0  # only a broken worker takes that long


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class GatedCopier:
    """The real copier behind a gate that the test opens."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.device_block_bytes = inner.device_block_bytes
        self.entered = threading.Event()
        self.go = threading.Event()
        self.hold_from = 0  # calls before this one pass
        self.calls: list[tuple[str, list[int]]] = []

    def copy_to_host(self, device_blocks: list[int], rows: np.ndarray) -> None:
        self._pass("save", device_blocks)
        self.inner.copy_to_host(device_blocks, rows)

    def copy_to_device(self, device_blocks: list[int], rows: np.ndarray) -> None:
        self._pass("load", device_blocks)
        self.inner.copy_to_device(device_blocks, rows)

    def _pass(self, kind: str, device_blocks: list[int]) -> None:
        self.calls.append((kind, list(device_blocks)))
        if len(self.calls) <= self.hold_from:
            return
        self.entered.set()
        assert self.go.wait(PATIENCE_SECONDS)


class Rank:
    """One worker half with its paged tensors."""

    def __init__(
        self,
        config: VllmConfig,
        planned: KVCacheConfig,
        rank: int,
        clock: Clock,
        replicas: int = 1,
    ) -> None:
        registered = tensors(planned)
        geometry = geometry_from_config(config, planned)
        self.caches = {name: registered[name] for name in geometry.layers}
        regions = SlotRegions((geometry.rank_bytes(TOKENS),), WORLD, replicas)
        chosen = WorkerSettings(regions.of(0, rank), TOKENS, load_timeout_seconds=TIMEOUT_SECONDS)
        self.half = WorkerHalf(chosen, config, planned, clock=clock)
        self.half.register_kv_caches(self.caches)

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for cache in self.caches.values():
            raw = cache.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))

    def device_blocks(self) -> np.ndarray:
        """(NUM_BLOCKS, device_block_bytes), read through torch in layer order."""
        pages = [c.contiguous().view(torch.uint8).flatten(1) for c in self.caches.values()]
        rows: np.ndarray = torch.cat(pages, dim=1).numpy().copy()
        return rows

    def gate(self) -> GatedCopier:
        half: Any = self.half
        half._device.copiers = [GatedCopier(half._device.copiers[0])]
        return half._device.copiers[0]  # type: ignore[no-any-return]  # Any, to reach into the half

    def drain(self) -> tuple[set[str], set[str], WorkerReport]:
        """Everything that is reported until nothing is in flight."""
        half: Any = self.half
        received, failed, report = set[str](), set[str](), WorkerReport()
        give_up = time.monotonic() + PATIENCE_SECONDS
        while True:
            busy = bool(half._tasks_of)
            new_received, new_failed = self.half.collect()
            assert not received & new_received
            received |= new_received
            failed |= new_failed
            new_report = self.half.report()
            report = report.aggregate(new_report) if new_report else report
            if not busy:
                return received, failed, report
            assert time.monotonic() < give_up
            time.sleep(0.0005)  # the copies run on another thread


class Bench:
    def __init__(
        self, config: VllmConfig, *groups: KVCacheGroupSpec, layout: str, replicas: int = 1
    ) -> None:
        self.clock = Clock()
        planned = plan(config, *groups, layout=layout, num_blocks=NUM_BLOCKS)
        self.ranks = [Rank(config, planned, i, self.clock, replicas) for i in range(WORLD)]
        geometry = self.ranks[0].half.geometry
        self.row_bytes = geometry.groups[0].device_block_bytes
        self.mapping = HostMapping.create(SLOTS, geometry.slot_bytes(TOKENS, WORLD), SERVER)
        self.mapping.generations[:] = [10, 11, 12, 13]
        for rank in self.ranks:
            rank.half.mapping = self.mapping

    def host_rows(self, rank: int, slot: int, group: int = 0) -> np.ndarray:
        """(device blocks, their bytes) of a group in one rank's region, by the documented layout."""
        shapes = [
            (TOKENS // each.block_size, sum(each.page_bytes))
            for each in self.ranks[0].half.geometry.groups
        ]
        sizes = [blocks * block_bytes for blocks, block_bytes in shapes]
        start = rank * sum(sizes) + sum(sizes[:group])
        rows: np.ndarray = self.mapping.data[slot][start : start + sizes[group]]
        return rows.reshape(shapes[group])

    def close(self) -> None:
        for rank in self.ranks:
            rank.half.shutdown()
        self.mapping.close()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return vllm_config(model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture
def bench(config: VllmConfig) -> Iterator[Bench]:
    made = Bench(config, group(full(), layers=2), layout="LBHNC")
    yield made
    made.close()


@pytest.fixture
def rank(bench: Bench) -> Rank:
    return bench.ranks[0]


@pytest.fixture(
    scope="module",
    params=["LBHNC", "BLHNC", "mixed LBHNC", "mixed BLHNC", "mla"],
)
def any_layout(request: pytest.FixtureRequest, config: VllmConfig) -> Iterator[Bench]:
    mixed = {"a": full(), "b": full(head_size=16), "c": full()}
    made = {
        "LBHNC": lambda: Bench(config, group(full()), layout="LBHNC"),
        "BLHNC": lambda: Bench(config, group(full()), layout="BLHNC"),
        "mixed LBHNC": lambda: Bench(config, group(mixed), layout="LBHNC"),
        "mixed BLHNC": lambda: Bench(config, group(mixed), layout="BLHNC"),
        "mla": lambda: Bench(config, group(mla(), layers=3), layout="LBHNC"),
    }[request.param]()
    yield made
    made.close()


def load(task_id: int = 1, **changes: Any) -> Load:
    base: dict[str, Any] = {
        "request_id": f"r{task_id}",
        "device_blocks": [1, 2, 3],
        "slots": [0],
        "generations": [10],
    }
    return Load(task_id=task_id, **(base | changes))


def save(task_id: int = 1, **changes: Any) -> Save:
    base: dict[str, Any] = {"device_blocks": [1, 2, 3], "slots": [0], "generations": [10]}
    return Save(task_id=task_id, **(base | changes))


@st.composite
def copies(draw: st.DrawFn) -> dict[str, Any]:
    slots = draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True))
    blocks = st.permutations(range(1, NUM_BLOCKS))
    first_offset = draw(st.integers(0, PER_SLOT - 1))
    end = draw(st.integers((len(slots) - 1) * PER_SLOT + 1, len(slots) * PER_SLOT))
    return {
        "slots": slots,
        "saved": draw(blocks)[: len(slots) * PER_SLOT],
        "first_offset": first_offset,
        "loaded": draw(blocks)[: max(1, end - first_offset)],
        "seed": draw(st.integers(0, 1 << 30)),
    }


@settings(max_examples=25, deadline=None)
@given(case=copies())
def test_what_was_saved_is_loaded_byte_for_byte(any_layout: Bench, case: dict[str, Any]) -> None:
    bench, slots, first = any_layout, case["slots"], case["first_offset"]
    generations = [int(bench.mapping.generations[s]) for s in slots]
    bench.mapping.data[:] = 0xA5
    originals = []
    for i, rank in enumerate(bench.ranks):
        rank.fill(case["seed"] + i)
        originals.append(rank.device_blocks())
        rank.half.start_save(StepPlan(SERVER, saves=[Save(7, case["saved"], slots, generations)]))
        assert rank.drain() == (set(), set(), WorkerReport(saved={7: 1 << i}))
    for i, original in enumerate(originals):
        expected = original[case["saved"]].reshape(len(slots), PER_SLOT, -1)
        for slot, rows in zip(slots, expected, strict=True):
            assert np.array_equal(bench.host_rows(i, slot), rows)
    assert (bench.mapping.data[:, WORLD * PER_SLOT * bench.row_bytes :] == 0xA5).all()
    assert (np.delete(bench.mapping.data, slots, axis=0) == 0xA5).all()

    used = -(-(first + len(case["loaded"])) // PER_SLOT)
    for i, rank in enumerate(bench.ranks):
        rank.fill(case["seed"] + 100 + i)
        expected = rank.device_blocks()
        expected[case["loaded"]] = originals[i][case["saved"]][first:][: len(case["loaded"])]
        rest = used * PER_SLOT - first - len(case["loaded"])
        laid = [*[NULL_BLOCK] * first, *case["loaded"], *[NULL_BLOCK] * rest]
        asked = Load("r", 8, laid, slots[:used], generations[:used])
        rank.half.start_load(StepPlan(SERVER, loads=[asked]))
        assert rank.drain() == ({"r"}, set(), WorkerReport(load_done={8: 1 << i}))
        assert np.array_equal(rank.device_blocks(), expected)


def test_load_from_a_slot_with_a_new_owner_fails_and_writes_nothing(rank: Rank) -> None:
    rank.fill(1)
    before = rank.device_blocks()
    rank.half.start_load(StepPlan(SERVER, loads=[load(generations=[9])]))
    assert rank.drain() == ({"r1"}, {"r1"}, WorkerReport(load_done={1: 1}, load_failed={1}))
    assert np.array_equal(rank.device_blocks(), before)


@pytest.mark.parametrize("kind", ["load", "save"])
def test_slot_that_changes_hands_during_the_copy_fails_the_task(
    bench: Bench, rank: Rank, kind: str
) -> None:
    gate = rank.gate()
    if kind == "load":
        rank.half.start_load(StepPlan(SERVER, loads=[load()]))
        expected = WorkerReport(load_done={1: 1}, load_failed={1})
    else:
        rank.half.start_save(StepPlan(SERVER, saves=[save()]))
        expected = WorkerReport(saved={1: 1}, save_failed={1: 0})
    assert gate.entered.wait(PATIENCE_SECONDS)
    bench.mapping.generations[0] += 1
    gate.go.set()
    assert rank.drain()[2] == expected


def test_saves_of_an_idle_step_begin_without_wait_for_save_and_only_once(rank: Rank) -> None:
    """vLLM 0.30 has a step without a forward begin loads, and says nothing of saves."""
    plan = StepPlan(SERVER, saves=[save()], idle=True)
    rank.half.start_load(plan)
    rank.half.start_save(plan)  # as later versions say
    assert rank.drain()[2] == WorkerReport(saved={1: 1})


def test_saves_of_a_step_with_a_forward_wait_for_it(rank: Rank) -> None:
    plan = StepPlan(SERVER, saves=[save()])
    rank.half.start_load(plan)
    assert rank.drain()[2] == WorkerReport()
    rank.half.start_save(plan)
    assert rank.drain()[2] == WorkerReport(saved={1: 1})


def test_saves_of_a_step_without_wait_for_save_begin_with_the_next_one(rank: Rank) -> None:
    """As in all pipeline stages but the last where vLLM's first model runner drafts."""
    rank.half.begin_step(StepPlan(SERVER, saves=[save(1)]))
    assert rank.drain()[2] == WorkerReport()
    rank.half.begin_step(StepPlan(SERVER, saves=[save(2)]))
    assert rank.drain()[2] == WorkerReport(saved={1: 1})
    plan = StepPlan(SERVER, saves=[save(3)], idle=True)
    rank.half.begin_step(plan)
    rank.half.start_load(plan)
    rank.half.start_save(plan)
    assert rank.drain()[2] == WorkerReport(saved={2: 1, 3: 1})
    rank.half.begin_step(StepPlan(SERVER))
    assert rank.drain()[2] == WorkerReport()


def test_save_stops_at_the_first_slot_with_a_new_owner(bench: Bench, rank: Rank) -> None:
    rank.fill(1)
    wanted = save(device_blocks=list(range(1, 10)), slots=[0, 1, 2], generations=[10, 99, 12])
    rank.half.start_save(StepPlan(SERVER, saves=[wanted]))
    assert rank.drain()[2] == WorkerReport(saved={1: 1}, save_failed={1: 0})
    assert not bench.mapping.data[1:].any()


@pytest.mark.parametrize("mapped", [False, True])
def test_plan_of_another_server_fails_at_once(
    bench: Bench, rank: Rank, mapped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="kvstrata")
    rank.half.mapping = bench.mapping if mapped else None
    step = StepPlan(b"other", loads=[load(1)], saves=[save(2)])
    rank.half.start_load(step)
    rank.half.start_save(step)
    assert rank.half.collect() == ({"r1"}, {"r1"})
    assert rank.half.report() == WorkerReport({2: 1}, {2: 0}, {1: 1}, {1})
    assert rank.half.collect() == (set(), set())
    assert rank.half.report() is None
    lines = [(each.levelname, each.getMessage().split(":")[0]) for each in caplog.records]
    assert lines == [
        ("WARNING", "a load failed, its blocks are computed"),
        ("DEBUG", "task 1 of request r1 failed"),
        ("WARNING", "a save failed"),
        ("DEBUG", "task 2 of request None failed"),
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"device_blocks": []},
        {"device_blocks": [1, 2, 3, 4]},
        {"device_blocks": [NUM_BLOCKS]},
        {"device_blocks": [-1]},
        {"slots": [0, 1], "generations": [10, 11]},
        {"slots": [0], "generations": []},
        {"slots": [-1], "generations": [13]},
        {"slots": [SLOTS]},
        {"device_blocks": [NULL_BLOCK, 1, 2, 3]},
        {"slots": [], "generations": []},
    ],
    ids=str,
)
def test_impossible_load_fails_and_writes_nothing(rank: Rank, changes: dict[str, Any]) -> None:
    rank.fill(1)
    before = rank.device_blocks()
    rank.half.start_load(StepPlan(SERVER, loads=[load(**changes)]))
    assert rank.drain()[:2] == ({"r1"}, {"r1"})
    assert np.array_equal(rank.device_blocks(), before)


@pytest.mark.parametrize(
    "changes",
    [
        {"device_blocks": [1, 2]},
        {"device_blocks": [1, NULL_BLOCK, 3]},
        {"slots": []},
        {"slots": [-1], "generations": [13]},
    ],
    ids=str,
)
def test_impossible_save_fails_and_writes_nothing(
    bench: Bench, rank: Rank, changes: dict[str, Any]
) -> None:
    rank.fill(1)
    rank.half.start_save(StepPlan(SERVER, saves=[save(**changes)]))
    assert rank.drain()[2] == WorkerReport(saved={1: 1}, save_failed={1: 0})
    assert not bench.mapping.data.any()


def test_plan_before_the_caches_are_registered_fails(config: VllmConfig, bench: Bench) -> None:
    planned = plan(config, group(full(), layers=2), num_blocks=NUM_BLOCKS)
    half = WorkerHalf(WorkerSettings(Region(0, 1), 32 * PER_SLOT), config, planned)
    half.mapping = bench.mapping
    half.start_load(StepPlan(SERVER, loads=[load()]))
    assert half.collect() == ({"r1"}, {"r1"})
    half.shutdown()


def test_slots_too_small_for_all_ranks_fail(bench: Bench, rank: Rank) -> None:
    small = HostMapping.create(SLOTS, bench.mapping.slot_bytes - 4096, SERVER)
    rank.half.mapping = small
    rank.half.start_load(StepPlan(SERVER, loads=[load(generations=[0])]))
    assert rank.half.collect() == ({"r1"}, {"r1"})
    small.close()


def test_late_load_is_failed_only_once_its_copy_has_stopped(bench: Bench, rank: Rank) -> None:
    gate = rank.gate()
    laid = [1, 2, 3, 4, NULL_BLOCK, NULL_BLOCK]
    wanted = load(device_blocks=laid, slots=[0, 1], generations=[10, 11])
    rank.half.start_load(StepPlan(SERVER, loads=[wanted]))
    assert gate.entered.wait(PATIENCE_SECONDS)
    bench.clock.now += TIMEOUT_SECONDS
    assert rank.half.collect() == (set(), set())
    assert rank.half.report() is None
    gate.go.set()
    assert rank.drain() == ({"r1"}, {"r1"}, WorkerReport(load_done={1: 1}, load_given_up={1}))
    assert gate.calls == [("load", [1, 2, 3])]


@pytest.mark.parametrize("problem", ["stale", "error"])
def test_late_load_whose_copy_ends_in_doubt_is_not_only_late(
    bench: Bench, rank: Rank, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    def broken(device_blocks: list[int], rows: np.ndarray) -> None:
        raise OSError("no")

    gate = rank.gate()
    if problem == "error":
        monkeypatch.setattr(gate.inner, "copy_to_device", broken)
    wanted = load(device_blocks=[1, 2, 3, 4, 5, 6], slots=[0, 1], generations=[10, 11])
    rank.half.start_load(StepPlan(SERVER, loads=[wanted]))
    assert gate.entered.wait(PATIENCE_SECONDS)
    bench.clock.now += TIMEOUT_SECONDS
    rank.half.collect()
    bench.mapping.generations[0] += problem == "stale"
    gate.go.set()
    assert rank.drain() == ({"r1"}, {"r1"}, WorkerReport(load_done={1: 1}, load_failed={1}))


def test_load_that_never_began_is_failed_at_its_deadline(bench: Bench, rank: Rank) -> None:
    gate = rank.gate()
    rank.half.start_save(StepPlan(SERVER, saves=[save(1)]))
    assert gate.entered.wait(PATIENCE_SECONDS)
    rank.half.start_load(StepPlan(SERVER, loads=[load(2)]))
    bench.clock.now += TIMEOUT_SECONDS - 0.001
    assert rank.half.collect() == (set(), set())
    bench.clock.now += 0.001
    assert rank.half.collect() == ({"r2"}, {"r2"})
    gate.go.set()
    assert rank.drain()[2] == WorkerReport(saved={1: 1}, load_done={2: 1}, load_given_up={2})
    assert gate.calls == [("save", [1, 2, 3])]


def test_load_overtakes_the_pieces_of_a_large_save(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata.integration.vllm.pieces._SAVE_PIECE_BYTES", 1)
    gate = rank.gate()
    large = save(1, device_blocks=list(range(1, 10)), slots=[0, 1, 2], generations=[10, 11, 12])
    rank.half.start_save(StepPlan(SERVER, saves=[large]))
    assert gate.entered.wait(PATIENCE_SECONDS)
    wanted = load(2, device_blocks=[10, 11, 12], slots=[3], generations=[13])
    rank.half.start_load(StepPlan(SERVER, loads=[wanted]))
    gate.go.set()
    assert rank.drain()[2] == WorkerReport(saved={1: 1}, load_done={2: 1})
    assert gate.calls == [
        ("save", [1, 2, 3]),
        ("load", [10, 11, 12]),
        ("save", [4, 5, 6]),
        ("save", [7, 8, 9]),
    ]


def test_save_of_pieces_is_over_only_when_the_last_one_is(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata.integration.vllm.pieces._SAVE_PIECE_BYTES", 1)
    gate = rank.gate()
    gate.hold_from = 2
    large = save(1, device_blocks=list(range(1, 10)), slots=[0, 1, 2], generations=[10, 11, 12])
    rank.half.start_save(StepPlan(SERVER, saves=[large]))
    assert gate.entered.wait(PATIENCE_SECONDS)
    assert rank.half.collect() == (set(), set())
    assert rank.half.report() is None
    gate.go.set()
    assert rank.drain()[2] == WorkerReport(saved={1: 1})


def test_failed_piece_spares_the_ones_after_it(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.integration.vllm.pieces._SAVE_PIECE_BYTES", 1)
    gate = rank.gate()
    large = save(
        1, device_blocks=list(range(1, 13)), slots=[0, 1, 2, 3], generations=[9, 11, 12, 13]
    )
    rank.half.start_save(StepPlan(SERVER, saves=[large]))
    assert gate.entered.wait(PATIENCE_SECONDS)
    rank.half.collect()
    gate.go.set()
    assert rank.drain()[2] == WorkerReport(saved={1: 1}, save_failed={1: 0})
    assert gate.calls == [("save", [4, 5, 6])]


def test_pieces_before_the_one_that_failed_are_reported_as_copied(
    bench: Bench, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata.integration.vllm.pieces._SAVE_PIECE_BYTES", 1)
    rank.fill(1)
    large = save(
        1, device_blocks=list(range(1, 13)), slots=[0, 1, 2, 3], generations=[10, 11, 9, 13]
    )
    rank.half.start_save(StepPlan(SERVER, saves=[large]))
    assert rank.drain()[2] == WorkerReport(saved={1: 1}, save_failed={1: 2})
    assert bench.mapping.data[:2].any(axis=1).all()
    assert not bench.mapping.data[2].any()


def test_pieces_for_which_there_is_room_are_copied_and_reported(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata.integration.vllm.pieces._SAVE_PIECE_BYTES", 1)
    half: Any = rank.half
    half._lanes._limit = 3
    gate = rank.gate()
    large = save(
        1, device_blocks=list(range(1, 13)), slots=[0, 1, 2, 3], generations=[10, 11, 12, 13]
    )
    rank.half.start_save(StepPlan(SERVER, saves=[large]))
    gate.go.set()
    assert rank.drain()[2] == WorkerReport(saved={1: 1}, save_failed={1: 3})


def test_of_a_failed_save_counts_what_all_workers_have_copied() -> None:
    reports = [
        WorkerReport(saved={1: 1, 2: 1, 3: 1}, save_failed={1: 3, 2: 4}),
        WorkerReport(saved={1: 2, 2: 2, 3: 2}, save_failed={1: 2}),
        WorkerReport(saved={1: 4, 2: 4, 3: 4}, save_failed={2: 0}),
    ]
    one, two, three = reports
    assert one.aggregate(two).aggregate(three) == one.aggregate(three.aggregate(two))
    assert one.aggregate(two).aggregate(three) == WorkerReport(
        saved={1: 7, 2: 7, 3: 7}, save_failed={1: 2, 2: 0}
    )


def test_only_an_idle_step_waits_for_a_load(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    half: Any = rank.half
    waits: list[float] = []
    monkeypatch.setattr(half._lanes, "wait", waits.append)
    gate = rank.gate()
    rank.half.start_load(StepPlan(SERVER, idle=True))
    rank.half.collect()
    rank.half.start_load(StepPlan(SERVER, loads=[load()]))
    rank.half.collect()
    assert waits == []
    rank.half.start_load(StepPlan(SERVER, idle=True))
    rank.half.collect()
    assert waits == [pytest.approx(0.002)]
    gate.go.set()


def test_idle_wait_ends_with_the_load(rank: Rank) -> None:
    rank.half.start_load(StepPlan(SERVER, loads=[load()], idle=True))
    received = set[str]()
    for _ in range(100):
        received |= rank.half.collect()[0]
    assert received == {"r1"}


def test_loads_of_an_earlier_step_go_on_through_later_ones(rank: Rank) -> None:
    gate = rank.gate()
    rank.half.start_load(StepPlan(SERVER, loads=[load(1)]))
    assert gate.entered.wait(PATIENCE_SECONDS)
    other = load(2, device_blocks=[4, 5, 6], slots=[1], generations=[11])
    for plan_of_step in (StepPlan(SERVER), StepPlan(SERVER, loads=[other]), StepPlan(SERVER)):
        rank.half.start_load(plan_of_step)
        assert rank.half.collect() == (set(), set())
    gate.go.set()
    assert rank.drain() == ({"r1", "r2"}, set(), WorkerReport(load_done={1: 1, 2: 1}))


def test_shed_save_is_reported_as_failed(config: VllmConfig, rank: Rank) -> None:
    half: Any = rank.half
    half._lanes._limit = 1
    gate = rank.gate()
    rank.half.start_save(StepPlan(SERVER, saves=[save(1), save(2)]))
    rank.half.collect()
    assert rank.half.report() == WorkerReport(saved={2: 1}, save_failed={2: 0})
    gate.go.set()
    assert rank.drain()[2] == WorkerReport(saved={1: 1})


def test_plans_after_shutdown_fail(rank: Rank) -> None:
    rank.half.shutdown()
    rank.half.start_load(StepPlan(SERVER, loads=[load()]))
    assert rank.half.collect() == ({"r1"}, {"r1"})
    assert rank.half.report() == WorkerReport(load_done={1: 1}, load_given_up={1})


def test_task_keeps_the_mapping_it_began_with(bench: Bench, rank: Rank) -> None:
    rank.fill(1)
    gate = rank.gate()
    rank.half.start_save(StepPlan(SERVER, saves=[save()]))
    assert gate.entered.wait(PATIENCE_SECONDS)
    rank.half.mapping = None
    gate.go.set()
    assert rank.drain()[2] == WorkerReport(saved={1: 1})
    assert np.array_equal(bench.host_rows(0, 0), rank.device_blocks()[[1, 2, 3]])


def test_what_all_ranks_hold_is_saved_by_the_first_and_loaded_by_all(config: VllmConfig) -> None:
    bench = Bench(config, group(mla(), layers=2), layout="LBNHC", replicas=WORLD)
    first, second = bench.ranks
    for rank in bench.ranks:
        rank.fill(7)
    saved = first.device_blocks()[[1, 2, 3]]
    second.half.start_save(StepPlan(SERVER, saves=[save()]))
    assert second.drain()[2] == WorkerReport(saved={1: 2})
    assert not bench.mapping.data.any()
    first.half.start_save(StepPlan(SERVER, saves=[save()]))
    assert first.drain()[2] == WorkerReport(saved={1: 1})
    assert np.array_equal(bench.host_rows(0, 0), saved)
    assert not bench.host_rows(1, 0).any()
    for i, rank in enumerate(bench.ranks):
        rank.fill(8 + i)
        rank.half.start_load(StepPlan(SERVER, loads=[load()]))
        assert rank.drain()[:2] == ({"r1"}, set())
        assert np.array_equal(rank.device_blocks()[[1, 2, 3]], saved)
    bench.close()


def test_cache_of_another_device_is_refused(config: VllmConfig) -> None:
    planned = plan(config, group(full(), layers=2), num_blocks=NUM_BLOCKS)
    half = WorkerHalf(WorkerSettings(Region(0, 1), 32), config, planned)
    caches = {name: cache.to("meta") for name, cache in tensors(planned).items()}
    with pytest.raises(ConfigError):
        half.register_kv_caches(caches)
    half.shutdown()


def test_reports_of_all_workers_add_up() -> None:
    first = WorkerReport({1: 1, 2: 1}, {2: 0}, {3: 1}, set(), {3})
    second = WorkerReport({1: 2}, {}, {3: 2, 4: 2}, {4}, {5})
    assert first.aggregate(second) == WorkerReport({1: 3, 2: 1}, {2: 0}, {3: 3, 4: 2}, {4}, {3, 5})
    assert first.aggregate(first) == first
    assert first == WorkerReport({1: 1, 2: 1}, {2: 0}, {3: 1}, set(), {3})


def test_messages_survive_the_way_between_processes() -> None:
    step = StepPlan(SERVER, loads=[load()], saves=[save()], idle=True)
    assert pickle.loads(pickle.dumps(step)) == step
    report = WorkerReport({1: 1}, {1: 0}, {2: 1}, {2}, {3})
    assert pickle.loads(pickle.dumps(report)) == report


def test_a_block_takes_at_most_32_bytes_of_the_message_to_the_workers() -> None:
    """Of four device blocks, with numbers as they are in a large cache that has run for long."""

    def message(blocks: int) -> bytes:
        device = list(range(100_000, 100_000 + 4 * blocks))
        slots = list(range(200_000, 200_000 + blocks))
        generations = [1_000_000] * blocks
        loads = [Load("request", 7, device, slots, generations)]
        plan = StepPlan(SERVER, loads=loads, saves=[Save(8, device, slots, generations)])
        return pickle.dumps(plan, protocol=pickle.HIGHEST_PROTOCOL)

    few, many = len(message(1000)), len(message(2000))
    assert (many - few) / (2 * 1000) <= 32
    assert few - 2 * 1000 * 32 <= 1024
