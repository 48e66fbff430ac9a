"""Copies by a kernel: programs that move pages between pinned host memory and a GPU's own.

CUDA's driver copies pages of less than 64 KiB to a GPU by way of the processor, one after the other.
Programs on a few multiprocessors read many at once, at the price of those multiprocessors.
"""

from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from kvstrata.transfer.descriptors import Numbers

__all__ = ["PROGRAMS", "copy_by_kernel", "in_pieces", "widest_word"]

PROGRAMS: Final = 3
"""Programs of a load, each of which takes a multiprocessor.

On an H200 three bring two thirds of the link for pages of 18 KiB, two half of it, and four no more
than three.
"""

_WARPS: Final = 32
_ROW_WORDS: Final = 256  # of a piece: 2 KiB in words of 8 bytes, of which a page is a few
_ROWS: Final = 32  # of a program at a time: as much on its way as hides the link's latency


# Specialised on these it would be compiled anew while an engine serves.
@triton.jit(
    do_not_specialize=["pieces", "rows_each"],
    do_not_specialize_on_alignment=["sources", "targets", "lengths"],
)
def _copy(
    sources,
    targets,
    lengths,
    pieces,
    rows_each,
    WORD: tl.constexpr,
    BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
):
    """Piece ``i``: ``lengths[i]`` bytes, a multiple of BYTES, that of a WORD, in *rows_each* rows."""
    word = tl.arange(0, ROW_WORDS)[None, :]
    for first in range(tl.program_id(0) * ROWS, pieces * rows_each, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        piece = row // rows_each
        is_piece = piece < pieces
        source = tl.load(sources + piece, is_piece, 0).to(tl.pointer_type(WORD))[:, None]
        target = tl.load(targets + piece, is_piece, 0).to(tl.pointer_type(WORD))[:, None]
        words = (tl.load(lengths + piece, is_piece, 0) // BYTES)[:, None]
        at = (row % rows_each * ROW_WORDS)[:, None] + word
        tl.store(target + at, tl.load(source + at, at < words), at < words)


_WORDS: Final = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


def widest_word(*columns: Numbers) -> int:
    """The most bytes, up to 8, that divide every number of *columns*.

    >>> widest_word(np.array([16, 24]), np.array([8])), widest_word(np.array([16, 6]))
    (8, 2)
    """
    bits = 8
    for column in columns:
        bits |= int(np.bitwise_or.reduce(column, initial=0))
    return bits & -bits


def in_pieces(
    sources: Numbers, targets: Numbers, lengths: Numbers, most_bytes: int
) -> NDArray[np.int64]:
    """The same spans in pieces of at most so many bytes, as columns: (3, pieces).

    >>> in_pieces(np.array([0]), np.array([100]), np.array([5]), 4).tolist()
    [[0, 4], [100, 104], [4, 1]]
    """
    if lengths.max() <= most_bytes:
        return np.stack([sources, targets, lengths])
    counts = -(-lengths // most_bytes)
    span = np.repeat(np.arange(len(lengths)), counts)
    offsets = (np.arange(len(span)) - (counts.cumsum() - counts)[span]) * most_bytes
    left = np.minimum(lengths[span] - offsets, most_bytes)
    return np.stack([sources[span] + offsets, targets[span] + offsets, left])


def copy_by_kernel(
    targets: Numbers, sources: Numbers, lengths: Numbers, device: torch.device
) -> None:
    """Copy on the current stream; every address must be one that *device* reaches by itself."""
    word = widest_word(sources, targets, lengths)
    row_bytes = _ROW_WORDS * word
    # All have the rows of the longest, which so is not much longer than the others.
    rows_each = -(-min(int(lengths.max()), 2 * int(lengths.mean())) // row_bytes)
    pieces = in_pieces(sources, targets, lengths, rows_each * row_bytes)
    # From memory that is not pinned it would be taken once the stream has come so far, and not
    # before this returns. torch uses pinned memory anew when what it was copied for has happened.
    columns = torch.empty(pieces.shape, dtype=torch.int64, pin_memory=device.type != "cpu")
    columns.numpy()[:] = pieces
    on_device = columns.to(device, non_blocking=True)
    count = pieces.shape[1]
    _copy[(min(PROGRAMS, -(-count * rows_each // _ROWS)),)](
        *on_device,
        count,
        rows_each,
        WORD=_WORDS[word],
        BYTES=word,
        ROWS=_ROWS,
        ROW_WORDS=_ROW_WORDS,
        num_warps=_WARPS,
        enable_fp_fusion=True,
    )
