"""Servers in this process, and clients that speak the wire by hand."""

import gc
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.caches import BLOCK_BYTES, PATIENCE_SECONDS

from kvstrata.core.config import Config
from kvstrata.server import protocol as p
from kvstrata.server.client import ManagerClient
from kvstrata.server.limits import Limits
from kvstrata.server.server import Server


@contextmanager
def serving(
    config: Config,
    path: Path,
    *,
    block_bytes: int | None = BLOCK_BYTES,
    limits: Limits = Limits(),  # noqa: B008 - immutable
) -> Iterator[Server]:
    """A server on a thread; at the end nothing of it is left."""
    server = Server(config, path, block_bytes=block_bytes, limits=limits)
    thread = threading.Thread(target=server.serve, name="test-serve")
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
        assert not path.exists()


def engine(
    path: Path,
    session: str = "e",
    *,
    world_size: int = 1,
    life: str = "",
    running: Sequence[int] = (),
) -> ManagerClient:
    hello = p.Hello(0, p.PROTOCOL_VERSION, "engine", session, BLOCK_BYTES, world_size=world_size)
    hello.life, hello.running = life, list(running)
    client = ManagerClient(path, hello, timeout_seconds=PATIENCE_SECONDS)
    client.wait_welcome(PATIENCE_SECONDS)
    return client


def worker(path: Path, session: str = "e", rank: int = 0) -> ManagerClient:
    """A worker that has mapped the host tier: its descriptor waits to be taken."""
    client = ManagerClient(path, worker_hello(session, rank), timeout_seconds=PATIENCE_SECONDS)
    client.wait_welcome(PATIENCE_SECONDS)
    client._ask(p.Mapped(0), p.Number)
    return client


def worker_hello(session: str = "e", rank: int = 0) -> p.Hello:
    return p.Hello(0, p.PROTOCOL_VERSION, "worker", session, BLOCK_BYTES, rank=rank)


class RawClient:
    """A socket to a server, and nothing that keeps it honest."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(PATIENCE_SECONDS)
        self.sock.connect(str(path))

    def send(self, *messages: p.Request) -> None:
        self.sock.sendall(b"".join(p.encode(m) for m in messages))

    def receive(self) -> p.Reply | None:
        """The next reply, None once the server has hung up."""
        header = self._exactly(p.LENGTH.size)
        if header is None:
            return None
        body = self._exactly(p.frame_length(header))
        assert body is not None, "a frame ends early"
        return p.decode_reply(body)

    def _exactly(self, count: int) -> bytes | None:
        data = b""
        while len(data) < count:
            try:
                piece = self.sock.recv(count - len(data))
            except ConnectionResetError:
                piece = b""
            if not piece:
                assert not data, "the server hung up within a frame"
                return None
            data += piece
        return data

    def push(self, data: bytes) -> bool:
        """Send what there is room for; whether the server still takes anything from this client."""
        self.sock.setblocking(False)
        try:
            while data:
                data = data[self.sock.send(data) :]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def is_hung_up_on(self) -> bool:
        """Whether the server has ended the connection; what it said before is thrown away."""
        self.sock.setblocking(False)
        try:
            while self.sock.recv(1 << 20):
                pass
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        self.sock.close()


def memfds() -> set[tuple[str, int]]:
    """Descriptors of host tiers, with inodes; those of earlier tests may go at any moment."""
    gc.collect()  # a mapping holds one until it is collected
    links = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
    return {(fd, os.stat(fd).st_ino) for fd in links if _is_host_tier(fd)}


def _is_host_tier(fd: str) -> bool:
    return os.path.islink(fd) and "memfd:kvstrata-host" in os.readlink(fd)
