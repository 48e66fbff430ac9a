"""The files of a shared store: a header page that proves its file, then the value.

Every file is written under a temporary name in its own directory and published by a rename, so
that on no node a name ever stands for half a file. ``docs/shared-file-system.md`` has the layout.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.types import StoreKey
from kvstrata.storage.checksum import DIGEST_BYTES, digest, is_sealed, seal

FORMAT_VERSION: Final = 1
HEADER_BYTES: Final = 4096

# Removed, or replaced by another node while it was open (ESTALE), or no file of ours.
NOT_THERE: Final = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.EISDIR, errno.ELOOP})

_MAGIC: Final = b"KVSVALUE"
_HEADER: Final = struct.Struct("<8sIIQ48s48s16s")
_SEALED_BYTES: Final = _HEADER.size + DIGEST_BYTES
_HAS_PARENT: Final = 1
_NO_DIRECT_IO: Final = (errno.EINVAL, errno.EOPNOTSUPP)


class _Scratch(threading.local):
    """One page-aligned page per thread."""

    def __init__(self) -> None:
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.page = memoryview(mmap.mmap(-1, HEADER_BYTES, flags=private))


_scratch: Final = _Scratch()


def read_value(fd: int, key: StoreKey, buffer: memoryview, *, direct: bool) -> bool:
    """Copy the value of the open file *fd* into the first bytes of *buffer*.

    ``False`` unless all of the file proves to be *key*'s; the buffer then holds garbage. Raises
    ``OSError``, and ``InvariantViolated`` if the value is longer than *buffer*.
    """
    length = os.fstat(fd).st_size - HEADER_BYTES
    page = _scratch.page
    if length < 1:
        return False
    if length > buffer.nbytes:
        if _read_all(fd, [page]) and _is_header(page, key, length):
            raise InvariantViolated(f"a buffer of {buffer.nbytes} bytes for a value of {length}")
        return False
    value = buffer[:length]
    if direct and is_page_aligned(value):
        _set_direct(fd)
    if not _read_all(fd, [page, value]) or not _is_header(page, key, length):
        return False
    checksum = _HEADER.unpack_from(page)[-1]
    return bool(digest(value) == checksum)


def header_of(key: StoreKey, parent: StoreKey | None, value: memoryview) -> memoryview:
    """The header page of a file; overwritten by the thread's next read or header."""
    body = _HEADER.pack(
        _MAGIC,
        FORMAT_VERSION,
        _HAS_PARENT if parent is not None else 0,
        value.nbytes,
        key,
        parent or b"",
        digest(value),
    )
    page = _scratch.page
    page[:] = seal(body).ljust(HEADER_BYTES, b"\0")
    return page


def publish(
    path: str, temporary: str, parts: Sequence[memoryview], *, direct: bool = False
) -> None:
    """Make *parts* the content of *path*, by way of *temporary* in the same directory.

    The data has reached the file server before the name does, so a full or broken file system
    shows here and not in a reader. On ``OSError`` *path* is as it was and *temporary* is gone.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    fd = os.open(temporary, flags, 0o600)
    try:
        try:
            _write_all(fd, parts)
            os.fdatasync(fd)
        finally:
            os.close(fd)  # on NFS this, too, reports writes that have failed
        os.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def is_page_aligned(view: memoryview) -> bool:
    """Whether direct I/O can use *view* as it is."""
    return not (view.nbytes % HEADER_BYTES or _address(view) % HEADER_BYTES)


def reads_directly(path: str) -> bool:
    """Whether the first page of *path* can be read past the page cache (``O_DIRECT``)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _set_direct(fd)
        return os.preadv(fd, [_scratch.page], 0) == HEADER_BYTES
    except OSError as e:
        if e.errno in _NO_DIRECT_IO:
            return False
        raise
    finally:
        os.close(fd)


def _set_direct(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)


def _is_header(page: memoryview, key: StoreKey, length: int) -> bool:
    found = _HEADER.unpack_from(page)
    magic, version, _, value_bytes, found_key, _, _ = found
    expected = (_MAGIC, FORMAT_VERSION, length, key)
    return (magic, version, value_bytes, found_key) == expected and is_sealed(page[:_SEALED_BYTES])


def _read_all(fd: int, parts: Sequence[memoryview]) -> bool:
    """Fill *parts* from the start of the file; ``False`` if it ends before."""
    rest, offset_bytes = list(parts), 0
    while rest:
        count = os.preadv(fd, rest, offset_bytes)
        if count == 0:
            return False
        offset_bytes += count
        _advance(rest, count)
    return True


def _write_all(fd: int, parts: Sequence[memoryview]) -> None:
    rest, offset_bytes = list(parts), 0
    while rest:
        count = os.pwritev(fd, rest, offset_bytes)
        if count == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        offset_bytes += count
        _advance(rest, count)


def _advance(parts: list[memoryview], count: int) -> None:
    """Take the first *count* bytes off *parts*."""
    while parts and count >= parts[0].nbytes:
        count -= parts.pop(0).nbytes
    if count:
        parts[0] = parts[0][count:]


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
