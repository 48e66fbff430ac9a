"""The portable copies, and which device gets which: CPU tensors stand for those of any device."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.errors import ConfigError, InvariantViolated
from kvstrata.transfer.cpu import CpuPageCopier
from kvstrata.transfer.devices import NOW, PagewiseDevice, open_device
from kvstrata.transfer.torch_pages import DeviceSync, TorchPageCopier


def noise(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    blocks=st.permutations(range(5)),
    count=st.integers(0, 5),
    outermost=st.booleans(),
)
def test_it_copies_what_the_copier_of_the_cpu_copies(
    sizes: list[int], blocks: list[int], count: int, outermost: bool
) -> None:
    blocks = blocks[:count]
    if outermost:
        cache = noise(5, sum(sizes))
        pages = list(cache.split(sizes, dim=1))
    else:
        pages = [noise(5, size) for size in sizes]
    copier, oracle = TorchPageCopier(pages), CpuPageCopier([page.numpy() for page in pages])
    assert (copier.page_bytes, copier.device_block_bytes) == (tuple(sizes), sum(sizes))
    for layer in (None, *range(len(sizes))):
        rows = noise(count, sum(sizes)).numpy()
        expected = rows.copy()
        copier.copy_to_host(blocks, rows, layer)
        oracle.copy_to_host(blocks, expected, layer)
        assert np.array_equal(rows, expected)
        before = [page.clone() for page in pages]
        oracle.copy_to_device(blocks, ~rows, layer)
        after = [page.clone() for page in pages]
        for page, old in zip(pages, before, strict=True):
            page.copy_(old)
        copier.copy_to_device(blocks, ~rows, layer)
        assert all(map(torch.equal, pages, after))


def test_what_does_not_fit_is_refused() -> None:
    copier = TorchPageCopier([noise(4, 8)] * 2)
    with pytest.raises(IndexError, match="device block 4 of 4"):
        copier.copy_to_host([4], np.zeros((1, 16), np.uint8))
    with pytest.raises(InvariantViolated, match="expected"):
        copier.copy_to_device([0], np.zeros((1, 15), np.uint8))
    for pages in ([], [noise(4, 8), noise(3, 8)], [noise(4, 8).T]):
        with pytest.raises(ConfigError):
            TorchPageCopier(pages)


class Elsewhere:
    """A tensor on a device of which nothing is known here."""

    def __init__(self, tensor: torch.Tensor, kind: str) -> None:
        self._tensor = tensor
        self.device = torch.device(kind)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)

    def __len__(self) -> int:
        return len(self._tensor)


def test_an_unknown_device_gets_the_portable_copies_and_waits_for_the_engine() -> None:
    device: Any = open_device([[Elsewhere(noise(4, 8), "privateuseone")]])
    assert isinstance(device, PagewiseDevice)
    assert isinstance(device.copiers[0], TorchPageCopier)
    assert isinstance(device.fence(), DeviceSync)
    assert not device.copies_at_once


def test_the_cpu_has_its_own_and_waits_for_nothing() -> None:
    device: Any = open_device([[noise(4, 8)]])
    assert isinstance(device.copiers[0], CpuPageCopier)
    assert device.fence() is NOW
    assert device.copies_at_once


def test_a_device_is_waited_for_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    monkeypatch.setattr("torch.cpu.synchronize", waited.append)
    DeviceSync(torch.device("cpu")).wait()
    assert waited == [torch.device("cpu")]
    DeviceSync(torch.device("privateuseone")).wait()
