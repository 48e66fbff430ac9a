"""What a remote engine keeps for a block: a header that proves it, then the bytes.

::

    "KVSREMO1" | value length u64 | key 48 | parent 48, zeros for none | XXH3-128 of the value
    XXH3-128 of all that precedes it
    value

little-endian; the header is ``HEADER_BYTES`` long. Remote engines cut values short, mix up keys and
keep what others have put there: nothing of theirs is believed that this header does not prove.
"""

import struct
from collections.abc import Callable
from typing import Final

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.types import Read, StoreKey
from kvstrata.storage.checksum import DIGEST_BYTES, StreamingDigest, digest, is_sealed, seal

MAGIC: Final = b"KVSREMO1"
_BODY: Final = struct.Struct("<8sQ48s48s16s")
HEADER_BYTES: Final = _BODY.size + DIGEST_BYTES


def header_of(key: StoreKey, parent: StoreKey | None, value: memoryview) -> bytes:
    """What precedes *value* in a remote engine."""
    return seal(_BODY.pack(MAGIC, value.nbytes, key, parent or b"", digest(value)))


def judge_header(
    header: bytes | bytearray | memoryview, key: StoreKey, stored_bytes: int, buffer_bytes: int
) -> Read:
    """What is known of *stored_bytes* under *key* once the first of them are read.

    *header* is the first ``HEADER_BYTES`` of them, or all if there are fewer. ``HIT``: a value of
    ``stored_bytes - HEADER_BYTES`` bytes follows, for ``judge_value``. ``CORRUPT``: it was written
    by a store of ours, and is damaged or cut short. ``FOREIGN``: it was not. Raises
    ``InvariantViolated`` if the value is whole and longer than *buffer_bytes*.
    """
    if bytes(header[: len(MAGIC)]) != MAGIC[: len(header)]:
        return Read.FOREIGN
    if len(header) < HEADER_BYTES or not is_sealed(memoryview(header)[:HEADER_BYTES]):
        return Read.CORRUPT
    _, value_bytes, found_key, _, _ = _BODY.unpack_from(header)
    if found_key != key or value_bytes != stored_bytes - HEADER_BYTES or value_bytes == 0:
        return Read.CORRUPT
    if value_bytes > buffer_bytes:
        raise InvariantViolated(f"a buffer of {buffer_bytes} bytes for a value of {value_bytes}")
    return Read.HIT


def judge_value(header: bytes | bytearray | memoryview, value: memoryview) -> Read:
    """``HIT`` if *value* is the one that *header*, which was judged a ``HIT``, belongs to."""
    return Read.HIT if digest(value) == _BODY.unpack_from(header)[-1] else Read.CORRUPT


class Proof:
    """``judge_value`` of a value that comes in pieces: each is read while it is in the cache."""

    def __init__(self, header: bytes | bytearray | memoryview) -> None:
        self._header = header
        self._digest = StreamingDigest()
        self.add: Callable[[memoryview], None] = self._digest.update

    def verdict(self) -> Read:
        expected = _BODY.unpack_from(self._header)[-1]
        return Read.HIT if self._digest.digest() == expected else Read.CORRUPT
