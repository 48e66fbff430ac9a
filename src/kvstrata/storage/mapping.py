"""The host tier's shared memory, as each process sees it.

One memfd, laid out as::

    [generation table: slots little-endian uint64, padded to 4 KiB] [slot 0] [slot 1] ...

The server bumps ``generations[slot]`` before a slot gets a new owner, so bytes that were copied out
of a slot are what was asked for if and only if the generation was the expected one before *and*
after the copy.
"""

import ctypes
import fcntl
import mmap
import os
import threading
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kvstrata.core.errors import ConfigError, ProtocolError

__all__ = ["PAGE_BYTES", "HostMapping", "header_bytes"]

PAGE_BYTES: Final = 4096
_GENERATION_BYTES: Final = 8
_TOUCH_BYTES: Final = 64 << 20
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14, <asm-generic/mman-common.h>; changes no byte
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def header_bytes(slots: int) -> int:
    """Bytes of the generation table of *slots* slots; slot 0 starts right after it.

    >>> header_bytes(1), header_bytes(512), header_bytes(513)
    (4096, 4096, 8192)
    """
    return -(-slots * _GENERATION_BYTES // PAGE_BYTES) * PAGE_BYTES


@dataclass(slots=True, eq=False)
class HostMapping:
    """A memfd of slots, mapped shared and writable.

    The arrays alias the shared memory. It stays mapped as long as one of them, or a view of one,
    is referenced: ``close`` cannot pull the memory away from a running copy.
    """

    server_id: bytes  # which server's life the slots belong to; plans name it
    slots: int
    slot_bytes: int  # stride of a slot, a multiple of ``PAGE_BYTES``
    fd: int  # owned by the mapping; -1 once closed
    generations: np.ndarray[Any, np.dtype[np.uint64]] = field(repr=False)  # (slots,)
    data: np.ndarray[Any, np.dtype[np.uint8]] = field(repr=False)  # (slots, slot_bytes)

    @classmethod
    def create(cls, slots: int, slot_bytes: int, server_id: bytes) -> "HostMapping":
        """Make a new zeroed memfd, mode 0600, sealed so that nobody can shrink it under a reader.

        Raises ``ConfigError`` if the machine refuses the memory.
        """
        _check_shape(slots, slot_bytes)
        total_bytes = header_bytes(slots) + slots * slot_bytes
        fd = os.memfd_create("kvstrata-host", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, total_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls.from_fd(fd, server_id, slots, slot_bytes)
        except OSError as e:
            os.close(fd)
            raise ConfigError(
                f"cannot map a host tier of {slots} slots, {total_bytes} bytes: {e.strerror}",
                hint="lower the capacity of the host tier",
            ) from e

    @classmethod
    def from_fd(cls, fd: int, server_id: bytes, slots: int, slot_bytes: int) -> "HostMapping":
        """Map a memfd received from the server; the mapping owns *fd* from here on.

        Raises ``ProtocolError`` and leaves *fd* to the caller if the file is not as long as the
        slots need (touching the missing part would kill the process).
        """
        _check_shape(slots, slot_bytes)
        start = header_bytes(slots)
        total_bytes = start + slots * slot_bytes
        if (found := os.fstat(fd).st_size) != total_bytes:
            raise ProtocolError(
                f"host tier of {slots} slots of {slot_bytes} bytes: "
                f"the shared memory has {found} bytes, expected {total_bytes}"
            )
        memory = mmap.mmap(fd, total_bytes)
        return cls(
            server_id=server_id,
            slots=slots,
            slot_bytes=slot_bytes,
            fd=fd,
            generations=np.frombuffer(memory, dtype="<u8", count=slots),
            data=np.frombuffer(memory, dtype=np.uint8, offset=start).reshape(slots, slot_bytes),
        )

    def touch(self, stop: threading.Event) -> None:
        """Fault every page into this process, 64 MiB at a time, until done or *stop* is set.

        Changes no byte, so it may run beside copies; the GIL is released meanwhile.
        """
        flat = self.data.reshape(-1)
        for first in range(0, len(flat), _TOUCH_BYTES):
            if stop.is_set():
                return
            _fault_in(flat[first : first + _TOUCH_BYTES])

    def close(self) -> None:
        """Close the descriptor; the memory goes when the last array that aliases it does.

        May be called again.
        """
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _fault_in(piece: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Back *piece* with memory: by one system call, or page by page where the kernel lacks it."""
    address, length = ctypes.c_void_p(piece.ctypes.data), ctypes.c_size_t(piece.nbytes)
    if ctypes.CDLL(None).madvise(address, length, _MADV_POPULATE_WRITE) != 0:
        np.bitwise_or.reduce(piece[::PAGE_BYTES])


def _check_shape(slots: int, slot_bytes: int) -> None:
    if slots < 1 or slot_bytes < PAGE_BYTES or slot_bytes % PAGE_BYTES:
        raise ConfigError(
            f"host tier of {slots} slots of {slot_bytes} bytes: needs at least one slot, "
            f"and slots of a multiple of {PAGE_BYTES} bytes"
        )
