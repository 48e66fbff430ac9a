"""A server without a thread of its own, to be thrown bytes at: as fast as a fuzzer needs it."""

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final
from unittest.mock import patch

from tests.caches import BLOCK_BYTES, config
from tests.fuzz.script import SESSION

from kvstrata.server import protocol as p
from kvstrata.server.server import Server

Script = Callable[[Sequence[int]], Iterator[bytes]]
"""What a client says, piece by piece, knowing the tasks that it has been given so far."""

_TURNS: Final = 100_000  # for one client; it takes as many as it has messages


class _Bugs(logging.Handler):
    """Every exception that was caught only so that others are served on."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


class _Client:
    """One end of a connection, and what was answered there."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.replies: list[p.Reply] = []
        self.tasks: list[int] = []
        self._data = b""
        sock.setblocking(False)

    def receive(self) -> None:
        """Everything that the server says is whole and a reply."""
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            self._data += self.sock.recv(1 << 20)
        while len(self._data) >= 4 and len(self._data) >= 4 + p.frame_length(self._data[:4]):
            end = 4 + p.frame_length(self._data[:4])
            self._take(p.decode_reply(self._data[4:end]))
            self._data = self._data[end:]

    def _take(self, reply: p.Reply) -> None:
        self.replies.append(reply)
        if isinstance(reply, p.Task):
            status = p.unpack(reply.status)
            assert len(status.slots) == len(status.generations)
            self.tasks.append(status.task_id)


class Victim:
    """Hears one client after the other, beside a worker.

    After each client nothing of it may be left and nothing may have been a bug. Every so often all
    slots are counted, and there is another worker: a client's unfinished saves keep their slots
    as long as its worker is there.
    """

    def __init__(self, folder: Path) -> None:
        self._bugs = _Bugs()
        self._log = logging.getLogger("kvstrata")
        self._log.addHandler(self._bugs)
        self._log.propagate = False
        with patch("kvstrata.manager.manager.WRITER_GRACE_SECONDS", 0.0):
            self._server = Server(config(8), folder / "s", block_bytes=BLOCK_BYTES)
        self._board = self._server._switchboard
        self._count = 0
        self._attach_worker()

    def hear(self, script: Script) -> list[p.Reply]:
        """What a client is answered that says *script* and hangs up."""
        client = self._join()
        with client.sock:
            self._turn(client)  # it is let in
            for piece in script(client.tasks):
                self._say(client, piece)
            client.sock.shutdown(socket.SHUT_WR)
            self._turn_until(lambda: len(self._board) == 1, client)
        self._check()
        return client.replies

    def close(self) -> None:
        self._worker.sock.close()
        self._server.stop()
        self._server.serve()
        self._log.propagate = True
        self._log.removeHandler(self._bugs)

    def _attach_worker(self) -> None:
        self._worker = self._join()
        self._ask(p.Hello(0, p.PROTOCOL_VERSION, "worker", SESSION, BLOCK_BYTES))
        self._ask(p.Mapped(1))

    def _join(self) -> _Client:
        ours, theirs = socket.socketpair()
        self._board._admit(theirs)
        return _Client(ours)

    def _say(self, client: _Client, piece: bytes) -> None:
        while piece:
            try:
                piece = piece[client.sock.send(piece) :]
            except BlockingIOError:
                pass
            except OSError:  # hung up on
                return
            self._turn(client)

    def _turn(self, client: _Client) -> None:
        self._board.post(lambda: None)  # a turn waits for something to happen
        self._board.turn()
        client.receive()

    def _turn_until(self, done: Callable[[], bool], client: _Client) -> None:
        for _ in range(_TURNS):
            self._turn(client)
            if done():
                return
        raise AssertionError("the server does not come to an end")

    def _ask(self, request: p.Request) -> None:
        self._worker.replies.clear()
        self._say(self._worker, p.encode(request))
        self._turn_until(lambda: bool(self._worker.replies), self._worker)

    def _check(self) -> None:
        assert not self._bugs.found, self._bugs.found[0]
        assert len(self._board) == 1
        self._count += 1
        if self._count % 8:
            return
        self._ask(p.Ping(7))
        self._worker.sock.close()
        for _ in range(2):
            self._board.post(lambda: None)
            self._board.turn()
        assert len(self._board) == 0
        self._attach_worker()
        manager = self._server.manager
        assert manager is not None
        manager.check()
        report = manager.stats()
        assert (report.running_gets, report.running_puts, report.engines) == (0, 0, [])
        in_host = sum(namespace.host_blocks for namespace in report.namespaces)
        assert report.tiers[0].used_blocks == in_host
