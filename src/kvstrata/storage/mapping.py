"""The host tier's shared memory, as each process sees it.

One memfd, laid out as::

    [generation table: slots little-endian uint64] [slot 0] [slot 1] ...

where the table and the whole are padded to pages, of 4 KiB or huge ones. The server bumps ``generations[slot]`` before a slot gets a new owner, so bytes that were copied out
of a slot are what was asked for if and only if the generation was the expected one before *and*
after the copy.
"""

import ctypes
import errno
import fcntl
import math
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kvstrata.core.errors import ConfigError, ProtocolError

__all__ = ["HUGE_PAGE_BYTES", "PAGE_BYTES", "HostMapping", "header_bytes"]

PAGE_BYTES: Final = 4096
HUGE_PAGE_BYTES: Final = 2 << 20
_GENERATION_BYTES: Final = 8
_TOUCH_BYTES: Final = 64 << 20
_REGISTRATION_BYTES: Final = 256 << 30  # a GPU's driver fails to register 512 GiB or more at once
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14, <asm-generic/mman-common.h>; changes no byte
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def header_bytes(slots: int, page_bytes: int = PAGE_BYTES) -> int:
    """Bytes of the generation table of *slots* slots; slot 0 starts right after it.

    >>> header_bytes(1), header_bytes(512), header_bytes(513)
    (4096, 4096, 8192)
    """
    return _in_pages(slots * _GENERATION_BYTES, page_bytes)


