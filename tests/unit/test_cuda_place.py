"""Where a GPU is, asked of a driver's library made of Python."""

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstrata.storage import numa
from kvstrata.transfer.cuda_place import numa_node, pci_address


def library(*, fails: bool = False) -> Any:
    """GPU n of this process is device n + 4 of the driver, at bus 0xB0 + n."""

    def address(text: Any, length: int, bus: int) -> int:
        written = f"0000:{bus:02X}:00.0".encode()
        assert len(written) < length
        text.value = written
        return int(fails)

    def get(device: Any, index: int) -> int:
        ctypes.cast(device, ctypes.POINTER(ctypes.c_int))[0] = index + 4
        return 0

    return SimpleNamespace(
        cuDeviceGet=get,
        cuDeviceGetPCIBusId=lambda text, n, device: address(text, n, 0xB0 + device.value - 4),
        hipDeviceGetPCIBusId=lambda text, n, index: address(text, n, 0xB0 + index),
    )


@pytest.mark.parametrize("is_rocm", [False, True])
def test_the_node_of_a_gpu_is_that_of_its_place_on_the_bus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_rocm: bool
) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name, mode: library())
    assert pci_address(1, is_rocm=is_rocm) == "0000:b1:00.0"
    monkeypatch.setattr(numa.node_of_pci, "__defaults__", (tmp_path,))
    (tmp_path / "0000:b1:00.0").mkdir()
    (tmp_path / "0000:b1:00.0" / "numa_node").write_text("1")
    assert numa_node(torch.device("cuda", 1), is_rocm=is_rocm) == 1
    assert numa_node(torch.device("cuda", 0), is_rocm=is_rocm) is None


def test_a_driver_that_does_not_tell_leaves_it_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name, mode: library(fails=True))
    assert pci_address(0, is_rocm=False) is None

    def missing(name: str, mode: int) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert numa_node(torch.device("cuda", 0), is_rocm=False) is None
