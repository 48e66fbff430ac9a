"""The server as a child of the engine that uses it: started, watched, started again."""

import contextlib
import logging
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from kvstrata.core.config import Config, config_to_json
from kvstrata.core.errors import ServerUnavailable
from kvstrata.server.client import refusal
from kvstrata.server.main import ChildOrders, ChildReady
from kvstrata.server.protocol import Refused
from kvstrata.server.sockets import remove_dead_sockets

_log = logging.getLogger(__name__)


class EmbeddedServer:
    """A server process that ends with this one, however this one ends.

    Its standard input is the lifeline: the kernel closes it when this process dies, and the
    server then writes what is not on disk yet and exits.
    """

    def __init__(self, config: Config, path: Path, *, block_bytes: int) -> None:
        """Start the server and wait until it serves, ``start_timeout_seconds`` at most.

        Raises the server's own ``ConfigError`` if it cannot serve with this configuration, and
        ``ServerUnavailable`` if it does not get ready in time.
        """
        remove_dead_sockets()
        self._orders = ChildOrders(config_to_json(config), str(path), block_bytes)
        self._retry_seconds = config.reconnect_seconds
        self._started_at = 0.0
        self._process = self._start()
        ready = self._wait_ready(config.start_timeout_seconds)
        if ready.error:
            self.close()
            raise refusal(Refused(0, ready.error, ready.message, ready.hint))

    @property
    def pid(self) -> int:
        return self._process.pid

    def revive(self) -> None:
        """Start the server again if it has died; does not wait for it, costs little if it lives."""
        if self._process.poll() is None:
            return
        if time.monotonic() - self._started_at < self._retry_seconds:
            return
        _log.warning("the cache server has died (exit code %d): restart", self._process.returncode)
        self._close_pipes()
        self._process = self._start()

    def close(self) -> None:
        """Cut the lifeline. The server ends by itself once all is on disk."""
        self._close_pipes()
        if self._process.poll() is None:  # does not wait, and leaves no zombie either
            threading.Thread(target=self._process.wait, name="kvstrata-reap", daemon=True).start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._started_at = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstrata.server.main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C at the terminal is the engine's
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(self._orders) + b"\n")
            process.stdin.flush()
        return process

    def _wait_ready(self, timeout_seconds: float) -> ChildReady:
        assert self._process.stdout is not None
        poller = select.poll()
        poller.register(self._process.stdout, select.POLLIN)
        line = self._process.stdout.readline() if poller.poll(timeout_seconds * 1000) else b""
        if not line:
            self.close()
            raise ServerUnavailable(
                f"the embedded cache server was not ready within {timeout_seconds} s",
                hint="see its messages above; raise `start_timeout_seconds` if it needs longer",
            )
        return msgspec.json.decode(line, type=ChildReady)

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
