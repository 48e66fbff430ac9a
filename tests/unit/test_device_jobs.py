"""The jobs of tests/gpu/test_jobs.py, on a CPU, and on a device whose streams take turns at random."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from tests.device_jobs import JOBS, Engine, layers
from tests.simulated_device import SimulatedDevice, SimulatedPins

from kvstrata.transfer import streamed
from kvstrata.transfer.descriptors import PagePlace, PagePlaces
from kvstrata.transfer.devices import PagedDevice, open_device
from kvstrata.transfer.streamed import StreamedDevice
from kvstrata.transfer.streams import CopyLimits

LIMITS = CopyLimits(chunk_bytes=2048, chunk_spans=5, patience_seconds=0.0)

Pages = Sequence[Sequence[torch.Tensor]]


class Cpu:
    device = torch.device("cpu")
    scale = 1

    def __init__(self, *, blocks_outermost: bool) -> None:
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

    def __init__(self, seed: int, *, blocks_outermost: bool) -> None:
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


def test_where_a_part_is_is_looked_up_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    rows = streamed._rows

    def counted(*arguments: Any) -> Any:
        asked.append(arguments)
        return rows(*arguments)

    monkeypatch.setattr(streamed, "_rows", counted)
    layers(Simulated(0, blocks_outermost=False))
    assert len(asked) == 2  # parts, each of three layers
