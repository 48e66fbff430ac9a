"""Runs the program as a user does: `python -m kvstrata` in a process of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
LONGEST_SECONDS = 60.0  # a command that looks or checks takes less than one


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "200", **more}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvstrata", *arguments]


def kvstrata(
    *arguments: str,
    env: Mapping[str, str] | None = None,
    timeout_seconds: float = LONGEST_SECONDS,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        check=False,
        env=environment(**(env or {})),
        timeout=timeout_seconds,
    )


@contextmanager
def running(
    *arguments: str, log: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The program in the background; SIGTERM at the end, what it prints goes to *log*."""
    with log.open("wb") as messages:
        process = subprocess.Popen(
            command(*arguments),
            stdout=messages,
            stderr=subprocess.STDOUT,
            env=environment(**(env or {})),
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until(condition: Callable[[], bool], seconds: float, log: Path) -> None:
    """Wait for *condition*, at most *seconds*; then fail with the contents of *log*."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-4000:]
        time.sleep(0.05)  # between two looks at another process
