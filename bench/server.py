"""Lookups through the socket of a real server, beside a bare echo of as many bytes.

    python bench/server.py [--quick] [--json FILE]

Each lookup is timed from the keys in the client's hands to the slots in its hands, and right before
it a process that does nothing else sends back as many bytes as the server will, for as many bytes as
the client sends. See bench/README.md.
"""

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from kvstrata.core.errors import ServerUnavailable
from kvstrata.server import protocol as p
from kvstrata.server.client import ManagerClient, observe

BLOCKS: Final = (1, 64, 512, 8192)
BOUND_BLOCKS: Final = 512
BOUND_SECONDS: Final = 0.3e-3  # at the median
IDLE_BOUND: Final = 0.005  # of a core
NAMESPACE: Final = b"bench".ljust(16, b".")
BLOCK_BYTES: Final = 4096
START_SECONDS: Final = 20.0


@dataclass(frozen=True)
class Row:
    """Seconds of one kind of lookup, and of the echo of its bytes."""

    blocks: int
    found: bool
    sent_bytes: int
    received_bytes: int
    lookup_seconds: list[float]
    echo_seconds: list[float]


@contextlib.contextmanager
def running_server(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A server process as an operator starts it."""
    path = folder / "socket"
    size = f"{(max(BLOCKS) * 2 * BLOCK_BYTES) >> 20}MiB"
    command = [sys.executable, "-m", "kvstrata", "server", "--socket", str(path)]
    command += ["--host-size", size, "--block-bytes", str(BLOCK_BYTES)]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(path):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit((folder / "log").read_text())
            time.sleep(0.05)  # it opens its tiers
        yield process, path
    finally:
        process.terminate()
        process.wait()


def _answers(path: Path) -> bool:
    try:
        observe(path).close()
    except ServerUnavailable:
        return False
    return True


class Echo:
    """A process that receives so many bytes and sends so many."""

    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair()
        if os.fork() == 0:
            self._sock.close()
            with contextlib.suppress(OSError):
                _answer(theirs)
            os._exit(0)
        theirs.close()

    def seconds(self, sent: bytes, received_bytes: int) -> float:
        """Of one round trip."""
        sizes = len(sent).to_bytes(4, "little") + received_bytes.to_bytes(4, "little")
        self._sock.sendall(sizes)
        self._sock.recv(1, socket.MSG_WAITALL)  # the other side is ready
        started = time.perf_counter()
        self._sock.sendall(sent)
        self._sock.recv(received_bytes, socket.MSG_WAITALL)
        return time.perf_counter() - started

    def close(self) -> None:
        self._sock.close()
        os.wait()


def _answer(sock: socket.socket) -> None:
    while sizes := sock.recv(8, socket.MSG_WAITALL):
        reply = bytes(int.from_bytes(sizes[4:], "little"))
        sock.sendall(b"r")
        sock.recv(int.from_bytes(sizes[:4], "little"), socket.MSG_WAITALL)
        sock.sendall(reply)


def client_of(path: Path, role: str) -> ManagerClient:
    client = ManagerClient(path, p.Hello(0, p.PROTOCOL_VERSION, role, "bench", BLOCK_BYTES))
    client.wait_welcome(START_SECONDS)
    if role == "worker":
        client.submit(p.Mapped(0))
        client.ping()
    return client


def measure(engine: ManagerClient, echo: Echo, blocks: int, found: bool, count: int) -> Row:
    """*count* lookups of *blocks* blocks, all of them known or none."""
    keys = [os.urandom(32) for _ in range(blocks)]
    if found:
        task = engine.put_match(NAMESPACE, keys)
        if len(task.slots) != blocks:
            raise SystemExit(f"there is room for {len(task.slots)} of {blocks} blocks only")
        engine.launch([task.task_id])
        engine.complete([task.task_id])
    sent = p.encode(p.GetMatch(1, NAMESPACE, b"".join(keys)))
    status = engine.get_match(NAMESPACE, keys)
    received_bytes = len(p.encode(p.Task(1, p.pack(status))))
    lookups, echoes = [], []
    for _ in range(count):
        _end(engine, status.task_id)
        echoes.append(echo.seconds(sent, received_bytes))
        started = time.perf_counter()
        status = engine.get_match(NAMESPACE, keys)
        lookups.append(time.perf_counter() - started)
        if status.matched_blocks != (blocks if found else 0):
            raise SystemExit(f"{status.matched_blocks} of {blocks} blocks were found")
    _end(engine, status.task_id)
    engine.reset(NAMESPACE)
    return Row(blocks, found, len(sent), received_bytes, lookups, echoes)


def _end(engine: ManagerClient, task_id: int) -> None:
    if task_id:
        engine.cancel([task_id])
    engine.ping()


def idle_share(pid: int, seconds: float) -> float:
    """Of one core, over *seconds*, of all threads of process *pid*."""
    before, started = _cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)
    return (_cpu_seconds(pid) - before) / (time.monotonic() - started)


def _cpu_seconds(pid: int) -> float:
    """Of all threads, also those that have ended: the clock that clock_getcpuclockid(3) names."""
    return time.clock_gettime(~pid << 3 | 2)


def quantile(seconds: list[float], share: float) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))]


def table(rows: list[Row]) -> Iterator[str]:
    yield "| blocks | | sent | received | lookup p50 | p99 | echo p50 | p99 | ratio of p50 |"
    yield "|---:|---|---:|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        lookup, echo = statistics.median(row.lookup_seconds), statistics.median(row.echo_seconds)
        yield (
            f"| {row.blocks} | {'hit' if row.found else 'miss'} "
            f"| {row.sent_bytes} B | {row.received_bytes} B "
            f"| {lookup * 1e6:.0f} µs | {quantile(row.lookup_seconds, 0.99) * 1e6:.0f} µs "
            f"| {echo * 1e6:.0f} µs | {quantile(row.echo_seconds, 0.99) * 1e6:.0f} µs "
            f"| {lookup / echo:.1f} |"
        )


def is_within(what: str, value: float, bound: float, show: Callable[[float], str]) -> bool:
    """Whether *value* is, which is printed."""
    word = "within" if value <= bound else "ABOVE"
    print(f"{what}: {show(value)}, {word} {show(bound)}")
    return value <= bound


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer lookups, shorter idling")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement")
    options = parser.parse_args()
    count, idle_seconds = (200, 2.0) if options.quick else (2000, 10.0)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        process, path = stack.enter_context(running_server(Path(folder)))
        alone = idle_share(process.pid, idle_seconds)
        engine = stack.enter_context(contextlib.closing(client_of(path, "engine")))
        stack.enter_context(contextlib.closing(client_of(path, "worker")))
        attached = idle_share(process.pid, idle_seconds)
        echo = stack.enter_context(contextlib.closing(Echo()))
        rows = []
        for blocks in BLOCKS:
            share = max(1, count // 10) if blocks > 1000 else count
            rows += [measure(engine, echo, blocks, found, share) for found in (True, False)]
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}\n")
    print("\n".join(table(rows)), end="\n\n")
    met = []
    for row in rows:
        if row.blocks == BOUND_BLOCKS:
            what = f"lookup of {row.blocks} blocks, {'hit' if row.found else 'miss'}, p50"
            median = statistics.median(row.lookup_seconds)
            met.append(is_within(what, median, BOUND_SECONDS, lambda s: f"{s * 1e3:.3f} ms"))
    for name, share_ in (("no client", alone), ("an engine and its worker", attached)):
        what = f"idle server with {name}, share of a core"
        met.append(is_within(what, share_, IDLE_BOUND, lambda s: f"{s:.3%}"))
    if options.json:
        found = {
            "rows": [asdict(row) for row in rows],
            "idle": {"alone": alone, "attached": attached},
        }
        options.json.write_text(json.dumps(found))
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
