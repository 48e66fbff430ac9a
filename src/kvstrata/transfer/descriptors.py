"""Device blocks and host rows → addresses and lengths, for devices that copy many pieces at a time.

Pages that lie side by side on both sides are one span: all layers of a block where blocks are
outermost (vLLM's BLHNC and BLNHC), and there a run of neighbouring blocks, too. Where layers are
outermost, a page is a span. ``bench/descriptors.py`` measures what a page costs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import ConfigError, InvariantViolated

__all__ = ["HostRows", "Numbers", "PagePlace", "PagePlaces", "Spans", "chunks"]

Numbers = NDArray[np.int64]


class Spans(NamedTuple):
    """Pieces of contiguous bytes, to be copied in any order: int64 arrays of one length."""

    device: Numbers  # addresses
    host: Numbers  # addresses
    lengths_bytes: Numbers

    @property
    def total_bytes(self) -> int:
        return int(self.lengths_bytes.sum())


class HostRows(NamedTuple):
    """Addresses of rows, a row for each device block."""

    addresses: Numbers  # (rows,)
    begins: NDArray[np.bool_]  # (rows,): not to be copied in one piece with the row before it


@dataclass(frozen=True, slots=True)
class PagePlace:
    """Where the pages of one layer are in the memory of a device."""

    address: int  # of the page of block 0
    stride_bytes: int  # from block to block
    page_bytes: int


class PagePlaces:
    """Where the pages of one KV cache group are: a row is one page of each layer, in order."""

    def __init__(self, pages: Sequence[PagePlace], num_blocks: int) -> None:
        if not pages or any(p.page_bytes < 1 for p in pages):
            raise ConfigError("a device block needs a page of at least one byte")
        self.num_blocks = num_blocks
        self.page_bytes = tuple(page.page_bytes for page in pages)
        self.device_block_bytes = sum(self.page_bytes)
        self._whole = _Segments(pages, 0)
        offsets = accumulate(self.page_bytes[:-1], initial=0)
        self._layers = [_Segments([page], at) for page, at in zip(pages, offsets, strict=True)]

    def spans(
        self,
        device_blocks: Numbers,
        rows: HostRows,
        layer: int | None = None,
    ) -> Spans:
        """What is copied between each device block and its row, or of one layer of them.

        Raises ``IndexError`` if a block is not of this cache.
        """
        if device_blocks.shape != rows.addresses.shape or device_blocks.shape != rows.begins.shape:
            raise InvariantViolated(f"{len(rows.addresses)} rows for {len(device_blocks)} blocks")
        if len(device_blocks) and not (
            device_blocks.min() >= 0 and device_blocks.max() < self.num_blocks
        ):
            raise IndexError(f"device blocks {device_blocks} of {self.num_blocks}")
        segments = self._whole if layer is None else self._layers[layer]
        if segments.is_dense and layer is None:
            return segments.joined(device_blocks, rows)
        return segments.spans(device_blocks, rows.addresses)


class _Segments:
    """Pages of a block in as few contiguous pieces as there can be."""

    def __init__(self, pages: Sequence[PagePlace], offset_bytes: int) -> None:
        """*offset_bytes*: where in a row the first of *pages* begins."""
        pieces: list[tuple[int, int, int, int]] = []  # address, stride, offset, length
        for page in pages:
            if pieces and _follows(page, pieces[-1]):
                address, stride, offset, length = pieces.pop()
                pieces.append((address, stride, offset, length + page.page_bytes))
            else:
                pieces.append((page.address, page.stride_bytes, offset_bytes, page.page_bytes))
            offset_bytes += page.page_bytes
        columns = np.array(pieces, np.int64).T
        self._addresses, self._strides, self._offsets, self._lengths = columns
        self.row_bytes = int(self._lengths.sum())
        # A block is one piece, and the next block follows it.
        self.is_dense = len(pieces) == 1 and self.row_bytes == pieces[0][1]

    def spans(self, blocks: Numbers, rows: Numbers) -> Spans:
        """A span for each piece of each block, those of a block one after the other."""
        shape = (len(blocks), len(self._lengths))
        device = np.multiply(blocks[:, None], self._strides)
        device += self._addresses
        lengths = np.empty(shape, np.int64)
        lengths[:] = self._lengths
        host = np.add(rows[:, None], self._offsets)
        return Spans(device.reshape(-1), host.reshape(-1), lengths.reshape(-1))

    def joined(self, blocks: Numbers, rows: HostRows) -> Spans:
        """A span for each run of blocks that follow each other on both sides."""
        each = self.spans(blocks, rows.addresses)
        if len(blocks) < 2:
            return each
        begins = rows.begins.copy()
        begins[0] = True
        begins[1:] |= each.device[1:] - each.device[:-1] != self.row_bytes
        begins[1:] |= each.host[1:] - each.host[:-1] != self.row_bytes
        first = np.flatnonzero(begins)
        lengths = np.diff(first, append=len(blocks)) * self.row_bytes
        return Spans(each.device[first], each.host[first], lengths)


def _follows(page: PagePlace, piece: tuple[int, int, int, int]) -> bool:
    address, stride, _, length = piece
    return (page.address, page.stride_bytes) == (address + length, stride)


def chunks(spans: Spans, most_bytes: int, most_spans: int) -> Iterator[Spans]:
    """*spans* in order, in parts of limited size.

    Spans that are longer than a part are split, and their pieces fill parts, but no others are.
    """
    device, host, lengths = spans
    ends = lengths.cumsum()
    longest, count = int(lengths.max(initial=0)), len(ends)
    first, skipped_bytes, done_bytes = 0, 0, 0  # of the first span, and in all
    while first < count:
        if longest <= most_bytes:
            end = int(ends.searchsorted(done_bytes + most_bytes, "right"))
            end = min(end, first + most_spans)
            yield Spans(device[first:end], host[first:end], lengths[first:end])
            first, done_bytes = end, int(ends[end - 1])
            continue
        stop = done_bytes + most_bytes
        end = min(int(ends.searchsorted(stop)) + 1, first + most_spans, count)
        if ends[end - 1] > stop and lengths[end - 1] <= most_bytes:
            end -= 1
        rest_bytes = max(0, int(ends[end - 1]) - stop)
        part = Spans(device[first:end].copy(), host[first:end].copy(), lengths[first:end].copy())
        part.device[0] += skipped_bytes
        part.host[0] += skipped_bytes
        part.lengths_bytes[0] -= skipped_bytes
        part.lengths_bytes[-1] -= rest_bytes
        yield part
        done_bytes = int(ends[end - 1]) - rest_bytes
        first = end - 1 if rest_bytes else end
        skipped_bytes = int(lengths[first]) - rest_bytes if rest_bytes else 0
