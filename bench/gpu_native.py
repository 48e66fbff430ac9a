"""vLLM's own batch copy, as its offloading connector uses it, beside ours: where vLLM is installed.

Of vLLM's the copy alone is timed; ours makes its lists of pieces, too, and checks its slots.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from bench.gpu import GEOMETRIES, Bed, compare, synchronize
from bench.gpu_rows import Row

from kvstrata.core.errors import InvariantViolated
from kvstrata.transfer.descriptors import HostRows, PagePlace, PagePlaces, Spans

__all__ = ["NativeCopy", "find_native", "rows"]


class NativeCopy(Protocol):
    """Copies pieces, and returns when they have arrived."""

    def __call__(
        self, sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, *, is_load: bool
    ) -> None: ...


def find_native(device: torch.device) -> NativeCopy | None:
    """vLLM's, if it is installed and has one for this device."""
    try:
        from vllm import _custom_ops as ops
        from vllm.v1.kv_offload.cpu import swap_blocks_triton as small
    except ImportError:
        return None
    if not hasattr(ops, "swap_blocks_batch"):
        return None
    stream: Any = torch.cuda.Stream(device)

    def copy(
        sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, *, is_load: bool
    ) -> None:
        call = _choose(ops.swap_blocks_batch, small, int(sizes.max()), is_load=is_load)
        with torch.cuda.stream(stream):
            call(sources, targets, sizes, is_src_access_order_any=is_load)
        stream.synchronize()

    return copy


def _choose(
    plain: Callable[..., None], small: Any, piece_bytes: int, *, is_load: bool
) -> Callable[..., None]:
    """By vLLM's own rule: a kernel for loads of small pages, else the copy engines."""
    if not is_load or torch.version.hip or piece_bytes >= small.THRESHOLD_BYTES or piece_bytes % 8:
        return plain
    return partial(
        small.swap_blocks_batch, bytes_per_chunk=min(1 << (piece_bytes - 1).bit_length(), 8192)
    )


def pieces(bed: Bed) -> Spans:
    """Of all blocks of *bed*, as vLLM would name them: never two blocks in one."""
    geometry = bed.geometry
    pages = bed.cache.unbind(1 if geometry.blocks_outermost else 0)
    places = PagePlaces(
        [PagePlace(page.data_ptr(), page.stride(0), page.shape[1]) for page in pages], len(pages[0])
    )
    blocks = np.array(bed.blocks, np.int64)
    slots, within = np.divmod(np.arange(len(blocks)), geometry.per_slot)
    start = int(bed.mapping.data.ctypes.data)
    addresses = start + slots * bed.mapping.slot_bytes + within * geometry.row_bytes
    return places.spans(blocks, HostRows(addresses, np.ones(len(blocks), np.bool_)))


def _copies(native: NativeCopy, spans: Spans) -> Callable[..., None]:
    host, cache, sizes = map(torch.from_numpy, (spans.host, spans.device, spans.lengths_bytes))

    def copy(*, is_load: bool) -> None:
        ends = (host, cache) if is_load else (cache, host)
        native(*ends, sizes, is_load=is_load)

    return copy


def _check(bed: Bed, theirs: Callable[..., None]) -> None:
    """What one has saved the other loads."""
    before = bed.cache.clone()
    for saver, loader in ((theirs, bed.copy), (bed.copy, theirs)):
        bed.mapping.data[:] = 0xAA
        synchronize(bed.cache.device)
        saver(is_load=False)
        bed.cache.fill_(0x55)
        synchronize(bed.cache.device)
        loader(is_load=True)
        if not torch.equal(bed.cache, before):
            raise InvariantViolated(f"{bed.geometry.name}: vLLM's copies are not ours")


def rows(device: torch.device, native: NativeCopy, total_bytes: int) -> Iterator[Row]:
    for geometry in GEOMETRIES:
        with closing(Bed(geometry, device, total_bytes)) as bed:
            theirs = _copies(native, pieces(bed))
            _check(bed, theirs)
            for is_load in (True, False):
                ratio, seconds = compare(
                    partial(bed.copy, is_load=is_load), partial(theirs, is_load=is_load), device
                )
                kind = "load" if is_load else "save"
                what = f"{kind}, {geometry.name}: speed over vLLM's batch copy"
                rate = f"{bed.total_bytes / seconds / 2**30:.1f} GiB/s"
                note = "; ".join([rate, *bed.remarks(is_load=is_load)])
                yield Row(what, ratio, None, note=note)
