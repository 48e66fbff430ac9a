"""Copies by a kernel: programs that move pages between pinned host memory and a GPU's own.

A copy engine takes about a microsecond to begin a page; programs on a few multiprocessors begin
many at once. So small pages may come faster this way, at the price of those multiprocessors.
"""

from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl

from kvstrata.transfer.descriptors import Numbers

__all__ = ["PROGRAMS", "copy_by_kernel", "widest_word"]

PROGRAMS: Final = 1
"""Programs of one copy, each of which takes a multiprocessor: two while a load and a save run."""

_WARPS: Final = 32
_STEP_BYTES: Final = 1 << 16  # of a program at a time, in words of 8: what hides the link's latency


# Specialised on these it would be compiled anew while an engine serves.
@triton.jit(
    do_not_specialize=["jobs"],
    do_not_specialize_on_alignment=["sources", "targets", "lengths"],
)
def _copy(
    sources, targets, lengths, jobs, WORD: tl.constexpr, BYTES: tl.constexpr, STEP: tl.constexpr
):
    """Span ``job``: ``lengths[job]`` bytes, a multiple of BYTES, that of a WORD."""
    lane = tl.arange(0, STEP)
    for job in range(tl.program_id(0), jobs, tl.num_programs(0)):
        source = tl.load(sources + job).to(tl.pointer_type(WORD))
        target = tl.load(targets + job).to(tl.pointer_type(WORD))
        words = tl.load(lengths + job) // BYTES
        for first in range(0, words, STEP):
            inside = first + lane < words
            tl.store(target + first + lane, tl.load(source + first + lane, inside), inside)


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


def copy_by_kernel(
    targets: Numbers, sources: Numbers, lengths: Numbers, device: torch.device
) -> None:
    """Copy on the current stream; every address must be one that *device* reaches by itself."""
    word = widest_word(sources, targets, lengths)
    jobs = len(lengths)
    # From memory that is not pinned it would be taken once the stream has come so far, and not
    # before this returns. torch uses pinned memory anew when what it was copied for has happened.
    columns = torch.empty((3, jobs), dtype=torch.int64, pin_memory=device.type != "cpu")
    np.stack([sources, targets, lengths], out=columns.numpy())
    on_device = columns.to(device, non_blocking=True)
    _copy[(min(PROGRAMS, jobs),)](
        *on_device,
        jobs,
        WORD=_WORDS[word],
        BYTES=word,
        STEP=_STEP_BYTES // 8,  # as many narrower words: more would not fit into registers
        num_warps=_WARPS,
        enable_fp_fusion=True,
    )
