"""The jobs of tests/gpu/test_jobs.py, on a CPU, and on a device whose streams take turns at random."""

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.device_jobs import JOBS, PATIENCE_SECONDS, Engine, cache, layers, layers_one_by_one
from tests.simulated_device import SimulatedDevice, SimulatedPins

from kvstrata.transfer import guarded, streamed
from kvstrata.transfer.descriptors import PagePlace, PagePlaces
from kvstrata.transfer.devices import PagedDevice, open_device
from kvstrata.transfer.guarded import Copied
from kvstrata.transfer.lanes import Handle, Lane, Lanes, Outcome
from kvstrata.transfer.streamed import StreamedDevice
from kvstrata.transfer.streams import CopyLimits

LIMITS = CopyLimits(chunk_bytes=2048, chunk_spans=5, patience_seconds=0.0)

Pages = Sequence[Sequence[torch.Tensor]]


class Cpu:
    device = torch.device("cpu")
    scale = 1

    def __init__(self, *, blocks_outermost: bool = False) -> None:
        self.blocks_outermost = blocks_outermost

    def open(self, pages: Pages) -> PagedDevice:
        return open_device(pages)

    def launch(self, work: Callable[[], object]) -> None:
        work()

    def delay(self) -> None:
        """It computes at once."""

    def finish(self) -> None:
        """It has."""


class Simulated:
    """Plain memory, and an order of its own for what is not waited for."""

    device = torch.device("cpu")
    scale = 1

    def __init__(self, seed: int, *, blocks_outermost: bool = False) -> None:
        self.blocks_outermost = blocks_outermost
        self._driver = SimulatedDevice(random.Random(seed).choice)

    def open(self, pages: Pages) -> PagedDevice:
        groups = [
            PagePlaces([PagePlace(p.data_ptr(), p.stride(0), p.shape[1]) for p in own], len(own[0]))
            for own in pages
        ]
        streams = self._driver.loads, self._driver.saves
        return StreamedDevice(self._driver, groups, streams, SimulatedPins(), LIMITS)

    def launch(self, work: Callable[[], object]) -> None:
        def run() -> None:
            work()

        self._driver.launch(run)

    def delay(self) -> None:
        """Its engine is late by chance."""

    def finish(self) -> None:
        self._driver.run_all()


@pytest.mark.parametrize("do", JOBS)
@pytest.mark.parametrize("make", [Cpu, *(partial(Simulated, seed) for seed in range(5))])
@pytest.mark.parametrize("blocks_outermost", [False, True])
def test_jobs(
    do: Callable[[Engine], None], make: Callable[..., Engine], blocks_outermost: bool
) -> None:
    do(make(blocks_outermost=blocks_outermost))


class Held:
    """What the engine is at before a load may begin, or go on: *until* one for each turn."""

    def __init__(self, *until: threading.Event) -> None:
        self.is_waited_for = threading.Event()
        self._until = deque(until)

    def wait(self) -> None:
        self.is_waited_for.set()
        assert self._until.popleft().wait(PATIENCE_SECONDS)

    def hold(self, stream: object) -> None:
        raise AssertionError("no stream waits for it")


@pytest.mark.parametrize(("make", "threads"), [(Cpu, 1), (partial(Simulated, 0), 4)])
def test_a_small_load_waits_for_no_more_than_a_turn_of_large_ones_that_have_all_threads(
    make: Callable[[], Engine], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (guarded, streamed):
        monkeypatch.setattr(module, "TURN_BYTES", 1)
    with cache(make()) as each:
        assert each.device.copy_threads == threads
        lanes = Lanes[Copied](threads=threads)
        both, is_over = threading.Event(), threading.Event()
        runs, large = each.runs(range(8), [0, 1]), []
        for _ in range(threads):
            held = Held(both, is_over)
            large.append(lanes.submit(each.device.load_job(each.slots, runs, held), Lane.LOAD))
            assert held.is_waited_for.wait(PATIENCE_SECONDS)
        ended: list[Outcome | None] = []

        class Begins:
            def wait(self) -> None:
                ended.extend(handle.outcome for handle in large)

            def hold(self, stream: object) -> None:
                raise AssertionError("no stream waits for it")

        job = each.device.load_job(each.slots, each.runs([20, 9, 13, 8], [2]), Begins())
        small = lanes.submit(job, Lane.LOAD)
        both.set()
        assert lanes.wait_for(small, PATIENCE_SECONDS)
        assert ended == [None] * threads
        assert np.array_equal(each.blocks([20, 9, 13, 8]), each.rows(2))
        is_over.set()
        for handle in large:
            assert lanes.wait_for(handle, PATIENCE_SECONDS)
        assert [handle.result for handle in (small, *large)] == [Copied.WHOLE] * (threads + 1)
        rows = np.concatenate([each.rows(0), each.rows(1)])
        assert np.array_equal(each.blocks(range(8)), rows)
        assert lanes.close(PATIENCE_SECONDS)


def test_a_load_whose_slot_changes_hands_while_others_have_their_turn_is_no_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streamed, "TURN_BYTES", 1)
    with cache(Simulated(0)) as each:
        handle = Handle[Copied](others=["another"])
        job = each.device.load_job(each.slots, each.runs(range(8), [0, 1]), each.device.fence())
        assert job(handle) is None
        each.mapping.generations[0] += 1
        assert job(handle) is Copied.STALE


def test_where_a_part_is_is_looked_up_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    rows = streamed.rows_of

    def counted(*arguments: Any) -> Any:
        asked.append(arguments)
        return rows(*arguments)

    monkeypatch.setattr(streamed, "rows_of", counted)
    layers(Simulated(0))
    assert len(asked) == 2  # parts, each of three layers
    layers_one_by_one(Simulated(0))
    assert len(asked) == 3  # and one whose layers are saved