@dataclass(slots=True, eq=False)
class HostMapping:
    """A memfd of slots, mapped shared and writable.

    ``generations`` and ``data`` alias ``memory``, which stays mapped as long as it, one of them or
    a view of one is referenced: ``close`` cannot pull it away from a running copy.
    """

    server_id: bytes  # which server's life the slots belong to; plans name it
    slots: int
    slot_bytes: int  # stride of a slot, a multiple of ``PAGE_BYTES``
    page_bytes: int  # of the pages behind it
    fd: int  # owned by the mapping; -1 once closed
    memory: mmap.mmap = field(repr=False)
    generations: np.ndarray[Any, np.dtype[np.uint64]] = field(repr=False)  # (slots,)
    data: np.ndarray[Any, np.dtype[np.uint8]] = field(repr=False)  # (slots, slot_bytes)

    @classmethod
    def create(
        cls, slots: int, slot_bytes: int, server_id: bytes, *, huge_pages: bool = False
    ) -> "HostMapping":
        """Make a new zeroed memfd, mode 0600, sealed so that nobody can shrink it under a reader.

        Raises ``ConfigError`` if the machine refuses the memory. Huge pages are reserved at once.
        """
        _check_shape(slots, slot_bytes)
        page_bytes = HUGE_PAGE_BYTES if huge_pages else PAGE_BYTES
        total_bytes = _total_bytes(slots, slot_bytes, page_bytes)
        fd = -1
        try:
            fd = _memfd(total_bytes, huge_pages=huge_pages)
            return cls.from_fd(fd, server_id, slots, slot_bytes)
        except OSError as e:
            if fd >= 0:
                os.close(fd)
            pages = total_bytes // HUGE_PAGE_BYTES
            raise ConfigError(
                f"cannot map a host tier of {slots} slots, {total_bytes} bytes"
                f"{' of huge pages' if huge_pages else ''}: {e.strerror}",
                hint=f"let the kernel set {pages} more huge pages aside (sysctl vm.nr_hugepages), "
                "or use no huge pages"
                if huge_pages
                else "lower the capacity of the host tier",
            ) from e

    @classmethod
    def from_fd(cls, fd: int, server_id: bytes, slots: int, slot_bytes: int) -> "HostMapping":
        """Map a memfd received from the server; the mapping owns *fd* from here on.

        Raises ``ProtocolError`` and leaves *fd* to the caller if the file is not as long as the
        slots need (touching the missing part would kill the process).
        """
        _check_shape(slots, slot_bytes)
        status = os.fstat(fd)
        page_bytes = max(PAGE_BYTES, status.st_blksize)
        total_bytes = _total_bytes(slots, slot_bytes, page_bytes)
        if status.st_size != total_bytes:
            raise ProtocolError(
                f"host tier of {slots} slots of {slot_bytes} bytes: "
                f"the shared memory has {status.st_size} bytes, expected {total_bytes}"
            )
        memory = mmap.mmap(fd, total_bytes)
        data = np.frombuffer(
            memory, np.uint8, count=slots * slot_bytes, offset=header_bytes(slots, page_bytes)
        )
        return cls(
            server_id=server_id,
            slots=slots,
            slot_bytes=slot_bytes,
            page_bytes=page_bytes,
            fd=fd,
            memory=memory,
            generations=np.frombuffer(memory, dtype="<u8", count=slots),
            data=data.reshape(slots, slot_bytes),
        )

    @property
    def address(self) -> int:
        """Where the generation table, and with it the mapping, begins in this process."""
        return int(self.generations.ctypes.data)

    @property
    def total_bytes(self) -> int:
        """Of the generation table, the slots and their padding."""
        return _total_bytes(self.slots, self.slot_bytes, self.page_bytes)

    def registration_chunks(self, most_bytes: int = _REGISTRATION_BYTES) -> list[tuple[int, int]]:
        """Runs of ``data``, (offset_bytes, length_bytes), to be pinned with one call each.

        They cover all slots in order; each begins with a slot and a page and is at most
        *most_bytes* long, or as short as that allows.
        """
        unit = math.lcm(self.slot_bytes, self.page_bytes)
        step = max(1, most_bytes // unit) * unit
        whole = self.slots * self.slot_bytes
        return [(start, min(step, whole - start)) for start in range(0, whole, step)]

    def touch(
        self, stop: threading.Event, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Fault every page into this process, 64 MiB at a time, until done or *stop* is set.

        Changes no byte, so it may run beside copies; the GIL is released meanwhile. *progress* is
        told the bytes done and the bytes in all: at first and after each step. Raises ``OSError``
        if there is not enough memory.
        """
        flat = np.frombuffer(self.memory, np.uint8)
        for first in range(0, len(flat), _TOUCH_BYTES):
            if stop.is_set():
                return
            if progress is not None:
                progress(first, len(flat))
            _fault_in(flat[first : first + _TOUCH_BYTES])
        if progress is not None:
            progress(len(flat), len(flat))

    def close(self) -> None:
        """Close the descriptor; the memory goes when the last array that aliases it does.

        May be called again.
        """
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _in_pages(count: int, page_bytes: int) -> int:
    return -(-count // page_bytes) * page_bytes


def _total_bytes(slots: int, slot_bytes: int, page_bytes: int) -> int:
    return header_bytes(slots, page_bytes) + _in_pages(slots * slot_bytes, page_bytes)


def _memfd(total_bytes: int, *, huge_pages: bool) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if huge_pages:
        flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
    fd = os.memfd_create("kvstrata-host", flags)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, total_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def _fault_in(piece: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Back *piece* with memory: by one system call, or page by page where the kernel lacks it."""
    libc = ctypes.CDLL(None, use_errno=True)
    address, length = ctypes.c_void_p(piece.ctypes.data), ctypes.c_size_t(piece.nbytes)
    if libc.madvise(address, length, _MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        raise OSError(code, os.strerror(code))
    np.bitwise_or.reduce(piece[::PAGE_BYTES])


def _check_shape(slots: int, slot_bytes: int) -> None:
    if slots < 1 or slot_bytes < PAGE_BYTES or slot_bytes % PAGE_BYTES:
        raise ConfigError(
            f"host tier of {slots} slots of {slot_bytes} bytes: needs at least one slot, "
            f"and slots of a multiple of {PAGE_BYTES} bytes"
        )
