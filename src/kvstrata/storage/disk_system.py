"""The calls to the operating system that the disk store makes, and nothing else."""

import ctypes
import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What a call fails with where the file system, or a quota of it, is full."""

_FALLOC_FL_KEEP_SIZE: Final = 1
_FALLOC_FL_PUNCH_HOLE: Final = 2


class FileSystem:
    """The file system below a disk store; a subclass may fail calls, cut them short or lose data.

    The store reaches its files through these methods alone, from any thread, and every one but
    ``close`` may raise ``OSError``. What it relies on, and a simulated power failure may take away:

    * bytes and sizes (``pwrite``, ``pwritev``, ``ftruncate``, ``posix_fallocate``, ``punch_hole``)
      are durable after ``fdatasync`` or ``fsync`` of a descriptor of the file;
    * names (``open`` with ``O_CREAT``, ``mkdir``, ``rename``, ``unlink``) are durable after
      ``fsync`` of a descriptor of the directory, opened with ``O_DIRECTORY``;
    * ``rename`` is atomic.

    Reads and writes may be short. A lock is gone when its descriptor is closed.
    """

    def open(self, path: Path, flags: int) -> int:
        """A descriptor that children do not inherit; a file that it makes has mode 0600."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        """Release *fd*, also where the disk has an error to tell: what matters was synced."""
        try:
            os.close(fd)
        except OSError as e:
            if e.errno == errno.EBADF:
                raise

    def flock(self, fd: int, operation: int) -> None:
        fcntl.flock(fd, operation)

    def preadv(self, fd: int, buffers: Sequence[memoryview | bytearray], offset_bytes: int) -> int:
        return os.preadv(fd, buffers, offset_bytes)

    def pwrite(self, fd: int, data: bytes | memoryview, offset_bytes: int) -> int:
        return os.pwrite(fd, data, offset_bytes)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset_bytes: int) -> int:
        return os.pwritev(fd, buffers, offset_bytes)

    def ftruncate(self, fd: int, length_bytes: int) -> None:
        os.ftruncate(fd, length_bytes)

    def posix_fallocate(self, fd: int, offset_bytes: int, length_bytes: int) -> None:
        os.posix_fallocate(fd, offset_bytes, length_bytes)

    def punch_hole(self, fd: int, offset_bytes: int, length_bytes: int) -> None:
        """Give the room of a range back to the file system; it reads as zeros afterwards."""
        mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
        if _libc_fallocate(fd, mode, offset_bytes, length_bytes) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def stat(self, path: Path) -> os.stat_result:
        return os.stat(path)

    def statvfs(self, path: Path) -> os.statvfs_result:
        return os.statvfs(path)

    def access(self, path: Path, mode: int) -> bool:
        return os.access(path, mode)

    def listdir(self, path: Path) -> list[str]:
        return os.listdir(path)

    def mkdir(self, path: Path) -> None:
        """Make a directory with mode 0700."""
        os.mkdir(path, 0o700)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        os.unlink(path)


_libc_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_libc_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
