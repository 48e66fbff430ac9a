"""A server of the program's own, and an engine that saves and finds prompts in it."""

import hashlib
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from tests.cli.processes import running, until

from kvstrata.core.types import BLOCK_KEY_BYTES
from kvstrata.server import protocol as p
from kvstrata.server.client import ManagerClient

BLOCK_BYTES = 65536
NAMESPACE = b"n" * 16


@contextmanager
def serving(place: Path, *arguments: str) -> Iterator[Path]:
    path, log = place / "s.sock", place / "server.log"
    with running("server", "--socket", str(path), *arguments, log=log) as process:
        until(lambda: "ready" in log.read_text() or process.poll() is not None, 30, log)
        assert process.poll() is None, log.read_text()
        yield path
    assert process.returncode == 0, log.read_text()


@contextmanager
def engine(path: Path, session: str = "session-1", model: str = "tiny") -> Iterator[ManagerClient]:
    """An engine that has told its block size, with its one worker attached."""
    with ExitStack() as stack:
        hello = p.Hello(0, p.PROTOCOL_VERSION, "engine", session, BLOCK_BYTES)
        client = stack.enter_context(closing(ManagerClient(path, hello)))
        client.wait_welcome(10)
        hello = p.Hello(0, p.PROTOCOL_VERSION, "worker", session, BLOCK_BYTES)
        worker = stack.enter_context(closing(ManagerClient(path, hello)))
        worker.wait_welcome(10)
        mapped = worker.submit(p.Mapped(0))
        while mapped.reply is None:
            worker.poll(10)
        client.register_namespace(NAMESPACE, {"model": model, "engine": "test 1"})
        yield client


def prompt(name: str, blocks: int) -> list[bytes]:
    return [hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(blocks)]


def save(client: ManagerClient, keys: list[bytes], request: str = "") -> None:
    task = client.put_match(NAMESPACE, keys, request=request)
    client.launch([task.task_id])
    client.complete([task.task_id])
    client.ping()


def find(client: ManagerClient, keys: list[bytes], request: str = "") -> int:
    """How many of *keys* are loaded."""
    task = client.get_match(NAMESPACE, keys, request=request)
    client.launch([task.task_id])
    client.complete([task.task_id])
    client.ping()
    return task.matched_blocks


def unknown(blocks: int) -> list[bytes]:
    return [secrets.token_bytes(BLOCK_KEY_BYTES) for _ in range(blocks)]
