"""Copies that work wherever torch does: for devices that nothing better is known of.

They gather a run of pages on the device, then copy it in one piece through torch, and wait for the
whole device before and after. That is right on any device, and slow on a fast one.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from kvstrata.core.errors import ConfigError, InvariantViolated
from kvstrata.transfer.device import Bytes
from kvstrata.transfer.devices import PagewiseDevice

__all__ = ["DeviceSync", "TorchPageCopier", "open_device"]


class DeviceSync:
    """All that was launched on a device until it is waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        kind = getattr(torch, device.type, None)
        self._synchronize = getattr(kind, "synchronize", None)

    def wait(self) -> None:
        """Where torch cannot synchronize a device, its copies to the host wait by themselves."""
        if self._synchronize is not None:
            self._synchronize(self._device)

    def hold(self, stream: Any) -> None:
        """There is no stream that could wait."""
        self.wait()


class TorchPageCopier:
    """A ``DeviceCopier`` over tensors on any device."""

    def __init__(self, pages: Sequence[torch.Tensor]) -> None:
        """*pages*: per layer uint8 (num_blocks, page_bytes), each page contiguous."""
        if not pages or any(p.ndim != 2 or p.stride(1) != 1 for p in pages):
            raise ConfigError("pages must be (num_blocks, page_bytes) of uint8, each contiguous")
        if len({len(p) for p in pages}) != 1:
            raise ConfigError(f"layers of different length: {[len(p) for p in pages]} blocks")
        self.page_bytes = tuple(int(p.shape[1]) for p in pages)
        self.device_block_bytes = sum(self.page_bytes)
        self._pages = tuple(pages)
        self._offsets = tuple(accumulate(self.page_bytes, initial=0))
        self._sync = DeviceSync(pages[0].device)

    def copy_to_host(
        self, device_blocks: Sequence[int], rows: Bytes, layer: int | None = None
    ) -> None:
        index = self._index(device_blocks, rows)
        for page, part in self._parts(rows, layer):
            torch.from_numpy(part).copy_(page.index_select(0, index))

    def copy_to_device(
        self, device_blocks: Sequence[int], rows: Bytes, layer: int | None = None
    ) -> None:
        index = self._index(device_blocks, rows)
        for page, part in self._parts(rows, layer):
            page.index_copy_(0, index, torch.from_numpy(part).to(page.device))
        self._sync.wait()

    def _parts(self, rows: Bytes, layer: int | None) -> list[tuple[torch.Tensor, Any]]:
        """Each layer's pages, and where their bytes are in *rows*."""
        layers = range(len(self._pages)) if layer is None else [layer]
        return [(self._pages[n], rows[:, self._offsets[n] : self._offsets[n + 1]]) for n in layers]

    def _index(self, device_blocks: Sequence[int], rows: Bytes) -> torch.Tensor:
        if rows.shape != (expected := (len(device_blocks), self.device_block_bytes)):
            raise InvariantViolated(f"rows of shape {rows.shape}, expected {expected}")
        num_blocks = len(self._pages[0])
        for block in device_blocks:
            if not 0 <= block < num_blocks:
                raise IndexError(f"device block {block} of {num_blocks}")
        return torch.tensor(device_blocks, dtype=torch.int64, device=self._pages[0].device)


def open_device(pages: Sequence[Sequence[Any]]) -> PagewiseDevice:
    """*pages* as in ``kvstrata.transfer.devices.open_device``."""
    copiers = [TorchPageCopier(group) for group in pages]
    return PagewiseDevice(copiers, DeviceSync(pages[0][0].device))
