"""The checksum of the disk formats: XXH3-128, over payloads and over every fixed structure."""

from typing import Final

import xxhash

DIGEST_BYTES: Final = 16


StreamingDigest = xxhash.xxh3_128
"""``digest`` of data that comes in pieces: ``update(piece)``, then ``digest()``."""


def digest(data: bytes | memoryview) -> bytes:
    """XXH3-128 of *data*, 16 bytes, big-endian; releases the GIL while it runs."""
    return xxhash.xxh3_128_digest(data)


def seal(body: bytes) -> bytes:
    """*body* followed by its digest."""
    return body + digest(body)


def is_sealed(data: bytes | memoryview) -> bool:
    """Whether *data* ends with the digest of what precedes it."""
    return digest(data[:-DIGEST_BYTES]) == data[-DIGEST_BYTES:]
