"""The line to the cache server is watched, and made anew, without any step of the engine."""

import logging
import secrets
import threading
import time
import weakref
from pathlib import Path
from typing import Final, NamedTuple

from kvstrata.core.config import Config
from kvstrata.core.errors import KVStrataError, ProtocolError
from kvstrata.server import protocol as p
from kvstrata.server.client import ManagerClient, refusal
from kvstrata.server.embedded import EmbeddedServer

_log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.25  # between two looks at the line; one costs microseconds
_WELCOME_SECONDS: Final = 0.05  # one that has opened its tiers answers sooner
_CLOSE_SECONDS: Final = 1.0  # for a look that is under way


class Dialled(NamedTuple):
    """A connection that nobody uses yet."""

    client: ManagerClient
    running: list[int]  # tasks of earlier connections that the server was told are being written


class Redial:
    """Watches the connection that is in use; when it has ended, makes the next, on a thread.

    * One attempt every ``reconnect_seconds``, until one is welcomed. It waits in ``take`` for the
      engine's thread: nothing that a step sees changes within the step.
    * From the moment that a server may be told which writes still run, none begins, until the
      connection to that server is taken. So no slot that it takes for free is written to.
    * No method waits but ``close``, a moment for the thread.
    * The thread ends with ``close``, or when nobody refers to this object any more.
    """

    def __init__(
        self, config: Config, path: Path, hello: p.Hello, server: EmbeddedServer | None
    ) -> None:
        """Nothing is watched or made by itself before ``start``."""
        self._path = path
        self._hello = hello
        self._life = secrets.token_hex(16)
        self._server = server
        self._timeout_seconds = config.lookup_timeout_seconds
        self._pause_seconds = config.reconnect_seconds
        self._next_try = 0.0
        self._told = ""
        self._dialled: Dialled | None = None  # not welcomed yet; the thread's alone
        self._lock = threading.Lock()  # guards what follows; held for no call that waits
        self._line: ManagerClient | None = None  # the engine's, unless it has ended
        self._welcomed: Dialled | None = None
        self._writing: set[int] = set()  # tasks, of whatever connection
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """From now on there is a thread."""
        look_seconds = min(_LOOK_SECONDS, self._pause_seconds)
        self._thread = threading.Thread(
            target=_keep_looking,
            args=(weakref.ref(self), self._stop, look_seconds),
            name="kvstrata-redial",
            daemon=True,
        )
        self._thread.start()

    def dial(self) -> Dialled:
        """Connect and say hello; for the thread, and before ``start``."""
        self._next_try = time.monotonic() + self._pause_seconds
        if self._server is not None:
            self._server.revive()
        with self._lock:
            running = sorted(self._writing)
        # With too many to tell, none is told, and nothing of earlier connections is given back.
        can_tell = len(running) <= p.MAX_TASK_IDS
        self._hello.seq = 0
        self._hello.life = self._life if can_tell else ""
        self._hello.running = running if can_tell else []
        client = ManagerClient(self._path, self._hello, timeout_seconds=self._timeout_seconds)
        return Dialled(client, self._hello.running)

    def use(self, client: ManagerClient) -> None:
        """*client* is the line from now on: watch it."""
        with self._lock:
            self._line = client
        _log.info("connected to the cache server at %s", self._path)

    def take(self) -> Dialled | None:
        """The next line, if there is one: it is in use from now on."""
        if self._welcomed is None:
            return None
        with self._lock:
            taken, self._welcomed = self._welcomed, None
            if taken is not None:
                self._line = taken.client
        return taken

    def lost(self, client: ManagerClient) -> bool:
        """*client* is of no more use; whether that is news."""
        with self._lock:
            is_news = self._line is client
            if is_news:
                self._line = None
        return is_news

    def write_begins(self, task_id: int) -> bool:
        """Whether workers may write into the slots of *task_id*: not if the line has ended."""
        with self._lock:
            if self._line is not None:
                self._writing.add(task_id)
            return self._line is not None

    def write_ended(self, task_id: int) -> None:
        """No worker writes into the slots of *task_id* any more."""
        with self._lock:
            self._writing.discard(task_id)

    def still_written(self, task_ids: list[int]) -> set[int]:
        """Those of *task_ids* whose writes have not ended."""
        with self._lock:
            return self._writing.intersection(task_ids)

    def close(self) -> None:
        """End the thread and what it has made; idempotent. The line in use stays the caller's."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        for dialled in (self._dialled, self._welcomed):
            if dialled is not None:
                dialled.client.close()
        self._dialled = self._welcomed = None
        if self._server is not None:
            self._server.close()

    # -- on the thread -----------------------------------------------------------------------

    def look(self) -> None:
        """Do what is to be done now."""
        if self._has_line():
            return
        try:
            self._connect()
        except (KVStrataError, OSError) as e:
            if self._dialled is not None:
                self._dialled.client.close()
                self._dialled = None
            self._complain(str(e))

    def _has_line(self) -> bool:
        """Whether there is a connection, in use or for the next step."""
        with self._lock:
            spare = self._welcomed
            client = spare.client if spare is not None else self._line
            if client is None:
                return False
            if not client.is_hung_up:
                return True
            self._line = self._welcomed = None
        if spare is not None:
            spare.client.close()
        self._complain("the cache server has hung up")
        return False

    def _connect(self) -> None:
        """One step further: call the server, or hear what it says."""
        if self._dialled is None:
            if time.monotonic() < self._next_try:
                return
            self._dialled = self.dial()
        client = self._dialled.client
        client.poll(_WELCOME_SECONDS)
        reply = client.welcome.reply
        if reply is None:
            return
        if isinstance(reply, p.Refused):
            raise refusal(reply)
        if not isinstance(reply, p.Welcome):
            raise ProtocolError(f"{type(reply).__name__} is no answer to a hello")
        _log.info("connected to the cache server at %s", self._path)
        self._told = ""
        with self._lock:
            self._welcomed, self._dialled = self._dialled, None

    def _complain(self, problem: str) -> None:
        if problem != self._told:
            self._told = problem
            _log.warning("going on without a cache: %s", problem)


def _keep_looking(
    redial: "weakref.ref[Redial]", stop: threading.Event, look_seconds: float
) -> None:
    """The thread. It holds no connection and no embedded server alive."""
    while not stop.wait(look_seconds):
        found = redial()
        if found is None:
            return
        found.look()
        del found
