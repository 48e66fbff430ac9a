"""Which ways of copying a GPU gets, by what its driver has and says: of a driver made of Python."""

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.test_cuda_dma import STREAM, FakeDriver, address_of, copies, install

from kvstrata.transfer import cuda_ways
from kvstrata.transfer.cuda_dma import BatchCopy, LoopCopy
from kvstrata.transfer.cuda_ways import find_kernel, find_ways
from kvstrata.transfer.driver import DeviceFault

GPU = torch.device("cuda", 1)


KERNEL: Any = "the kernel"  # is not called here


@pytest.fixture
def fake() -> FakeDriver:
    return FakeDriver()


@pytest.fixture(autouse=True)
def library(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Any:
    """That of a driver with batches, of a GPU that knows host addresses; and triton is there."""

    def get(device: Any, index: int) -> int:
        ctypes.cast(device, ctypes.POINTER(ctypes.c_int))[0] = index + 4
        return 0

    def get_attribute(found: Any, attribute: int, device: Any) -> int:
        assert (attribute, device.value) == (91, 5)
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = made.knows_host_addresses
        return int(made.status)

    made = SimpleNamespace(
        cuMemcpyAsync=fake.loop,
        hipMemcpyAsync=fake.loop_of_rocm,
        cuDeviceGet=get,
        cuDeviceGetAttribute=get_attribute,
        knows_host_addresses=1,
        status=0,
    )
    monkeypatch.setattr("ctypes.CDLL", lambda name, mode: made)
    monkeypatch.setattr(cuda_ways, "find_kernel", lambda: KERNEL)
    install(monkeypatch, 0, address_of(fake.batch))
    return made


def test_a_gpu_of_cuda_has_all_of_them(fake: FakeDriver) -> None:
    ways = find_ways(GPU)
    assert isinstance(ways.batch, BatchCopy)
    assert (ways.dma, ways.kernel, ways.notes) == (ways.batch, KERNEL, ())
    source, target, spans = copies()
    source[24:40] = 0
    ways.single(*spans, STREAM)
    assert np.array_equal(target, source)
    assert fake.asked == [(length, STREAM) for length in (24, 8, 16)]


@pytest.mark.parametrize(("knows", "status"), [(0, 0), (1, 1)])
def test_host_addresses_that_are_not_the_gpus_own_are_given_to_plain_copies_alone(
    library: Any, knows: int, status: int
) -> None:
    """As under WSL; and where the driver does not tell, nobody knows."""
    library.knows_host_addresses, library.status = knows, status
    ways = find_ways(GPU)
    assert isinstance(ways.dma, LoopCopy)
    assert (ways.batch, ways.kernel) == (None, None)
    assert ways.notes[0].startswith("no kernel and no batches")


def test_of_rocm_there_are_plain_copies(monkeypatch: pytest.MonkeyPatch, fake: FakeDriver) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1")
    ways = find_ways(GPU)
    assert (ways.batch, ways.kernel, ways.notes) == (None, None, ("no kernel: not on ROCm",))
    source, target, spans = copies()
    source[24:40] = 0
    ways.dma(*spans, STREAM)
    assert np.array_equal(target, source)
    assert fake.asked == [(length, 4, STREAM) for length in (24, 8, 16)]


def test_without_batches_and_triton_single_copies_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, 500, 0)
    monkeypatch.setattr(cuda_ways, "find_kernel", lambda: None)
    ways = find_ways(GPU)
    assert (ways.dma, ways.batch, ways.kernel) == (ways.single_pinned, None, None)
    assert ways.notes == ("no kernel: triton is not installed",)


def test_the_kernel_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvstrata.transfer.cuda_triton", None)
    assert find_kernel() is None


@pytest.mark.parametrize("hip", [None, "7.1"])
def test_without_a_driver_there_is_none(monkeypatch: pytest.MonkeyPatch, hip: str | None) -> None:
    def missing(name: str, mode: int) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    monkeypatch.setattr(torch.version, "hip", hip)
    with pytest.raises(DeviceFault, match="cannot be loaded"):
        find_ways(GPU)
