"""The program in a terminal of its own."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pyte
from tests.cli.processes import LONGEST_SECONDS, command, environment


class Terminal:
    """A pty with somebody who reads it."""

    def __init__(
        self, *arguments: str, stdout: IO[bytes] | None = None, cwd: Path | None = None
    ) -> None:
        """*stdout*: what is there instead of the terminal."""
        self.screen = pyte.Screen(100, 30)
        self._stream = pyte.ByteStream(self.screen)
        self.fd, theirs = pty.openpty()
        self.resize(100, 30)
        self.settings = termios.tcgetattr(theirs)
        self._theirs = theirs
        self.process = subprocess.Popen(
            command(*arguments),
            stdin=theirs,
            stdout=stdout or theirs,
            stderr=theirs,
            cwd=cwd,
            env=environment(TERM="xterm-256color", COLUMNS="90", LINES="24"),  # not so, see resize
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - Ctrl-C
        )
        self.seen = b""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.screen.resize(lines, columns)

    def read(self, seconds: float = 0.1) -> bool:
        """Whether something came within *seconds*."""
        if not select.select([self.fd], [], [], seconds)[0]:
            return False
        data = os.read(self.fd, 65536)
        self.seen += data
        self._stream.feed(data)
        return True

    def until(
        self, condition: Callable[[], bool], longest_seconds: float = LONGEST_SECONDS
    ) -> None:
        deadline = time.monotonic() + longest_seconds
        while not condition():
            assert time.monotonic() < deadline, (
                self.process.poll(),
                self.seen[-500:],
                self.screen.display,
            )
            self.read()

    def shows(self, text: str) -> bool:
        return any(text in line for line in self.screen.display)

    def matches(self, pattern: str) -> bool:
        return any(re.search(pattern, line) for line in self.screen.display)

    def type(self, text: bytes) -> None:
        os.write(self.fd, text)

    def ended(self) -> bool:
        return self.process.poll() is not None

    def settings_now(self) -> list[object]:
        return list(termios.tcgetattr(self._theirs))

    def close(self) -> None:
        if not self.ended():
            self.process.kill()
            self.process.wait()
        os.close(self.fd)
        os.close(self._theirs)


@contextmanager
def terminal(
    *arguments: str, stdout: IO[bytes] | None = None, cwd: Path | None = None
) -> Iterator[Terminal]:
    made = Terminal(*arguments, stdout=stdout, cwd=cwd)
    try:
        yield made
    finally:
        made.close()
