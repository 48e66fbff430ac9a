"""The cache server: a ``KVManager`` behind a unix socket, one thread a connection."""

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError, KVStrataError, ProtocolError
from kvstrata.core.types import EXACT, BlockFormat
from kvstrata.manager.manager import KVManager, OnPrefault
from kvstrata.manager.tasks import TaskStatus
from kvstrata.server import protocol as p
from kvstrata.server import sockets

_log = logging.getLogger(__name__)

_SEND_SECONDS: Final = 5  # a client that reads nothing for so long is disconnected
_ACCEPT_PAUSE_SECONDS: Final = 0.1  # out of descriptors: some may be closed by then


class Server:
    """Serves until ``stop``.

    The block size decides the geometry of all tiers. It is given, or told by the first engine;
    an engine with another one is refused.
    """

    def __init__(
        self,
        config: Config,
        path: Path,
        *,
        block_bytes: int | None = None,
        block_format: BlockFormat = EXACT,
        on_prefault: OnPrefault | None = None,
    ) -> None:
        self._on_prefault = on_prefault
        self.config = config
        self.path = path
        self._lock = threading.Lock()  # guards the two below
        self._manager: KVManager | None = None
        self._connections: set[_Connection] = set()
        self._stopping = threading.Event()
        self._listener = sockets.listen(path)
        if block_bytes is not None:
            try:
                self.open(block_bytes, block_format)
            except KVStrataError:
                self._close()
                raise

    @property
    def manager(self) -> KVManager | None:
        return self._manager

    def open(self, block_bytes: int, block_format: BlockFormat) -> KVManager:
        """The manager; raises ``ConfigError`` if it was opened for other blocks."""
        wanted = self.config.block_format
        if block_format.partition(" ")[0] != wanted:
            raise ConfigError(
                f"the engine wants blocks kept as {block_format!r}, this server keeps {wanted!r}",
                hint="set block_format alike for the server and its engines",
            )
        with self._lock:
            if self._manager is None:
                self._manager = KVManager(
                    self.config,
                    block_bytes=block_bytes,
                    block_format=block_format,
                    on_prefault=self._on_prefault,
                )
            elif self._manager.block_format != block_format:
                raise ConfigError(
                    f"this server keeps blocks as {self._manager.block_format!r}, "
                    f"not as {block_format!r}",
                    hint="start one server for each type of elements, each with its own socket",
                )
            elif self._manager.block_bytes != block_bytes:
                raise ConfigError(
                    f"blocks of {block_bytes} bytes do not fit this server, whose blocks take "
                    f"{self._manager.block_bytes}: it serves another model or tokens_per_block",
                    hint="start one server for each block size, each with its own socket",
                )
            return self._manager

    def serve(self) -> None:
        """Accept connections until ``stop`` is called from another thread or a signal handler."""
        while not self._stopping.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as e:
                if not self._stopping.wait(_ACCEPT_PAUSE_SECONDS):
                    _log.warning("a connection cannot be accepted: %s", e)
                continue
            if sockets.peer_uid(sock) != os.getuid():
                _log.warning("a connection of uid %d is refused", sockets.peer_uid(sock))
                sock.close()
                continue
            connection = _Connection(self, sock)
            with self._lock:
                self._connections.add(connection)
            threading.Thread(target=connection.run, name="kvstrata-client", daemon=True).start()
        self._close()

    def stop(self) -> None:
        """End ``serve``; blocks not yet on disk are written first, within the drain timeout."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def forget(self, connection: "_Connection") -> None:
        with self._lock:
            self._connections.discard(connection)

    def _close(self) -> None:
        self.path.unlink(missing_ok=True)
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.hang_up()
        if self._manager:
            self._manager.close()


class _Connection:
    """One client: reads requests, answers them in order, passes settled tasks on."""

    def __init__(self, server: Server, sock: socket.socket) -> None:
        timeout = struct.pack("ll", _SEND_SECONDS, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._server = server
        self._sock = sock
        self._send_lock = threading.Lock()
        self._hello: p.Hello | None = None
        self._manager: KVManager | None = None
        self._owner: int | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            p.Hello: self._on_hello,
            p.Mapped: self._on_mapped,
            p.Register: self._on_register,
            p.GetMatch: self._on_get_match,
            p.PutMatch: self._on_put_match,
            p.Launch: lambda r: self._cache().launch(r.task_ids, owner=self._me()),
            p.Complete: lambda r: self._cache().complete(r.task_ids, owner=self._me()),
            p.Fail: lambda r: self._cache().fail(r.task_ids, owner=self._me()),
            p.Cancel: lambda r: self._cache().cancel(r.task_ids, owner=self._me()),
            p.TryWait: self._on_try_wait,
            p.Prefetch: self._on_prefetch,
            p.Reset: self._on_reset,
            p.Stats: self._on_stats,
            p.Workers: lambda r: self._send(p.Number(r.seq, self._cache().workers(self._me()))),
            p.Ping: lambda r: self._send(p.Number(r.seq, 0)),
        }

    def run(self) -> None:
        """Until the client or the server ends it; then everything the client held is released."""
        try:
            while (body := self._receive()) is not None:
                request = p.decode_request(body)
                try:
                    self._handlers[type(request)](request)
                except ProtocolError:
                    raise
                except KVStrataError as e:
                    self._refuse(request, e)
        except (KVStrataError, OSError) as e:
            _log.warning(
                "a connection is closed: %s", str(e)
            )  # not e: a handler that keeps it keeps all that run held
        except Exception:  # noqa: BLE001 - thread top: what the client held must be released
            _log.exception("a connection is closed by a bug")
        finally:
            self._server.forget(self)
            if self._manager and self._owner is not None:
                self._manager.disconnect(self._owner)
            self._sock.close()

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    # -- requests ----------------------------------------------------------------------------

    def _on_hello(self, hello: p.Hello) -> None:
        if self._hello is not None:
            raise ProtocolError("a second hello")
        if hello.version != p.PROTOCOL_VERSION:
            raise ConfigError(
                f"the client speaks protocol {hello.version}, this server {p.PROTOCOL_VERSION}",
                hint="install the same version of kvstrata on both sides",
            )
        self._hello = hello
        if hello.role == "observer":
            self._manager = self._server.manager
            self._send(p.Welcome(hello.seq, b"", 0, 0))
        elif hello.role not in {"engine", "worker"}:
            raise ProtocolError(f"unknown role {hello.role!r}")
        elif hello.block_bytes < 1 or hello.world_size < 1:
            raise ProtocolError("blocks without bytes, or an engine without workers")
        else:
            self._admit(hello)

    def _admit(self, hello: p.Hello) -> None:
        manager = self._manager = self._server.open(hello.block_bytes, hello.block_format)
        descriptors = []
        if hello.role == "engine":
            lasting = self._server.config.lasting_tiers
            if not hello.persistent and lasting:
                raise ConfigError(
                    "the engine's block hashes or weights cannot be told apart in its next life, "
                    f"and this server has a {lasting[0].kind} tier",
                    hint="see the engine's log for the setting to change, or use a server "
                    "with host memory alone",
                )
            self._owner = manager.connect_engine(hello.session, hello.world_size)
        else:
            descriptors = [manager.memory.mapping.fd]
        mapping = manager.memory.mapping
        welcome = p.Welcome(hello.seq, manager.server_id, mapping.slots, mapping.slot_bytes)
        self._send(welcome, descriptors)

    def _on_mapped(self, request: p.Mapped) -> None:
        hello = self._hello
        if hello is None or hello.role != "worker" or self._owner is not None:
            raise ProtocolError("mapped is for workers, once, after hello")
        self._owner = self._cache().connect_worker(hello.session, hello.rank)
        self._send(p.Number(request.seq, 0))

    def _on_register(self, request: p.Register) -> None:
        namespace = p.checked_namespace(request.namespace)
        self._cache().register_namespace(namespace, request.parts)

    def _on_get_match(self, request: p.GetMatch) -> None:
        status = self._cache().get_match(
            p.checked_namespace(request.namespace),
            p.split_keys(request.keys),
            owner=self._me(),
            settled=self._on_settled,
        )
        self._send(p.Task(request.seq, status))

    def _on_settled(self, status: TaskStatus) -> None:
        try:
            self._send(p.Settled(status))
        except OSError:  # part of the frame may be out: the client cannot be talked to any more
            self.hang_up()

    def _on_put_match(self, request: p.PutMatch) -> None:
        status = self._cache().put_match(
            p.checked_namespace(request.namespace),
            p.split_keys(request.keys),
            parent=p.checked_parent(request.parent),
            owner=self._me(),
        )
        self._send(p.Task(request.seq, status))

    def _on_try_wait(self, request: p.TryWait) -> None:
        statuses = self._cache().try_wait(request.task_ids)
        self._send(p.Tasks(request.seq, list(statuses.values())))

    def _on_prefetch(self, request: p.Prefetch) -> None:
        namespace, keys = p.checked_namespace(request.namespace), p.split_keys(request.keys)
        task_id = self._cache().prefetch(namespace, keys, owner=self._me())
        self._send(p.Number(request.seq, task_id))

    def _on_reset(self, request: p.Reset) -> None:
        dropped = self._cache().reset(p.checked_namespace(request.namespace))
        self._send(p.Number(request.seq, dropped))

    def _on_stats(self, request: p.Stats) -> None:
        manager = self._server.manager
        self._send(p.Report(request.seq, manager.stats() if manager else None))

    # -- plumbing ----------------------------------------------------------------------------

    def _cache(self) -> KVManager:
        if self._manager is None:
            raise ProtocolError("no hello came first")
        return self._manager

    def _me(self) -> int:
        if self._owner is None:
            raise ProtocolError("only an engine has tasks")
        return self._owner

    def _refuse(self, request: p.Request, error: KVStrataError) -> None:
        seq = getattr(request, "seq", None)
        if seq is None:
            _log.warning("a request failed: %s", error)
            return
        message = str(error.args[0]) if error.args else str(error)
        self._send(p.Refused(seq, error.code, message, error.hint))

    def _send(self, reply: p.Reply, descriptors: list[int] | None = None) -> None:
        frame = p.encode(reply)
        with self._send_lock:
            if descriptors:
                sent = socket.send_fds(self._sock, [frame], descriptors)
                frame = frame[sent:]
            self._sock.sendall(frame)

    def _receive(self) -> memoryview | None:
        header = self._receive_exactly(p.LENGTH.size)
        if header is None:
            return None
        body = self._receive_exactly(p.frame_length(header))
        if body is None:
            raise ProtocolError("a frame ends early")
        return body

    def _receive_exactly(self, count: int) -> memoryview | None:
        """*count* bytes, or None if the client has hung up before the first of them."""
        buffer = memoryview(bytearray(count))
        got = 0
        while got < count:
            n = self._sock.recv_into(buffer[got:])
            if n == 0:
                if got:
                    raise ProtocolError("a frame ends early")
                return None
            got += n
        return buffer
