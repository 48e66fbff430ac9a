"""Whole files: read them, and write them so that they survive a crash at any point."""

import contextlib
import errno
import os
from pathlib import Path

from kvstrata.storage.disk_system import FileSystem


def exists(system: FileSystem, path: Path) -> bool:
    """Whether *path* names anything."""
    try:
        system.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def read_file(system: FileSystem, path: Path) -> bytearray:
    """The content of *path*; raises ``FileNotFoundError`` if there is none."""
    fd = system.open(path, os.O_RDONLY)
    try:
        data = bytearray(system.fstat(fd).st_size)
        done = 0
        while done < len(data):
            count = system.preadv(fd, [memoryview(data)[done:]], done)
            if count == 0:
                return data[:done]
            done += count
    finally:
        system.close(fd)
    return data


def write_all(system: FileSystem, fd: int, data: bytes, offset_bytes: int) -> None:
    """Write every byte of *data* at *offset_bytes*; raises ``OSError`` if that is not possible."""
    rest = memoryview(data)
    while rest:
        written = system.pwrite(fd, rest, offset_bytes)
        if written == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        offset_bytes += written
        rest = rest[written:]


def sync_directory(system: FileSystem, directory: Path) -> None:
    """Make the names in *directory* durable."""
    fd = system.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        system.fsync(fd)
    finally:
        system.close(fd)


def replace_file(system: FileSystem, directory: Path, name: str, data: bytes) -> int:
    """Make *data* the content of file *name*; returns its open descriptor, read and write.

    A crash leaves the old file or the new one, whole. The data is durable on return, the name
    after ``sync_directory``. On ``OSError`` nothing has changed and nothing is left behind.
    """
    temporary = directory / f"{name}.tmp"
    fd = system.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(system, fd, data, 0)
        system.fdatasync(fd)
        system.rename(temporary, directory / name)
    except OSError:
        system.close(fd)
        remove_file(system, temporary)
        raise
    return fd


def remove_file(system: FileSystem, path: Path) -> None:
    """Unlink *path*, which need not exist."""
    with contextlib.suppress(FileNotFoundError):
        system.unlink(path)
