"""The CRC-32 of many records in a few passes: what a journal of a million records needs to open.

A CRC is linear: that of the whole file follows from those that its records claim to have, in a
tree of exclusive ors. If it is the one that the file has, which costs one pass at the speed of
zlib, every claim is right, as certainly as one CRC-32 can tell.
"""

import zlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["all_right"]

Crcs = NDArray[np.uint32]

_BITS: Final = 32
_CRC_BYTES: Final = 4
_IDENTITY: Final = np.uint32(1) << np.arange(_BITS, dtype=np.uint32)


def all_right(records: memoryview, record_bytes: int) -> bool:
    """Whether each record begins with the CRC-32 of the rest of it, little-endian."""
    claimed = np.frombuffer(records, "<u4")[:: record_bytes // _CRC_BYTES]
    # The CRC of a record, should its claim be right: that of the claim's own bytes, and the claim.
    rest = _appended(record_bytes - _CRC_BYTES)
    claim = _apply(rest, _appended(_CRC_BYTES)) ^ _IDENTITY
    of_zero = _apply(rest, np.array([zlib.crc32(bytes(_CRC_BYTES))], np.uint32))
    whole = _apply(claim, claimed) ^ of_zero
    operator = _appended(record_bytes)
    while len(whole) > 1:
        if len(whole) % 2:
            whole = np.concatenate((np.zeros(1, np.uint32), whole))
        whole = _apply(operator, whole[0::2]) ^ whole[1::2]
        operator = _apply(operator, operator)
    return not len(whole) or int(whole[0]) == zlib.crc32(records)


def _appended(length_bytes: int) -> Crcs:
    """What *length_bytes* more zeros do to a CRC: to each of its bits, the rest being linear."""
    zeros = bytes(length_bytes)
    nothing = zlib.crc32(zeros)
    return np.array([zlib.crc32(zeros, 1 << bit) ^ nothing for bit in range(_BITS)], np.uint32)


def _apply(operator: Crcs, crcs: Crcs) -> Crcs:
    """*operator* to each of *crcs*, by tables of what it does to each value of each byte."""
    found = np.zeros(len(crcs), np.uint32)
    values = np.arange(256)
    columns = np.ascontiguousarray(crcs, "<u4").view(np.uint8).reshape(-1, _CRC_BYTES)
    for byte in range(_CRC_BYTES):
        table = np.zeros(256, np.uint32)
        for bit in range(8):
            table[values >> bit & 1 == 1] ^= operator[8 * byte + bit]
        found ^= table[columns[:, byte]]
    return found
