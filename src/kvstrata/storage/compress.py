"""Lossless compression: the bytes of each element apart, then zstd.

A frame is a header, the payload and the digest of both::

    "KVZ1" | method u8 | element_bytes u8 | 0 u16 | value length u32 | payload length u32
    payload
    XXH3-128 of all that precedes it

little-endian. Method 0 is the value as it is, method 1 zstd of its *byte planes*: the first byte
of every element, then every second one, and so on, then what does not fill an element. In bf16
the byte with the sign and most of the exponent has few values; the one with the mantissa is noise.
Each plane has zstd blocks, and so a code, of its own.
"""

import importlib
import struct
import threading
from typing import Any, Final

import numpy as np

from kvstrata.core.errors import ConfigError, InvariantViolated
from kvstrata.storage.checksum import DIGEST_BYTES, digest, is_sealed
from kvstrata.storage.coded import CodedStore
from kvstrata.storage.store import Store

_MAGIC: Final = b"KVZ1"
_HEADER: Final = struct.Struct("<4sBBHII")
_AS_IT_IS: Final = 0
_ZSTD_OF_PLANES: Final = 1

# Numbers hardly ever repeat in runs: what a plane gives is uneven frequencies. Long matches only,
# and a small table to find them, are faster than plain level 1 and find no false ones.
_MOSTLY_ENTROPY: Final = {
    "compression_level": 1,
    "min_match": 7,
    "hash_log": 6,
    "window_log": 17,
}

FRAME_OVERHEAD_BYTES: Final = _HEADER.size + DIGEST_BYTES
"""By how much the blocks of the inner store must be longer than those of a compressed one."""


class CompressedStore(CodedStore):
    """Keeps blocks compressed in *inner*, a variable store, without loss.

    Blocks are ``FRAME_OVERHEAD_BYTES`` shorter than those of *inner*. *element_bytes* is the size
    of one KV element (2 for bf16); with another value blocks are right too, and larger. A block
    that does not shrink is kept as it is. Frames say how they were made: stores with another
    *element_bytes* read each other's.

    Raises ``ConfigError`` if *inner* has a fixed block size or zstandard is not installed.
    """

    def __init__(self, inner: Store, element_bytes: int) -> None:
        size = inner.statistics()
        if not size.variable:
            raise ConfigError(
                f"a store of fixed blocks of {size.block_bytes} bytes cannot hold shorter ones",
                hint="compress in front of a shared file system or a remote store",
            )
        if not 1 <= element_bytes <= 8:
            raise ConfigError(f"elements of {element_bytes} bytes cannot be", hint="1 to 8 can")
        super().__init__(inner, block_bytes=size.block_bytes - FRAME_OVERHEAD_BYTES, variable=True)
        self._element_bytes = element_bytes
        self._zstd = _zstandard()
        self._of_thread = threading.local()  # zstd contexts serve one thread

    def _encode(self, block: memoryview, frame: memoryview) -> int:
        method = _ZSTD_OF_PLANES
        payload: bytes | memoryview = self._compress(_planes(block, self._element_bytes))
        if len(payload) >= block.nbytes:
            method, payload = _AS_IT_IS, block
        end = _HEADER.size + len(payload)
        _HEADER.pack_into(
            frame, 0, _MAGIC, method, self._element_bytes, 0, block.nbytes, len(payload)
        )
        frame[_HEADER.size : end] = payload
        frame[end : end + DIGEST_BYTES] = digest(frame[:end])
        return end + DIGEST_BYTES

    def _decode(self, frame: memoryview, block: memoryview) -> bool:
        magic, method, element_bytes, _, length, payload_bytes = _HEADER.unpack_from(frame)
        end = _HEADER.size + payload_bytes
        if magic != _MAGIC or method > _ZSTD_OF_PLANES:
            return False
        if not is_sealed(frame[: end + DIGEST_BYTES]):
            return False
        if length > block.nbytes:
            raise InvariantViolated(f"a buffer of {block.nbytes} bytes for a value of {length}")
        payload = frame[_HEADER.size : end]
        if method == _AS_IT_IS:
            block[:length] = payload
        else:
            _join_planes(self._decompress(payload), block[:length], element_bytes)
        return True

    def _compress(self, planes: "np.ndarray[Any, np.dtype[np.uint8]]") -> bytes:
        if not hasattr(self._of_thread, "compressor"):
            parameters = self._zstd.ZstdCompressionParameters(**_MOSTLY_ENTROPY)
            self._of_thread.compressor = self._zstd.ZstdCompressor(compression_params=parameters)
        coder = self._of_thread.compressor.compressobj(size=planes.size)
        parts = []
        for plane in np.array_split(planes, self._element_bytes):
            parts += [coder.compress(plane), coder.flush(self._zstd.COMPRESSOBJ_FLUSH_BLOCK)]
        return b"".join([*parts, coder.flush()])

    def _decompress(self, payload: memoryview) -> bytes:
        if not hasattr(self._of_thread, "decompressor"):
            self._of_thread.decompressor = self._zstd.ZstdDecompressor()
        data: bytes = self._of_thread.decompressor.decompress(payload)
        return data


def _zstandard() -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError as e:
        raise ConfigError(
            "compression needs the package zstandard", hint="pip install 'kvstrata[zstd]'"
        ) from e


def _planes(data: memoryview, element_bytes: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """The bytes of *data*, the first of each element before all the second ones."""
    given = np.frombuffer(data, np.uint8)
    whole = given.size - given.size % element_bytes
    planes = np.empty_like(given)
    planes[:whole].reshape(element_bytes, -1)[:] = given[:whole].reshape(-1, element_bytes).T
    planes[whole:] = given[whole:]
    return planes


def _join_planes(planes: bytes, into: memoryview, element_bytes: int) -> None:
    """The reverse of ``_planes``."""
    given, wanted = np.frombuffer(planes, np.uint8), np.frombuffer(into, np.uint8)
    whole = given.size - given.size % element_bytes
    elements = wanted[:whole].reshape(-1, element_bytes)
    for position, plane in enumerate(given[:whole].reshape(element_bytes, -1)):
        elements[:, position] = plane  # much faster than all at once
    wanted[whole:] = given[whole:]
