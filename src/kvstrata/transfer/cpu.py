"""Copies where device memory is host memory: numpy byte views, one assignment per device block.

Byte views reach 84 to 100 % of memcpy at 64 KiB pages, torch indexing 9 to 27 %; numpy releases
the GIL while it copies.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from kvstrata.core.errors import ConfigError, InvariantViolated
from kvstrata.transfer.device import Bytes

__all__ = ["CpuPageCopier"]


class CpuPageCopier:
    """A ``DeviceCopier`` over the pages of an engine that computes on the CPU."""

    def __init__(self, pages: Sequence[Bytes]) -> None:
        """*pages*: per layer uint8 (num_blocks, page_bytes), each page contiguous."""
        if not pages or any(p.ndim != 2 or p.strides[1] != 1 for p in pages):
            raise ConfigError("pages must be (num_blocks, page_bytes) of uint8, each contiguous")
        if len({len(p) for p in pages}) != 1:
            raise ConfigError(f"layers of different length: {[len(p) for p in pages]} blocks")
        self._pages = tuple(pages)  # also keeps the memory of `_stacked` alive
        self._stacked = _stack(self._pages)
        self._num_blocks = len(pages[0])
        self.page_bytes = tuple(p.shape[1] for p in pages)
        ends = tuple(accumulate(self.page_bytes))
        self._spans = tuple(pairwise((0, *ends)))
        self.device_block_bytes = ends[-1]

    def copy_to_host(self, device_blocks: Sequence[int], rows: Bytes) -> None:
        self._check(device_blocks, rows)
        if self._stacked is not None:
            grid = rows.reshape(len(rows), len(self._pages), -1)
            for i, block in enumerate(device_blocks):
                grid[i] = self._stacked[:, block]
            return
        for row, block in zip(rows, device_blocks, strict=True):
            for page, (start, end) in zip(self._pages, self._spans, strict=True):
                row[start:end] = page[block]

    def copy_to_device(self, device_blocks: Sequence[int], rows: Bytes) -> None:
        self._check(device_blocks, rows)
        if self._stacked is not None:
            grid = rows.reshape(len(rows), len(self._pages), -1)
            for i, block in enumerate(device_blocks):
                self._stacked[:, block] = grid[i]
            return
        for row, block in zip(rows, device_blocks, strict=True):
            for page, (start, end) in zip(self._pages, self._spans, strict=True):
                page[block] = row[start:end]

    def _check(self, device_blocks: Sequence[int], rows: Bytes) -> None:
        if rows.shape != (expected := (len(device_blocks), self.device_block_bytes)):
            raise InvariantViolated(f"rows of shape {rows.shape}, expected {expected}")
        if not rows.flags.c_contiguous:  # reshape would copy to somewhere else
            raise InvariantViolated("rows are not contiguous")
        for block in device_blocks:
            if not 0 <= block < self._num_blocks:
                raise IndexError(f"device block {block} of {self._num_blocks}")


def _stack(pages: tuple[Bytes, ...]) -> Bytes | None:
    """One (layers, num_blocks, page_bytes) view, if the layers lie at a constant stride."""
    if len({(p.shape, p.strides) for p in pages}) != 1:
        return None
    addresses = [p.ctypes.data for p in pages]
    steps = {b - a for a, b in pairwise(addresses)} or {0}
    if len(steps) != 1:
        return None
    return np.lib.stride_tricks.as_strided(
        pages[0], (len(pages), *pages[0].shape), (steps.pop(), *pages[0].strides)
    )
