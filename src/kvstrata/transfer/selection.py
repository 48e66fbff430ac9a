"""Which way of copying a device gets, by how fast each has been on it."""

from collections.abc import Sequence
from typing import Final, NamedTuple

__all__ = ["Measured", "choose"]

# By which a kernel has to be faster: it takes multiprocessors from the engine. So nothing that could
# wait is copied by one: on an H200 saves by two of them made products of matrices 3 to 4 % slower.
_GAIN: Final = 1.3


class Measured(NamedTuple):
    """How fast one way has copied pieces of one size."""

    by_kernel: bool  # else by a copy engine
    is_load: bool
    piece_bytes: int
    bytes_per_second: float


def choose(measured: Sequence[Measured]) -> int:
    """Up to which size pieces of loads are copied by a kernel: 0 for none, and none of saves is.

    It is the largest size at which the kernel is clearly faster, at it and at all smaller ones. A
    size at which only one way has been measured gets the copy engine.

    >>> choose([Measured(True, True, 8192, 30.0), Measured(False, True, 8192, 20.0)])
    8192
    """
    rates = {(m.by_kernel, m.piece_bytes): m.bytes_per_second for m in measured if m.is_load}
    limit = 0
    for size in sorted({piece_bytes for _, piece_bytes in rates}):
        kernel, engine = rates.get((True, size), 0.0), rates.get((False, size), float("inf"))
        if kernel < engine * _GAIN:
            break
        limit = size
    return limit
