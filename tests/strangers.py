"""Processes of another user, which root alone can start."""

import contextlib
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

NOBODY: Final = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@contextlib.contextmanager
def stranger(action: Callable[[], str]) -> Iterator[str]:
    """What *action* returned in a process of ``NOBODY``, which lives on until the end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                answer = action()
            except Exception as e:  # noqa: BLE001 - the parent shows it
                answer = repr(e)
            os.write(writing, answer.encode())
            os.close(writing)
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    try:
        with os.fdopen(reading) as pipe:
            yield pipe.read()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@contextlib.contextmanager
def socket_of_a_stranger() -> Iterator[Path]:
    """A socket, in a directory open to all, on which another user's process listens."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-test-") as folder:
        os.chmod(folder, 0o755)
        (home := Path(folder, "theirs")).mkdir()
        os.chown(home, NOBODY, NOBODY)
        path = home / "s"
        sock = socket.socket(socket.AF_UNIX)  # the child keeps it open

        def listen() -> str:
            sock.bind(str(path))
            sock.listen()
            return "ready"

        with sock, stranger(listen) as answer:
            assert answer == "ready"
            yield path
