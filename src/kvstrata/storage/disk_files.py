"""Whole-file writes that survive a crash at any point."""

import errno
import os
from pathlib import Path


def write_all(fd: int, data: bytes, offset_bytes: int) -> None:
    """Write every byte of *data* at *offset_bytes*; raises ``OSError`` if that is not possible."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, offset_bytes)
        if written == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        offset_bytes += written
        rest = rest[written:]


def sync_directory(directory: Path) -> None:
    """Make the names in *directory* durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(directory: Path, name: str, data: bytes) -> int:
    """Make *data* the content of file *name*; returns its open descriptor, read and write.

    A crash leaves the old file or the new one, whole. The data is durable on return, the name
    after ``sync_directory``. On ``OSError`` nothing has changed and nothing is left behind.
    """
    temporary = directory / f"{name}.tmp"
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o600)
    try:
        write_all(fd, data, 0)
        os.fdatasync(fd)
        temporary.rename(directory / name)
    except OSError:
        os.close(fd)
        temporary.unlink(missing_ok=True)
        raise
    return fd
