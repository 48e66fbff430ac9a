"""The lock that keeps a disk store to one process."""

import fcntl
import logging
import os
import time
from pathlib import Path
from typing import Final

from kvstrata.core.errors import ConfigError
from kvstrata.storage.disk_files import read_file
from kvstrata.storage.disk_system import FileSystem

_log = logging.getLogger(__name__)

LOCK_NAME: Final = "kvstrata.lock"
LOCK_TIMEOUT_SECONDS: Final = 10.0  # a server that has been told to end writes for half as long

_POLL_SECONDS: Final = 0.05


def lock_directory(system: FileSystem, directory: Path, timeout_seconds: float) -> int:
    """The locked descriptor of the lock file of *directory*; closing it releases the lock.

    The kernel releases it when the process dies. The file holds the pid of the last holder.
    Raises ``ConfigError`` naming the holder after *timeout_seconds*.
    """
    path = directory / LOCK_NAME
    deadline = time.monotonic() + timeout_seconds
    is_told = timeout_seconds <= 0
    while True:
        fd = _try_lock(system, path)
        if fd is not None:
            return fd
        if time.monotonic() >= deadline:
            waited = f" (waited {timeout_seconds:g} s)" if timeout_seconds else ""
            raise ConfigError(
                f"disk store {directory} is in use by process {_holder(system, path)}{waited}",
                hint="stop that process, or give this store another directory",
            )
        if not is_told:
            holder, is_told = _holder(system, path), True
            _log.info("disk store %s is in use by process %s: waiting for it", directory, holder)
        time.sleep(_POLL_SECONDS)  # flock has no timeout of its own


def _try_lock(system: FileSystem, path: Path) -> int | None:
    fd = system.open(path, os.O_RDWR | os.O_CREAT)
    locked = False
    try:
        system.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked = is_lock_of(system, path.parent, fd)
        if locked:
            system.ftruncate(fd, 0)
            system.pwrite(fd, b"%d\n" % os.getpid(), 0)
    except BlockingIOError:
        return None
    except OSError:
        locked = False
        raise
    finally:
        if not locked:
            system.close(fd)
    return fd if locked else None


def is_lock_of(system: FileSystem, directory: Path, fd: int) -> bool:
    """Whether *fd* is the lock file of *directory*: a failed open removes it, and so may others."""
    try:
        return os.path.samestat(system.stat(directory / LOCK_NAME), system.fstat(fd))
    except FileNotFoundError:
        return False


def _holder(system: FileSystem, path: Path) -> str:
    try:
        return read_file(system, path).decode("ascii", "replace").strip() or "unknown"
    except FileNotFoundError:
        return "unknown"
