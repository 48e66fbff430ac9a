"""How a worker maps the host tier of a server, and maps it again when the server is another one."""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvstrata.core.errors import KVStrataError, ProtocolError, ServerUnavailable
from kvstrata.server import protocol as p
from kvstrata.server.client import ManagerClient
from kvstrata.storage.mapping import HostMapping

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.05  # a request may wait for it
_MOST_RETRY_SECONDS = 1.0  # each attempt takes a core from an engine that computes on all of them
_RETRY_SHARE = 1 / 8  # of the time that a server has been away
_WELCOME_SECONDS = 60.0  # the first client of a server waits for its disk tier to open
_KEEP_SECONDS = 1.0  # of a dead server's memory, for plans that were made before it died
_EARLY_SECONDS = 0.1  # between two looks at whether the memory may be pinned


@dataclass(frozen=True, slots=True)
class Patience:
    """With an absent server: *seconds*, which do not begin while *awaits_engine*."""

    seconds: float
    awaits_engine: Callable[[], bool] = lambda: False
    """Whether what starts the server has yet to start itself."""
    remedy: str | None = None
    """What to do where none answers; None: start one there."""


class Attachment:
    """Maps the host tier of whatever server answers at *path*, on a thread of its own, until ``close``.

    The connection is held open as long as the mapping is used: its end tells the server that
    nobody here writes into its slots any more.
    """

    def __init__(
        self,
        path: Path,
        hello: p.Hello,
        mapped: Callable[[HostMapping | None], None],
        *,
        patience: Patience,
        prefault: bool,
        pin: Callable[[HostMapping, Callable[[], bool]], bool] | None = None,
    ) -> None:
        """*mapped* is called, on the thread, with each new mapping before the server counts on it.

        It is called with None a moment after a server is gone, since the next one may need the
        memory. *pin* is called with each mapping after that, may take its time, and asks its second
        argument whether to end early; where it is too early it returns False, and is called again.
        A server that is absent for longer than *patience* bears is logged, once.
        """
        self._path = path
        self._hello = hello
        self._mapped = mapped
        self._patience = patience
        self._was_mapped = False
        self._keeps_memory = False
        self._prefault = prefault
        self._pin = pin
        self._stop = threading.Event()
        self._client: ManagerClient | None = None
        self._thread = threading.Thread(target=self._run, name="kvstrata-attach", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let go of the server. Call it when no copy runs any more."""
        self._stop.set()
        client = self._client
        if client is not None:
            client.shutdown()
        self._thread.join(1.0)

    def _run(self) -> None:
        told = ""
        failed_since = time.monotonic()
        while not self._stop.is_set():
            absent_seconds = 0.0
            try:
                self._attach_and_stay()
            except (KVStrataError, OSError) as e:
                if self._stop.is_set():
                    break
                if self._was_mapped or self._patience.awaits_engine():
                    self._was_mapped, told, failed_since = False, "", time.monotonic()
                absent_seconds = time.monotonic() - failed_since
                if self._keeps_memory and absent_seconds > _KEEP_SECONDS:
                    self._keeps_memory = False
                    self._mapped(None)
                patient = absent_seconds < self._patience.seconds
                if not patient and (problem := self._problem(e)) != told:
                    told = problem
                    _log.warning("no cache server to attach to at %s: %s", self._path, told)
            pause = max(_RETRY_SECONDS, _RETRY_SHARE * absent_seconds)
            self._stop.wait(min(pause, _MOST_RETRY_SECONDS))

    def _problem(self, error: Exception) -> str:
        if isinstance(error, ServerUnavailable) and error.hint is not None:
            error.hint = self._patience.remedy or error.hint
        return str(error)

    def _attach_and_stay(self) -> None:
        client = self._client = ManagerClient(self._path, self._hello)
        try:
            if self._stop.is_set():  # ``close`` may not have seen the client
                return
            welcome = client.wait_welcome(_WELCOME_SECONDS)
            descriptor = client.take_descriptor()
            if descriptor is None:
                raise ProtocolError("the server sent no descriptor of its host tier")
            mapping = _map(descriptor, welcome)
            self._mapped(mapping)
            self._was_mapped = self._keeps_memory = True
            client.submit(p.Mapped(0))
            if self._prefault:
                self._touch(mapping)
            if self._pin is not None:
                while not self._stop.is_set() and not self._pin(mapping, self._stop.is_set):
                    client.poll(_EARLY_SECONDS)
            while not self._stop.is_set():
                client.poll(3600.0)
        finally:
            client.close()

    def _touch(self, mapping: HostMapping) -> None:
        """Fault all of it in; what the machine refuses now is faulted in by the copies."""
        try:
            mapping.touch(self._stop)
        except OSError as e:
            _log.warning("this worker could not prefault host memory: %s", e.strerror)


def _map(descriptor: int, welcome: p.Welcome) -> HostMapping:
    """The memory behind *descriptor*, which is closed: the memory lasts as long as its arrays.

    A worker that kept it would keep the whole host tier of a server that is gone.
    """
    try:
        mapping = HostMapping.from_fd(
            descriptor, welcome.server_id, welcome.slots, welcome.slot_bytes
        )
    except BaseException:
        os.close(descriptor)
        raise
    mapping.close()
    return mapping
