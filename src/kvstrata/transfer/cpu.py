"""Copies where device memory is host memory: views of pages, one assignment per device block.

An assignment costs as much as 3 to 8 KiB of copying, so it should move many pages.
``bench/copies.py`` compares with memcpy: 84 to 101 % at pages of 64 KiB, 72 to 97 % at 16 KiB.
Indexing of torch tensors reaches 9 to 27 %. numpy releases the GIL while it copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from kvstrata.core.errors import ConfigError, InvariantViolated
from kvstrata.core.layout import ElementType, KVCacheLayout
from kvstrata.transfer.device import Bytes

__all__ = ["CpuPageCopier", "pages_of"]

Pages = np.ndarray[Any, np.dtype[np.void]]


def pages_of(cache: Bytes, layout: KVCacheLayout, dtype: ElementType) -> list[Bytes]:
    """Views of the pages of a cache of *layout*, whose rows are then BLOCKWISE blocks.

    Args:
        cache: All of its bytes, shape (layout.total_bytes(dtype),), uint8.

    Returns:
        As few arrays as the layout allows, each (num_block, page_bytes).
    """
    if cache.shape != (total := (layout.total_bytes(dtype),)):
        raise ConfigError(f"a cache of shape {cache.shape} for a layout of {total} bytes")
    stride = layout.block_stride_bytes(dtype)
    return [
        np.lib.stride_tricks.as_strided(cache[start:], (layout.num_block, length), (stride, 1))
        for start, length in layout.spans(0, dtype)
    ]


class CpuPageCopier:
    """A ``DeviceCopier`` over the pages of an engine that computes on the CPU."""

    def __init__(self, pages: Sequence[Bytes]) -> None:
        """*pages*: per layer uint8 (num_blocks, page_bytes), each page contiguous.

        They need not be one for each layer: a row is a block's pages in the order of *pages*.
        """
        if not pages or any(p.ndim != 2 or p.strides[1] != 1 for p in pages):
            raise ConfigError("pages must be (num_blocks, page_bytes) of uint8, each contiguous")
        if len({len(p) for p in pages}) != 1:
            raise ConfigError(f"layers of different length: {[len(p) for p in pages]} blocks")
        self._num_blocks = len(pages[0])
        self.page_bytes = tuple(p.shape[1] for p in pages)
        self.device_block_bytes = sum(self.page_bytes)
        self._pages = tuple(pages)  # keeps the memory of `_runs` alive
        offsets = accumulate(self.page_bytes[:-1], initial=0)
        placed = list(zip(pages, offsets, strict=True))
        self._runs = min((_runs(placed, step) for step in (1, 2)), key=len)
        self._runs_of_layer = [[_run([page])] for page in placed]

    def copy_to_host(
        self, device_blocks: Sequence[int], rows: Bytes, layer: int | None = None
    ) -> None:
        ends = self._ends(device_blocks, rows, layer)
        for i, block in enumerate(device_blocks):
            for cache, row in ends:
                row[i] = cache[block]

    def copy_to_device(
        self, device_blocks: Sequence[int], rows: Bytes, layer: int | None = None
    ) -> None:
        ends = self._ends(device_blocks, rows, layer)
        for i, block in enumerate(device_blocks):
            for cache, row in ends:
                cache[block] = row[i]

    def _ends(
        self, device_blocks: Sequence[int], rows: Bytes, layer: int | None
    ) -> list[tuple[Pages, Pages]]:
        """What is copied for each device block and row: elements of the cache and of *rows*."""
        self._check(device_blocks, rows)
        if not device_blocks:  # and no bytes in which a layer could begin
            return []
        runs = self._runs if layer is None else self._runs_of_layer[layer]
        return [(run.cache, run.beside(rows)) for run in runs]

    def _check(self, device_blocks: Sequence[int], rows: Bytes) -> None:
        if rows.shape != (expected := (len(device_blocks), self.device_block_bytes)):
            raise InvariantViolated(f"rows of shape {rows.shape}, expected {expected}")
        if not rows.flags.c_contiguous:  # reshape would copy to somewhere else
            raise InvariantViolated("rows are not contiguous")
        for block in device_blocks:
            if not 0 <= block < self._num_blocks:
                raise IndexError(f"device block {block} of {self._num_blocks}")


@dataclass(frozen=True, slots=True)
class _Run:
    """Pages that one assignment copies: of one size, at a constant distance on either side.

    A page is one element. Between one-dimensional arrays of ascending addresses numpy copies
    without asking whether they overlap; where it asks, it takes other memory between the layers
    for a part of them, and copies to a temporary first.
    """

    cache: Pages  # (num_blocks, pages)
    offset_bytes: int  # of the first page in a row
    distance_bytes: int  # from page to page in a row

    def beside(self, rows: Bytes) -> Pages:
        """The same pages in *rows*: shape (rows, pages)."""
        blocks, row_bytes = rows.shape
        return np.ndarray(
            (blocks, self.cache.shape[1]),
            self.cache.dtype,
            rows,
            self.offset_bytes,
            (row_bytes, self.distance_bytes),
        )


def _runs(pages: Sequence[tuple[Bytes, int]], step: int) -> list[_Run]:
    """Pages and their offsets in a row as few runs, of each *step*-th page.

    With K and V apart, in an allocation for each layer, every second page is at the same distance.
    """
    runs = []
    for start in range(step):
        run: list[tuple[Bytes, int]] = []
        for page in pages[start::step]:
            if run and not _continues([*run, page]):
                runs.append(_run(run))
                run = []
            run.append(page)
        if run:
            runs.append(_run(run))
    return runs


def _continues(run: Sequence[tuple[Bytes, int]]) -> bool:
    """Whether the last page of *run* is like those before it, and as far from the one before it."""
    (page, _), (last, _) = run[-2:]
    distances = [
        (_address(b) - _address(a), offset_b - offset_a)
        for (a, offset_a), (b, offset_b) in (run[:2], run[-2:])
    ]
    return (page.shape, page.strides) == (last.shape, last.strides) and len({*distances}) == 1


def _run(pages: Sequence[tuple[Bytes, int]]) -> _Run:
    if _address(pages[0][0]) > _address(pages[-1][0]):
        pages = pages[::-1]
    (first, offset), (second, second_offset) = pages[0], pages[min(1, len(pages) - 1)]
    as_elements = first.view(np.dtype((np.void, first.shape[1])))
    return _Run(
        cache=np.lib.stride_tricks.as_strided(
            as_elements,
            (len(first), len(pages)),
            (first.strides[0], _address(second) - _address(first)),
        ),
        offset_bytes=offset,
        distance_bytes=second_offset - offset,
    )


def _address(array: Bytes) -> int:
    return int(array.ctypes.data)
