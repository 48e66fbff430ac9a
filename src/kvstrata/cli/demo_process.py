"""Runs an engine of the demo as a child and reads what it reports."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator
from pathlib import Path
from typing import Final

import msgspec

from kvstrata.cli.demo_engine import EngineOrders, Event
from kvstrata.core.errors import KVStrataError
from kvstrata.core.load import ENVIRONMENT_PREFIX

__all__ = ["EngineFailed", "events_of"]

_SILENCE_SECONDS: Final = 240.0  # an engine that reports nothing for so long hangs
_END_SECONDS: Final = 60.0
_READ_BYTES: Final = 1 << 16
_SHOWN_LINES: Final = 25


class EngineFailed(KVStrataError):
    """An engine of the demo has died or hangs."""

    code = "demo_engine"


def events_of(orders: EngineOrders, log: Path) -> Generator[Event]:
    """Start an engine, yield what it reports, and wait for its end.

    Its messages go to *log*. If the caller stops early, the engine is killed.
    """
    with log.open("wb") as messages:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstrata.cli.demo_engine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            env=_environment(),
            start_new_session=True,  # one group with the processes that vLLM starts
        )
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: reading tells
            process.stdin.write(msgspec.json.encode(orders) + b"\n")
            process.stdin.close()
        for line in _lines(process, log):
            yield msgspec.json.decode(line, type=Event)
        _wait(process, log)
    finally:
        _kill(process)


def _environment() -> dict[str, str]:
    """Return what an engine inherits: this environment, without settings that change the demo."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": cores,  # vLLM's own choice differs with a connector
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)
    }
    return defaults | inherited


def _lines(process: subprocess.Popen[bytes], log: Path) -> Generator[bytes]:
    """Yield the lines that *process* prints until it closes its output."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    rest = b""
    while True:
        if not poller.poll(_SILENCE_SECONDS * 1000):
            raise _failure(f"an engine has not answered for {_SILENCE_SECONDS:.0f} s", log)
        data = os.read(descriptor, _READ_BYTES)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def _wait(process: subprocess.Popen[bytes], log: Path) -> None:
    try:
        code = process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        return  # it has done its work; it is killed
    if code != 0:
        raise _failure(f"an engine has ended with exit code {code}", log)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the engine's process group, and close the pipes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _failure(message: str, log: Path) -> EngineFailed:
    with log.open(errors="replace") as lines:
        tail = deque(lines, maxlen=_SHOWN_LINES)
    shown = "".join(f"  | {line}" for line in tail).rstrip()
    return EngineFailed(f"{message}; the end of its messages:\n{shown}" if shown else message)
