"""A file system below a disk store that fails calls, cuts them short, and loses power."""

import errno
import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Final

from kvstrata.storage.disk_system import FileSystem
from kvstrata.testing.volatile import VolatileFile, VolatileTree

__all__ = ["FaultyFiles", "PowerFailure"]

_SECTOR_BYTES: Final = 512  # the least that O_DIRECT moves


class PowerFailure(BaseException):
    """The power goes off. No handler for errors may catch it: no code runs any more."""


class FaultyFiles(FileSystem):
    """The real file system, with faults. Calls are counted from 1, of any kind but ``close``.

    * ``fail_at``: this call raises ``OSError(code)`` and does nothing. With ``lasting`` all later
      ones fail too. 0 is none. May be set at any time, as may ``power_off_at`` and ``cuts_short``.
    * ``power_off_at``: this call raises ``PowerFailure`` and does nothing, and so do all later
      ones. 0 is none.
    * ``cuts_short``: reads and writes move a random part of what they are asked to, at least one
      byte, in whole sectors where they are direct.
    * ``lose_power()`` leaves on the real disk what was synced, and of the rest an arbitrary part,
      chosen by ``seed``. Any sector of 512 bytes may have any of its unsynced versions; so may
      the length of a file; names made, renamed or removed may be as they were, a rename as a
      whole. What was there before the first change counts as durable. A sync of a file does not
      make its name durable, and a sync that fails makes nothing durable.

    >>> files = FaultyFiles(fail_at=1, code=errno.ENOSPC)
    >>> files.statvfs(Path("/"))
    Traceback (most recent call last):
    OSError: [Errno 28] No space left on device
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        fail_at: int = 0,
        code: int = errno.EIO,
        lasting: bool = False,
        power_off_at: int = 0,
    ) -> None:
        self.fail_at = fail_at
        self.code = code
        self.lasting = lasting
        self.power_off_at = power_off_at
        self.cuts_short = False
        self.calls = 0
        self._choose = Random(seed)
        self._is_off = False
        self._tree = VolatileTree()
        self._open: dict[int, VolatileFile | Path] = {}  # descriptors; a path is a directory
        self._lock = threading.RLock()  # held during each call: its effect and its record agree

    def lose_power(self) -> None:
        """The power is off: close everything, and leave on the disk what may be left of it."""
        with self._lock:
            self._is_off = True
            while self._open:
                os.close(self._open.popitem()[0])
            self._tree.lose(self._choose)

    def open(self, path: Path, flags: int) -> int:
        with self._call():
            if flags & os.O_DIRECTORY:
                fd = super().open(path, flags)
                self._open[fd] = path
                return fd
            is_new = not path.exists()
            if is_new and not flags & os.O_CREAT:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            file = self._tree.file(path)
            fd = super().open(path, flags)
            if flags & os.O_TRUNC:
                file.resize(0)
            self._open[fd] = file
            return fd

    def close(self, fd: int) -> None:
        with self._lock:
            if self._is_off:
                raise PowerFailure
            del self._open[fd]
            super().close(fd)

    def flock(self, fd: int, operation: int) -> None:
        with self._call():
            super().flock(fd, operation)

    def preadv(self, fd: int, buffers: Sequence[memoryview | bytearray], offset_bytes: int) -> int:
        with self._call():
            return super().preadv(fd, self._cut(fd, buffers), offset_bytes)

    def pwrite(self, fd: int, data: bytes | memoryview, offset_bytes: int) -> int:
        return self.pwritev(fd, [memoryview(data)], offset_bytes)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset_bytes: int) -> int:
        with self._call():
            parts = self._cut(fd, buffers)
            written = super().pwritev(fd, parts, offset_bytes)
            self._file(fd).write(offset_bytes, b"".join(parts)[:written])
            return written

    def ftruncate(self, fd: int, length_bytes: int) -> None:
        with self._call():
            super().ftruncate(fd, length_bytes)
            self._file(fd).resize(length_bytes)

    def posix_fallocate(self, fd: int, offset_bytes: int, length_bytes: int) -> None:
        with self._call():
            super().posix_fallocate(fd, offset_bytes, length_bytes)
            file = self._file(fd)
            file.resize(max(file.size, offset_bytes + length_bytes))

    def punch_hole(self, fd: int, offset_bytes: int, length_bytes: int) -> None:
        with self._call():
            super().punch_hole(fd, offset_bytes, length_bytes)
            file = self._file(fd)
            file.write(offset_bytes, bytes(min(length_bytes, file.size - offset_bytes)))

    def fdatasync(self, fd: int) -> None:
        self.fsync(fd)

    def fsync(self, fd: int) -> None:
        with self._call():
            found = self._open[fd]
            if isinstance(found, Path):
                self._tree.sync(found)
            else:
                found.sync()

    def fstat(self, fd: int) -> os.stat_result:
        with self._call():
            return super().fstat(fd)

    def stat(self, path: Path) -> os.stat_result:
        with self._call():
            return super().stat(path)

    def statvfs(self, path: Path) -> os.statvfs_result:
        with self._call():
            return super().statvfs(path)

    def access(self, path: Path, mode: int) -> bool:
        with self._call():
            return super().access(path, mode)

    def listdir(self, path: Path) -> list[str]:
        with self._call():
            return super().listdir(path)

    def mkdir(self, path: Path) -> None:
        with self._call():
            super().mkdir(path)
            self._tree.make_directory(path)

    def rmdir(self, path: Path) -> None:
        with self._call():
            super().rmdir(path)
            self._tree.remove(path)

    def rename(self, old: Path, new: Path) -> None:
        with self._call():
            self._tree.rename(old, new)
            super().rename(old, new)

    def unlink(self, path: Path) -> None:
        with self._call():
            if path.exists():
                self._tree.remove(path)
            super().unlink(path)

    @contextmanager
    def _call(self) -> Iterator[None]:
        """One call, unless it fails."""
        with self._lock:
            self.calls += 1
            self._is_off |= self.calls == self.power_off_at
            if self._is_off:
                raise PowerFailure
            if self.fail_at and (
                self.calls == self.fail_at or (self.lasting and self.calls > self.fail_at)
            ):
                raise OSError(self.code, os.strerror(self.code))
            yield

    def _file(self, fd: int) -> VolatileFile:
        file = self._open[fd]
        if isinstance(file, Path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
        return file

    def _cut(self, fd: int, buffers: Sequence[memoryview | bytearray]) -> list[memoryview]:
        """*buffers*, or a part of them that ends anywhere."""
        parts = [memoryview(buffer).cast("B") for buffer in buffers]
        if not self.cuts_short:
            return parts
        direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        unit_bytes = _SECTOR_BYTES if direct else 1
        rest = self._choose.randint(1, max(1, sum(map(len, parts)) // unit_bytes)) * unit_bytes
        kept = []
        for part in parts:
            kept.append(part[:rest])
            rest -= len(kept[-1])
        return [part for part in kept if part]
