"""Remote engines for benchmarks: real servers on loopback, our store on them, and the raw path."""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from bench.remote_raw import RawMooncake, RawPath, RawResp, RawS3
from tests.remote.mooncake_engine import MooncakeEngine
from tests.remote.objects_engine import BUCKET, KEY_ID, SECRET, RcloneEngine
from tests.remote.valkey_servers import Server

from kvstrata.storage.mapping import HostMapping
from kvstrata.storage.remote.mooncake import agent
from kvstrata.storage.remote.mooncake.store import MooncakeStore
from kvstrata.storage.remote.valkey.store import ValkeyStore
from kvstrata.storage.store import Store

__all__ = ["ENGINES", "Engine", "library_pids"]

_TIMEOUT_SECONDS: Final = 60.0
_POOL_BYTES: Final = 2 << 30


class Engine(NamedTuple):
    """A server that runs, and the two ways to it. *memory* is where all buffers are."""

    open_store: Callable[[int, HostMapping], Store]  # of blocks of so many bytes
    open_raw: Callable[[HostMapping], RawPath]


@contextmanager
def _valkey_tcp(folder: Path) -> Iterator[Engine]:
    server = Server(folder)

    def dial() -> socket.socket:
        connection = socket.create_connection(server.address)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    try:
        yield _valkey(f"valkey://127.0.0.1:{server.port}", dial)
    finally:
        server.kill()


@contextmanager
def _valkey_unix(folder: Path) -> Iterator[Engine]:
    path = folder / "socket"
    server = Server(folder, "--unixsocket", str(path))

    def dial() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        return connection

    try:
        yield _valkey(f"unix://{path}", dial)
    finally:
        server.kill()


def _valkey(url: str, dial: Callable[[], socket.socket]) -> Engine:
    return Engine(
        lambda block_bytes, _memory: ValkeyStore(
            url, block_bytes=block_bytes, timeout_seconds=_TIMEOUT_SECONDS
        ),
        lambda _memory: RawResp(dial),
    )


@contextmanager
def _s3(folder: Path) -> Iterator[Engine]:
    server = RcloneEngine()
    server.start(folder)
    host, port = server.address()
    try:
        yield Engine(
            lambda block_bytes, _memory: server.open(
                block_bytes=block_bytes, timeout_seconds=_TIMEOUT_SECONDS
            ),
            lambda _memory: RawS3(f"{host}:{port}", BUCKET, (KEY_ID, SECRET)),
        )
    finally:
        server.stop()


@contextmanager
def _mooncake(folder: Path) -> Iterator[Engine]:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    server = MooncakeEngine(handshake=True, segment_bytes=_POOL_BYTES)
    server.start(folder)
    master = f"127.0.0.1:{server.port}"
    try:
        yield Engine(
            lambda block_bytes, memory: MooncakeStore(
                f"mooncake://{master}",
                block_bytes=block_bytes,
                timeout_seconds=_TIMEOUT_SECONDS,
                memory=memory,
            ),
            lambda memory: RawMooncake(master, memory),
        )
    finally:
        server.stop()


ENGINES: Final[dict[str, Callable[[Path], AbstractContextManager[Engine]]]] = {
    "valkey": _valkey_tcp,
    "valkey-unix": _valkey_unix,
    "s3": _s3,
    "mooncake": _mooncake,
}


def library_pids() -> Sequence[int]:
    """The processes in which our stores run Mooncake's library."""
    children = Path("/proc/self/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    program = agent.__name__.encode()
    return [pid for pid in pids if program in Path(f"/proc/{pid}/cmdline").read_bytes()]
