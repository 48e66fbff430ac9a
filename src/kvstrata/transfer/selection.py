"""Which way of copying a device gets, by how fast each has been on it."""

from collections.abc import Sequence
from typing import Final, NamedTuple

__all__ = ["Choice", "Measured", "choose"]

_GAIN: Final = 1.3  # by which a kernel has to be faster: it takes multiprocessors from the engine


class Measured(NamedTuple):
    """How fast one way has copied pieces of one size."""

    by_kernel: bool  # else by a copy engine
    is_load: bool
    piece_bytes: int
    bytes_per_second: float


class Choice(NamedTuple):
    """Pieces of at most so many bytes are copied by a kernel, all others by a copy engine."""

    load_bytes: int = 0
    save_bytes: int = 0


def choose(measured: Sequence[Measured]) -> Choice:
    """A kernel up to the largest size at which it is clearly faster, and at all smaller ones.

    A size at which only one way has been measured gets the copy engine.

    >>> load = [Measured(True, True, 8192, 30.0), Measured(False, True, 8192, 20.0)]
    >>> choose(load)
    Choice(load_bytes=8192, save_bytes=0)
    """
    return Choice(_limit(measured, is_load=True), _limit(measured, is_load=False))


def _limit(measured: Sequence[Measured], *, is_load: bool) -> int:
    rates = {
        (m.by_kernel, m.piece_bytes): m.bytes_per_second for m in measured if m.is_load is is_load
    }
    limit = 0
    for size in sorted({piece_bytes for _, piece_bytes in rates}):
        kernel, engine = rates.get((True, size), 0.0), rates.get((False, size), float("inf"))
        if kernel < engine * _GAIN:
            break
        limit = size
    return limit
