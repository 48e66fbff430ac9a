"""The server of the engine that uses it: started, watched, started again."""

import contextlib
import logging
import select
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from kvstrata.core.config import Config, config_to_json
from kvstrata.core.errors import ServerUnavailable
from kvstrata.core.types import EXACT, BlockFormat
from kvstrata.server.client import refusal
from kvstrata.server.main import ChildOrders, ChildReady
from kvstrata.server.protocol import Refused
from kvstrata.server.sockets import remove_dead_sockets

_log = logging.getLogger(__name__)

_LAUNCH_SECONDS = 1.0  # then what starts the server has ended, and leaves no zombie


class EmbeddedServer:
    """A server process that ends with this one, however this one ends.

    Its standard input is the lifeline: the kernel closes it when this process dies, and the
    server then writes what is not on disk yet and exits. It is not a child of this process, since
    vLLM kills those when it shuts down; its standard output tells that it lives.
    """

    def __init__(
        self,
        config: Config,
        path: Path,
        *,
        block_bytes: int,
        block_format: BlockFormat = EXACT,
        shares_session: bool = False,
    ) -> None:
        """Start the server and wait until it serves, ``start_timeout_seconds`` at most.

        One that needs longer goes on starting: nobody waits for it any more. One that dies instead
        is started again by ``revive``.

        Linux may schedule by session. With *shares_session* it is that of this process, which an
        engine needs whose several workers spin: they leave nothing to another one. Otherwise it has its own.

        Raises the server's own ``ConfigError`` if it says in time that it cannot serve with this
        configuration.
        """
        remove_dead_sockets()
        self._orders = ChildOrders(config_to_json(config), str(path), block_bytes, block_format)
        self._retry_seconds = config.reconnect_seconds
        self._shares_session = shares_session
        self.pid: int | None = None  # of the latest server that has told it
        self._launch()
        try:
            ready = self._wait_ready(config.start_timeout_seconds)
        except ServerUnavailable as e:
            _log.warning("%s", e)
            return
        if ready.error:
            self.close()
            raise refusal(Refused(0, ready.error, ready.message, ready.hint))
        self.pid = ready.pid

    def revive(self) -> None:
        """Start the server again if it has died; does not wait for that, costs little if it lives."""
        self._launcher.poll()  # takes the exit code: it ends as soon as the server runs
        events = self._events()
        if events & select.POLLIN:
            self._take_ready(self._read_ready())
        if not events & select.POLLHUP:
            return
        if time.monotonic() - self._started_at < self._retry_seconds:
            return
        _log.warning("the cache server has died: restart")
        dead = self._launcher
        self._launch()  # if it cannot be launched the pipes of the dead one still say so
        _end(dead)

    def close(self) -> None:
        """Cut the lifeline. The server ends by itself once all is on disk."""
        _end(self._launcher)

    def _launch(self) -> None:
        self._started_at = time.monotonic()
        self._launcher = subprocess.Popen(
            [sys.executable, "-m", "kvstrata.server.main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Either way a Ctrl-C at the terminal is the engine's.
            start_new_session=not self._shares_session,
            process_group=0 if self._shares_session else None,
        )
        assert self._launcher.stdin is not None
        assert self._launcher.stdout is not None
        self._poller = select.poll()
        self._poller.register(self._launcher.stdout, select.POLLIN)
        with contextlib.suppress(BrokenPipeError):
            self._launcher.stdin.write(msgspec.json.encode(self._orders) + b"\n")
            self._launcher.stdin.flush()

    def _events(self) -> int:
        """Of the server's standard output: ``POLLHUP`` when nobody holds its other end any more."""
        return sum(event for _, event in self._poller.poll(0))

    def _wait_ready(self, timeout_seconds: float) -> ChildReady:
        if not self._poller.poll(timeout_seconds * 1000):
            raise ServerUnavailable(
                f"the embedded cache server was not ready within {timeout_seconds} s",
                hint="see its messages above; raise `start_timeout_seconds` if it needs longer",
            )
        if self._events() == select.POLLHUP:
            raise ServerUnavailable(
                "the embedded cache server died at its start", hint="see its messages above"
            )
        ready = self._read_ready()
        self._launcher.wait()  # it had ended before the server began to open its tiers
        return ready

    def _read_ready(self) -> ChildReady:
        assert self._launcher.stdout is not None
        line = self._launcher.stdout.readline()
        try:
            return msgspec.json.decode(line, type=ChildReady)
        except msgspec.MsgspecError as e:
            raise ServerUnavailable(f"the embedded cache server said {line[:200]!r}") from e

    def _take_ready(self, ready: ChildReady) -> None:
        self.pid = ready.pid
        if ready.error:
            _log.warning("the cache server cannot start: %s", ready.message)


def _end(launcher: subprocess.Popen[bytes]) -> None:
    for pipe in (launcher.stdin, launcher.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    try:
        launcher.wait(_LAUNCH_SECONDS)
    except subprocess.TimeoutExpired:  # if it is that slow it has not become a server yet
        launcher.kill()
        launcher.wait()
