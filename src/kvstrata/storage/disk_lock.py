"""The lock that keeps a disk store to one process."""

import fcntl
import os
import time
from pathlib import Path
from typing import Final

from kvstrata.core.errors import ConfigError

LOCK_NAME: Final = "kvstrata.lock"

_POLL_SECONDS: Final = 0.05


def lock_directory(directory: Path, timeout_seconds: float) -> int:
    """The locked descriptor of the lock file of *directory*; closing it releases the lock.

    The kernel releases it when the process dies. The file holds the pid of the last holder.
    Raises ``ConfigError`` naming the holder after *timeout_seconds*.
    """
    path = directory / LOCK_NAME
    deadline = time.monotonic() + timeout_seconds
    while True:
        fd = _try_lock(path)
        if fd is not None:
            return fd
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"disk store {directory} is in use by process {_holder(path)} "
                f"(waited {timeout_seconds:g} s)",
                hint="stop that process, or give this store another directory",
            )
        time.sleep(_POLL_SECONDS)  # flock has no timeout of its own


def _try_lock(path: Path) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    locked = False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked = _is_file(path, fd)
        if locked:
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    except BlockingIOError:
        return None
    finally:
        if not locked:
            os.close(fd)
    return fd if locked else None


def _is_file(path: Path, fd: int) -> bool:
    """Whether *path* still names the file behind *fd*: a failed open removes its lock file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace").strip() or "unknown"
    except FileNotFoundError:
        return "unknown"
