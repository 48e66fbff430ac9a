"""The asking side of ``engine.py``: contenders as processes that stay up and take turns."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from ctypes.util import find_library
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from kvstrata.bench.contenders import CONTENDERS, Deployment
from kvstrata.bench.processes import Role, Usage, cpu_seconds_of, is_alive, usage_of
from kvstrata.bench.services import start_service
from kvstrata.bench.traffic import (
    Ask,
    Counted,
    Counters,
    Order,
    Ran,
    Ready,
    Reply,
    Run,
    Traffic,
    WasReset,
)
from kvstrata.core.errors import KVStrataError
from kvstrata.core.load import ENVIRONMENT_PREFIX

__all__ = ["EngineFailed", "Member", "environment", "remove_leftovers"]

R = TypeVar("R", bound=Reply)

_START_SECONDS: Final = 600.0  # a large model is read from a disk
_REPLY_SECONDS: Final = 60.0
_RUN_SECONDS: Final = 1800.0
_END_SECONDS: Final = 60.0
_SETTLE_SECONDS: Final = 20.0
_LOOK_SECONDS: Final = 0.1  # ten ticks of the clock that /proc counts CPU time by
_IDLE_CPU_SECONDS: Final = 0.011  # in that time: one tick
_RESET_SECONDS: Final = 10.0
_KILL_SECONDS: Final = 5.0  # in which the kernel takes the memory of a process
_SHOWN_LINES: Final = 40


class EngineFailed(KVStrataError):
    """An engine of the bench has died or hangs."""

    code = "bench_engine"


class Member:
    """One contender: its engine, and the servers that it needs."""

    def __init__(self, name: str, deployment: Deployment, environment: Mapping[str, str]) -> None:
        self.name = name
        self._deployment = deployment
        self._environment = dict(environment)
        self._log = Path(deployment.folder, "engine.log")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._services: list[subprocess.Popen[bytes]] = []
        self._server_pids: list[int] = []
        self._buffer = b""
        try:
            self._start_services()
            self._process = self._start()
        except BaseException:
            self._end_services()
            raise

    def wait_ready(self) -> None:
        self._receive(_START_SECONDS, Ready)

    def run(self, traffic: Traffic) -> Ran:
        self.begin(traffic)
        return self.end()

    def begin(self, traffic: Traffic) -> None:
        """Start *traffic*; ``end`` waits for it."""
        self._send(Run(traffic))

    def end(self) -> Ran:
        ran = self._receive(_RUN_SECONDS, Ran)
        self._engine_died |= ran.engine_died
        return ran

    def counters(self) -> Counters:
        counted = self._call(Ask("counters"), Counted)
        self._server_pids = counted.server_pids
        return counted.counters

    def reset(self) -> None:
        """Empty the device's prefix cache; saves may hold blocks for a moment."""
        give_up = time.monotonic() + _RESET_SECONDS
        while not self._call(Ask("reset"), WasReset).done:
            if time.monotonic() > give_up:
                raise EngineFailed(f"{self.name}: the prefix cache cannot be reset")
            time.sleep(0.02)  # the engine goes on stepping until its saves have ended

    def restart(self) -> None:
        """End the engine and start it again; a server beside it stays, if it and those that it uses live."""
        self._stop()
        ended = [n for n, service in enumerate(self._services) if not _lives(service)]
        if ended:
            self._end_services(ended[0])
            self._start_services()
        self._process = self._start()
        self.wait_ready()

    def kill_server(self) -> None:
        """SIGKILL to the processes that hold the cache, wherever they were started; returns when they have ended."""
        killed = self.server_pids
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        give_up = time.monotonic() + _KILL_SECONDS
        while any(map(is_alive, killed)) and time.monotonic() < give_up:
            time.sleep(0.01)
        self._server_pids = []

    @property
    def store_port(self) -> int:
        """Of Valkey beside it, if there is one."""
        return self._deployment.store_port

    @property
    def server_pids(self) -> set[int]:
        """As they were when ``counters`` was asked last; a service that has ended is none."""
        return {*(s.pid for s in self._services if _lives(s)), *self._server_pids}

    @property
    def has_ended(self) -> bool:
        """Nothing is answered until it is started again."""
        return self._engine_died or self._process.poll() is not None

    def usage(self) -> dict[Role, Usage]:
        return usage_of(self._process.pid, self.server_pids)

    def settle(self) -> None:
        """Return when nothing is left to do: all is saved and written, and no CPU time is used."""
        give_up = time.monotonic() + _SETTLE_SECONDS
        before = self._cpu_seconds()
        while time.monotonic() < give_up:
            time.sleep(_LOOK_SECONDS)
            now = self._cpu_seconds()
            if now - before <= _IDLE_CPU_SECONDS and not self.counters().waiting:
                return
            before = now

    def hang_up(self) -> None:
        """Have the engine end; ``close`` waits for it. Several end in the time of one."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def close(self) -> None:
        self._stop()
        self._end_services()

    def _cpu_seconds(self) -> float:
        return cpu_seconds_of([self._process.pid, *self.server_pids])

    def _start_services(self) -> None:
        for service in CONTENDERS[self.name].services[len(self._services) :]:
            process = start_service(service, self._deployment, self._environment)
            self._services.append(process)

    def _start(self) -> subprocess.Popen[bytes]:
        self._buffer = b""
        self._engine_died = False
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvstrata.bench.engine"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # one group with the processes that vLLM starts
            )
        self._write(process, msgspec.json.encode(self._deployment))
        return process

    def _stop(self) -> None:
        process = self._process
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        self._kill()
        remove_leftovers(self._deployment.engine_id)

    def _kill(self) -> None:
        """The engine, and the processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _end_services(self, first: int = 0) -> None:
        """From *first* on, the last one first: each may use those before it."""
        while len(self._services) > first:
            service = self._services.pop()
            service.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                service.wait(_END_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(service.pid, signal.SIGKILL)
            service.wait()

    def _call(self, order: Order, kind: type[R]) -> R:
        self._send(order)
        return self._receive(_REPLY_SECONDS, kind)

    def _send(self, order: Order) -> None:
        self._write(self._process, msgspec.json.encode(order))

    def _write(self, process: subprocess.Popen[bytes], line: bytes) -> None:
        assert process.stdin
        try:
            process.stdin.write(line + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("has ended") from None

    def _receive(self, timeout_seconds: float, kind: type[R]) -> R:
        assert self._process.stdout
        descriptor = self._process.stdout.fileno()
        give_up = time.monotonic() + timeout_seconds
        while b"\n" not in self._buffer:
            left = give_up - time.monotonic()
            readable, _, _ = select.select([descriptor], [], [], max(0.0, left))
            if not readable:
                self._kill()  # or what it answers later would be taken for the next answer
                raise self._failure(f"has not answered in {timeout_seconds:.0f} s")
            data = os.read(descriptor, 1 << 20)
            if not data:
                raise self._failure("has ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply = msgspec.json.decode(line, type=Reply)
        assert isinstance(reply, kind), reply
        return reply

    def _failure(self, what: str) -> EngineFailed:
        with self._log.open(errors="replace") as lines:
            tail = "".join(deque(lines, maxlen=_SHOWN_LINES))
        return EngineFailed(
            f"the engine of {self.name!r} {what}; its messages end:\n{tail}",
            hint="give the command again, and it goes on behind what is measured; or leave this one "
            "out, with --contender and another --output",
        )


def _lives(service: subprocess.Popen[bytes]) -> bool:
    """One that was killed has an exit status only when the last of its threads has ended."""
    return service.poll() is None and is_alive(service.pid)


def remove_leftovers(engine_id: str) -> None:
    """Host memory of vLLM's tiering, which has a name and stays if its engine is killed."""
    Path(f"/dev/shm/vllm_offload_{engine_id}.mmap").unlink(missing_ok=True)


def environment(lmcache: Path | None) -> dict[str, str]:
    """Of all engines alike, also what only one of them needs.

    Without the binding vLLM's CPU backend keeps a core free without a connector and none with one.
    tcmalloc is what vLLM starts its workers with, if its wheel brings it; where neither it nor the
    system has one, glibc keeps what it has: it would give memory back to the kernel and take it again
    at every step. And where LMCache lies on the path, vLLM takes parts of it.
    """
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    tcmalloc = find_library("tcmalloc_minimal")
    defaults = ({"LD_PRELOAD": tcmalloc} if tcmalloc else {}) | {
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "MALLOC_MMAP_MAX_": "0",  # see mallopt(3)
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "LMCACHE_LOG_LEVEL": "WARNING",
        "LMCACHE_TRACK_USAGE": "false",
    }
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)
    }
    path = [os.environ.get("PYTHONPATH", ""), *([str(lmcache)] if lmcache else [])]
    return defaults | inherited | {"PYTHONPATH": os.pathsep.join(part for part in path if part)}
