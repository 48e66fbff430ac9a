"""Tallies of what one call may do any amount of: bytes hashed, messages and their bytes."""

import contextlib
from collections.abc import Iterator
from typing import Any, Final
from unittest.mock import patch

import xxhash
from bench.operations.count import Sample
from blake3 import blake3

from kvstrata.core import keys
from kvstrata.server import protocol

__all__ = ["HASHED_BYTES", "MESSAGES", "MESSAGE_BYTES", "tallies"]

HASHED_BYTES: Final = "hashed bytes"
MESSAGES: Final = "messages"
MESSAGE_BYTES: Final = "message bytes"


@contextlib.contextmanager
def tallies(sample: Sample) -> Iterator[None]:
    """What goes into keys of blocks and checksums of the disk formats, and what is sent."""
    digest, encode = xxhash.xxh3_128_digest, protocol.encode

    class TalliedHash:
        def __init__(self, data: Any = b"", **options: Any) -> None:
            self._hash = blake3(**options)
            self.digest = self._hash.digest
            self.update(data)

        def update(self, data: Any) -> "TalliedHash":
            sample[HASHED_BYTES] += memoryview(data).nbytes
            self._hash.update(data)
            return self

    def tallied_digest(data: bytes | memoryview) -> bytes:
        sample[HASHED_BYTES] += memoryview(data).nbytes
        return digest(data)

    def tallied_encode(message: protocol.Request | protocol.Reply) -> bytes:
        frame = encode(message)
        sample.update({MESSAGES: 1, MESSAGE_BYTES: len(frame)})
        return frame

    with (
        patch.object(keys, "blake3", TalliedHash),
        patch.object(xxhash, "xxh3_128_digest", tallied_digest),
        patch.object(protocol, "encode", tallied_encode),
    ):
        yield
