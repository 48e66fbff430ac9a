"""Hot paths through the server's socket, both ends on one thread, and each counted for itself."""

import contextlib
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Final, Literal, ParamSpec, TypeVar

from bench.operations.cache import NAMESPACE, random_keys
from bench.operations.count import Count

from kvstrata.core.config import Config
from kvstrata.manager.tasks import TaskStatus
from kvstrata.server import protocol as p
from kvstrata.server.client import ManagerClient
from kvstrata.server.server import Server

__all__ = ["load", "save"]

P = ParamSpec("P")
T = TypeVar("T")
End = Literal["client", "server"]

_BLOCKS: Final = 512
_SLOTS: Final = 2 * _BLOCKS
_BLOCK_BYTES: Final = 4096
_SESSION: Final = "operations"


def load(count: Count, end: End) -> Generator[None]:
    """Of a prompt that is all there: ``get_match``, and news that its copies begin and have ended."""
    keys = [key.tobytes() for key in random_keys(0, _BLOCKS)]
    with _link(count, end) as link:
        link.carry_out(p.PutMatch(0, NAMESPACE, p.join_keys(keys), b""))
        while True:
            found = link.carry_out(p.GetMatch(0, NAMESPACE, p.join_keys(keys)))
            assert found.matched_blocks == _BLOCKS
            yield


def save(count: Count, end: End) -> Generator[None]:
    """Of a prompt into a full host tier: ``put_match``, and news of its copies."""
    with _link(count, end) as link:
        for turn in range(1 << 20):
            keys = [key.tobytes() for key in random_keys(turn, _BLOCKS)]
            reserved = link.carry_out(p.PutMatch(0, NAMESPACE, p.join_keys(keys), b""))
            assert len(reserved.slots) == _BLOCKS
            yield


class _Link:
    """A server that takes its turns when it is told to, and an engine's connection to it."""

    def __init__(self, folder: Path, count: Count, counted_end: End) -> None:
        capacity = f"{_SLOTS * _BLOCK_BYTES // 1024}KiB"
        tiers = [{"kind": "host", "capacity": capacity}]
        config = Config.model_validate({"tiers": tiers, "prefault": False})
        self._count, self._counted_end = count, counted_end
        self._server = Server(config, folder / "s", block_bytes=_BLOCK_BYTES)
        self._clients: list[ManagerClient] = []
        self._engine = self._join("engine")
        self._ask(self._join("worker"), p.Mapped(0))

    def carry_out(self, request: p.GetMatch | p.PutMatch) -> TaskStatus:
        """What *request* is answered, the copies for it having begun and ended."""
        status = self._ask(self._engine, request)
        assert status is not None
        self._on("client", self._engine.launch, [status.task_id])
        self._on("client", self._engine.complete, [status.task_id])
        self._ask(self._engine, p.Ping(0))
        return status

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._server.stop()
        self._server.serve()

    def _join(self, role: str) -> ManagerClient:
        hello = p.Hello(0, p.PROTOCOL_VERSION, role, _SESSION, _BLOCK_BYTES)
        client = ManagerClient(self._server.path, hello)
        self._clients.append(client)
        while client.welcome.reply is None:
            self._turn()
            client.poll()
        return client

    def _ask(self, client: ManagerClient, request: p.Request) -> TaskStatus | None:
        pending = self._on("client", client.submit, request)
        while pending.reply is None:
            self._on("server", self._turn)
            self._on("client", client.poll)
        return pending.status

    def _turn(self) -> None:
        self._server._switchboard.turn()

    def _on(self, end: End, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if end == self._counted_end:
            return self._count(call, *args, **kwargs)
        return call(*args, **kwargs)


@contextlib.contextmanager
def _link(count: Count, end: End) -> Iterator[_Link]:
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(_Link(Path(folder), count, end)) as link,
    ):
        yield link
