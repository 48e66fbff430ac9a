"""Slot files: fixed 4 KiB-aligned slots, each a payload and a footer that proves it.

Payload and footer travel in one ``pwritev`` and one ``preadv``, past the page cache where the
file system can (``O_DIRECT``). ``docs/on-disk-format.md`` has the byte layout.
"""

import errno
import mmap
import os
import struct
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from kvstrata.core.types import StoreKey
from kvstrata.storage.checksum import DIGEST_BYTES, digest, is_sealed, seal
from kvstrata.storage.disk_files import sync_directory
from kvstrata.storage.superblock import FORMAT_VERSION, PAGE_BYTES, Superblock

_MAGIC: Final = b"KVSBLOCK"
_FOOTER: Final = struct.Struct("<8sIIQQ48s48s16s")
_SEALED_BYTES: Final = _FOOTER.size + DIGEST_BYTES
_HAS_PARENT: Final = 1


class Identity(NamedTuple):
    """What a footer says about its payload."""

    key: StoreKey
    parent: StoreKey | None
    generation: int


class _Scratch(threading.local):
    """One slot of page-aligned memory per thread."""

    def __init__(self, slot_bytes: int) -> None:
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.memory = memoryview(mmap.mmap(-1, slot_bytes, flags=private))


class SlotFiles:
    """The open slot files of one store. Threads may use different slots at once."""

    def __init__(self, directory: Path, superblock: Superblock) -> None:
        self._superblock = superblock
        self._slot_bytes = superblock.slot_bytes
        self._block_bytes = superblock.block_bytes
        self._scratch = _Scratch(superblock.slot_bytes)
        paths = [slot_path(directory, number) for number in range(superblock.files)]
        self.direct = _reads_directly(paths[0])
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)
        with ExitStack() as undo:
            self._fds: list[int] = []
            for path in paths:
                self._fds.append(os.open(path, flags))
                undo.callback(os.close, self._fds[-1])
            undo.pop_all()

    def read(self, slot: int, expected: Identity, buffer: memoryview) -> bool:
        """Copy the payload of *slot* into *buffer*; ``False`` unless it proves to be *expected*.

        A buffer that is not page-aligned costs one copy where the files are read directly.
        After ``False`` the buffer holds garbage. Raises ``OSError`` if the disk does.
        """
        memory = self._scratch.memory
        bounced = self._must_bounce(buffer)
        parts = [memory] if bounced else [buffer, memory[self._block_bytes :]]
        fd, offset_bytes = self._locate(slot)
        if os.preadv(fd, parts, offset_bytes) != self._slot_bytes:
            return False
        payload = memory[: self._block_bytes] if bounced else buffer
        footer = memory[self._slot_bytes - PAGE_BYTES :][:_SEALED_BYTES]
        if not self._proves(footer, expected, payload):
            return False
        if bounced:
            np.copyto(_array(buffer), _array(payload))
        return True

    def write(self, slot: int, identity: Identity, buffer: memoryview) -> None:
        """Write *buffer* and its footer into *slot*; durable after ``sync``."""
        memory = self._scratch.memory
        footer = self._footer(identity, buffer)
        start = self._slot_bytes - PAGE_BYTES
        memory[start : start + _SEALED_BYTES] = footer
        if self._must_bounce(buffer):
            np.copyto(_array(memory[: self._block_bytes]), _array(buffer))
            parts = [memory]
        else:
            parts = [buffer, memory[self._block_bytes :]]
        fd, offset_bytes = self._locate(slot)
        _write_vectors(fd, parts, offset_bytes)

    def sync(self, slots: Iterable[int]) -> None:
        """Make what was written into *slots* durable: one ``fdatasync`` per file."""
        for number in {slot // self._superblock.max_blocks_per_file for slot in slots}:
            os.fdatasync(self._fds[number])

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def _locate(self, slot: int) -> tuple[int, int]:
        number, position = divmod(slot, self._superblock.max_blocks_per_file)
        return self._fds[number], position * self._slot_bytes

    def _must_bounce(self, buffer: memoryview) -> bool:
        if not self.direct:
            return False
        return bool(self._block_bytes % PAGE_BYTES or _address(buffer) % PAGE_BYTES)

    def _footer(self, identity: Identity, payload: memoryview) -> bytes:
        key, parent, generation = identity
        body = _FOOTER.pack(
            _MAGIC,
            FORMAT_VERSION,
            _HAS_PARENT if parent is not None else 0,
            generation,
            self._block_bytes,
            key,
            parent or b"",
            digest(payload),
        )
        return seal(body)

    def _proves(self, footer: memoryview, expected: Identity, payload: memoryview) -> bool:
        if not is_sealed(footer):
            return False
        magic, version, _, generation, block_bytes, key, _, checksum = _FOOTER.unpack_from(footer)
        found = (magic, version, generation, block_bytes, key)
        wanted = (_MAGIC, FORMAT_VERSION, expected.generation, self._block_bytes, expected.key)
        return found == wanted and digest(payload) == checksum


def slot_path(directory: Path, number: int) -> Path:
    """Where slot file *number* is."""
    return directory / f"kvstrata_{number}.bin"


def whole_slots(directory: Path, superblock: Superblock) -> list[int]:
    """Number of whole slots that each slot file has now; 0 for a missing file."""
    found = []
    for number in range(superblock.files):
        path = slot_path(directory, number)
        file_bytes = path.stat().st_size if path.exists() else 0
        found.append(file_bytes // superblock.slot_bytes)
    return found


def preallocate(directory: Path, superblock: Superblock, undo: ExitStack) -> None:
    """Give every slot file its full size in real disk blocks; *undo* takes it back.

    Files that are large enough are left alone. Raises ``OSError`` where the disk is full.
    """
    changed = False
    for number in range(superblock.files):
        path = slot_path(directory, number)
        changed |= _allocate(path, superblock.file_bytes(number), undo)
    if changed:
        sync_directory(directory)


def _allocate(path: Path, wanted_bytes: int, undo: ExitStack) -> bool:
    existed = path.exists()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        found = os.fstat(fd)
        if existed:
            undo.callback(os.truncate, path, found.st_size)
        else:
            undo.callback(path.unlink)
        if found.st_size >= wanted_bytes and found.st_blocks * 512 >= wanted_bytes:
            return False
        os.posix_fallocate(fd, 0, wanted_bytes)
        os.fsync(fd)
    finally:
        os.close(fd)
    return True


def _reads_directly(path: Path) -> bool:
    """Whether the file system takes ``O_DIRECT`` reads of one page."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as e:
        if e.errno in {errno.EINVAL, errno.EOPNOTSUPP}:
            return False
        raise
    try:
        return os.preadv(fd, [mmap.mmap(-1, PAGE_BYTES)], 0) == PAGE_BYTES
    except OSError as e:
        if e.errno in {errno.EINVAL, errno.EOPNOTSUPP}:
            return False
        raise
    finally:
        os.close(fd)


def _array(view: memoryview) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(view, np.uint8)


def _address(view: memoryview) -> int:
    return int(_array(view).__array_interface__["data"][0])


def _write_vectors(fd: int, parts: Sequence[memoryview], offset_bytes: int) -> None:
    rest = list(parts)
    while rest:
        written = os.pwritev(fd, rest, offset_bytes)
        if written == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        offset_bytes += written
        while rest and written >= rest[0].nbytes:
            written -= rest.pop(0).nbytes
        if written:
            rest[0] = rest[0].cast("B")[written:]
