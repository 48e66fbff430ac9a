"""The scheduler half's line to the cache server: kept up, given up, taken up again."""

import logging
import secrets
import time
from pathlib import Path
from typing import Final

from kvstrata.core.config import Config
from kvstrata.core.errors import KVStrataError, LimitExceeded, ProtocolError, TierUnavailable
from kvstrata.core.types import NamespaceId
from kvstrata.server import protocol as p
from kvstrata.server.client import ManagerClient, Pending, refusal
from kvstrata.server.embedded import EmbeddedServer

_log = logging.getLogger(__name__)

_NO_SERVER: Final = b""
# An engine's later namespaces have random names: nobody asks for them again.
_OWED_RESETS: Final = 64
_WORKERS_SECONDS: Final = 1.0  # they look every 50 ms; without them the engine starts all the same
_WORKERS_POLL_SECONDS: Final = 0.01


class CacheLink:
    """A connection that may be absent: then requests are not sent and nobody waits.

    No method waits, but ``poll`` as long as it is told. ``number`` grows with each connection:
    what was asked of an earlier one is void.
    """

    def __init__(
        self, config: Config, path: Path, hello: p.Hello, server: EmbeddedServer | None
    ) -> None:
        self.number = 0
        self.server_id = _NO_SERVER
        self._config = config
        self._path = path
        self._hello = hello
        self._life = secrets.token_hex(16)
        self._server = server
        self._client: ManagerClient | None = None
        self._welcomed = False
        self._probe: Pending | None = None  # outstanding while the server is too slow
        self._next_try = 0.0
        self._told = ""
        self._first_namespace: NamespaceId | None = None  # of which there may be old blocks
        self._namespaces: dict[NamespaceId, dict[str, str]] = {}  # told to every new server
        self._resets: dict[NamespaceId, Pending | None] = {}  # until they are answered
        self._writing: set[int] = set()  # tasks, of whatever connection

    @property
    def ready(self) -> bool:
        """Whether there is a server that answers."""
        return self._welcomed and self._probe is None

    def connect(self, timeout_seconds: float) -> None:
        """Wait for the first connection, and a moment for the workers to map the host tier.

        Raises what the server objects to.
        """
        self._open()
        assert self._client is not None
        self._client.wait_welcome(timeout_seconds)
        self._take_welcome()
        self._wait_for_workers(self._client)

    def tick(self) -> None:
        """Take in what has arrived, and try to connect if it is time to."""
        if self._client is not None:
            self.poll(0.0)
        elif time.monotonic() >= self._next_try:
            self._next_try = time.monotonic() + self._config.reconnect_seconds
            try:
                if self._server is not None:
                    self._server.revive()
                self._open()
            except (KVStrataError, OSError) as e:
                self._drop(e)

    def poll(self, timeout_seconds: float) -> None:
        """Take in what has arrived, waiting for it up to *timeout_seconds*."""
        if self._client is None:
            return
        try:
            while self._client.poll(timeout_seconds):
                timeout_seconds = 0.0
            self._take_welcome()
        except KVStrataError as e:
            self._drop(e)

    def submit(self, request: p.Request) -> Pending | None:
        """Send *request* if there is a server, and it is not too long to be sent."""
        if self._client is None or not self._welcomed:
            return None
        try:
            return self._client.submit(request)
        except LimitExceeded as e:
            _log.warning("going on without the cache for one request: %s", e)
            return None
        except KVStrataError as e:
            self._drop(e)
            return None

    def abandon(self, pending: Pending, number: int) -> None:
        """Nobody waits for *pending*, of connection *number*, any more."""
        if self._client is not None and number == self.number:
            try:
                self._client.abandon(pending)
            except KVStrataError as e:
                self._drop(e)

    def too_slow(self) -> None:
        """A request was not answered in time: ask nothing more until a ping is answered."""
        if self._probe is None and self._client is not None:
            _log.warning("the cache server does not answer: going on without a cache")
            self._probe = self.submit(p.Ping(0))

    def register(self, namespace: NamespaceId, parts: dict[str, str]) -> None:
        """Blocks of *namespace* follow; every server is told what it stands for."""
        self._first_namespace = self._first_namespace or namespace
        self._namespaces = {namespace: parts}
        self.submit(p.Register(namespace, parts))

    def reset(self, namespace: NamespaceId) -> None:
        """Drop *namespace*, now or as soon as there is a server; asked until it is answered.

        Of many that are owed the first ever registered and the latest are dropped.
        """
        self._resets.pop(namespace, None)
        self._resets[namespace] = self.submit(p.Reset(0, namespace))
        if len(self._resets) > _OWED_RESETS:
            oldest = (n for n in self._resets if n != self._first_namespace)
            del self._resets[next(oldest)]

    def write_begins(self, task_id: int) -> None:
        """Workers may write into the slots of *task_id* from now, whatever becomes of the line."""
        self._writing.add(task_id)

    def write_ended(self, task_id: int) -> None:
        """No worker does any more; the next connection will not count it among the running."""
        self._writing.discard(task_id)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client, self._welcomed = None, False
        if self._server is not None:
            self._server.close()

    def _open(self) -> None:
        self._hello.seq = 0
        # With too many to tell, none is told, and nothing of earlier connections is given back.
        can_tell = len(self._writing) <= p.MAX_TASK_IDS
        self._hello.life = self._life if can_tell else ""
        self._hello.running = sorted(self._writing) if can_tell else []
        self._client = ManagerClient(
            self._path, self._hello, timeout_seconds=self._config.lookup_timeout_seconds
        )
        self.number += 1

    def _wait_for_workers(self, client: ManagerClient) -> None:
        """The workers have been looking for the server before: the first request shall find them."""
        deadline = time.monotonic() + _WORKERS_SECONDS
        while client.workers() < self._hello.world_size and time.monotonic() < deadline:
            time.sleep(_WORKERS_POLL_SECONDS)

    def _take_welcome(self) -> None:
        if self._client is None:
            return
        if self._probe is not None and self._probe.reply is not None:
            self._probe = None
            _log.warning("the cache server answers again")
        for namespace in [n for n, asked in self._resets.items() if asked and _is_done(asked)]:
            del self._resets[namespace]
        reply = self._client.welcome.reply
        if self._welcomed or reply is None:
            return
        if isinstance(reply, p.Refused):
            raise refusal(reply)
        if not isinstance(reply, p.Welcome):
            raise ProtocolError(f"{type(reply).__name__} is no answer to a hello")
        self._welcomed, self._told = True, ""
        self.server_id = reply.server_id
        _log.info("connected to the cache server at %s", self._path)
        ended = [task_id for task_id in self._hello.running if task_id not in self._writing]
        if ended:
            self.submit(p.Fail(ended))
        for namespace in self._resets:
            self._resets[namespace] = self.submit(p.Reset(0, namespace))
        for namespace, parts in self._namespaces.items():
            self.submit(p.Register(namespace, parts))

    def _drop(self, error: Exception) -> None:
        if self._client is not None:
            self._client.close()
        self._client, self._welcomed, self._probe = None, False, None
        self._next_try = time.monotonic() + self._config.reconnect_seconds
        if str(error) != self._told:
            self._told = str(error)
            _log.warning("going on without a cache: %s", error)


def _is_done(reset: Pending) -> bool:
    """Whether the server has carried out *reset*, or will when its tiers are back."""
    if isinstance(reset.reply, p.Refused):
        return reset.reply.code == TierUnavailable.code
    return reset.reply is not None
