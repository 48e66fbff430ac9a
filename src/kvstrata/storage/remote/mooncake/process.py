"""The Mooncake library in a process of its own: started, joined to the pool, ended."""

import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Final

import msgspec

from kvstrata.core.errors import FaultCause, TierUnavailable
from kvstrata.storage.remote.mooncake.faults import unavailable
from kvstrata.storage.remote.mooncake.wire import (
    Answer,
    Failed,
    Joined,
    Loaded,
    Orders,
    Request,
    Setup,
    receive,
    send,
)

__all__ = ["LibraryProcess", "start_agent"]

_JOIN_SECONDS: Final = 60.0  # RDMA pins the host tier in them
_INSTALL: Final = (
    "pip install 'kvstrata[mooncake]', and apt-get install libibverbs1 libnuma1 libcurl4"
)
_WAIT: Final = "a busy machine needs longer: try again"
_REGISTER: Final = "let this process lock the memory (ulimit -l unlimited), or set protocol=tcp"
_LOOK: Final = (
    "the next call starts it again; MC_LOG_LEVEL=INFO in the environment shows what it says"
)


def start_agent(orders: Orders) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """A process that follows *orders*, and the socket that it lives as long as."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "kvstrata.storage.remote.mooncake.agent",
                str(theirs.fileno()),
            ],
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno(), *(fd for fd, _ in orders.memories)],
            process_group=0,  # a Ctrl-C at the terminal is not for it; a session is scheduled apart
        )
    assert process.stdin is not None
    with (
        suppress(BrokenPipeError),
        process.stdin as orders_to,
    ):  # then it says nothing on the socket
        orders_to.write(msgspec.json.encode(orders))  # on its command line all could read them
    return process, ours


class LibraryProcess:
    """One life of the process. ``ended_by`` says why it was ended, once it was.

    ``call`` and ``kill`` may be used from any thread; the rest needs a lock around it.
    """

    def __init__(self, orders: Orders, name: str) -> None:
        self._name = name
        self.started_at = time.monotonic()
        self.ended_by: FaultCause | None = None
        self.master_address: str | None = None  # in numbers; known once it has joined the pool
        self._is_loaded = False
        self._joining: socket.socket | None = None  # the lane on which it says that it has
        self._process, self._life = start_agent(orders)

    def load(self, deadline: float) -> None:
        """Wait until the library is loaded; ``TierUnavailable`` if it is not, ``io`` if it cannot."""
        if self._is_loaded:
            return
        try:
            news = receive(self._life, Loaded | Failed, deadline)
        except TimeoutError as e:
            reason = "the library takes too long to load"
            raise unavailable(self._name, reason, "timeout", hint=_WAIT) from e
        except (EOFError, OSError) as e:
            raise self._gone(_INSTALL) from e
        if isinstance(news, Failed):
            self.kill(news.cause)
            reason = f"the library cannot be loaded: {news.message}"
            raise unavailable(self._name, reason, news.cause, hint=_INSTALL)
        self._is_loaded = True

    def join(self, deadline: float) -> None:
        """Join the pool, or go on waiting for what an earlier call began.

        Raises ``TierUnavailable``. If it was not *deadline* that ended it, so has the process.
        """
        self.load(deadline)
        if self._joining is None:
            self._joining = self.open_lane()
            with suppress(OSError):  # then the answer does not come either
                send(self._joining, Setup(), deadline)
        try:
            answer = receive(self._joining, Joined | Failed, deadline)
        except TimeoutError as e:
            if time.monotonic() - self.started_at > _JOIN_SECONDS:
                self.kill("timeout")
            raise unavailable(self._name, "does not answer in time", "timeout") from e
        except (EOFError, OSError) as e:
            raise self._gone() from e
        if isinstance(answer, Failed):
            self.kill(answer.cause)
            hint = _REGISTER if answer.cause == "io" else None
            raise unavailable(self._name, answer.message, answer.cause, hint=hint)
        self.master_address = answer.address

    def open_lane(self) -> socket.socket:
        """A channel for one call at a time; the caller closes it."""
        ours, theirs = socket.socketpair()
        with theirs, suppress(OSError):  # if the process is gone, the lane says so
            socket.send_fds(self._life, [b"l"], [theirs.fileno()])
        return ours

    def call(self, lane: socket.socket, request: Request, deadline: float) -> list[int]:
        """The library's answer to *request*.

        Raises ``TimeoutError`` at *deadline*: the call goes on in the process, and *lane* is of
        no more use. ``TierUnavailable`` if the process is gone, or has gone wrong and is ended.
        """
        try:
            send(lane, request, deadline)
            answer: Answer = receive(lane, Answer, deadline)
        except TimeoutError:
            raise
        except (EOFError, OSError) as e:
            raise self._gone() from e
        return answer.codes

    def kill(self, cause: FaultCause) -> None:
        """End it. Nothing of it touches shared memory when this returns. May be called again."""
        if self.ended_by is None:
            self.ended_by = cause
        self._process.kill()
        self._process.wait()  # after SIGKILL; with a deadline it might write into slots later
        self._life.close()
        if self._joining is not None:
            self._joining.close()

    def _gone(self, hint: str = _LOOK) -> TierUnavailable:
        """It is heard no more: make sure that it has ended, and say why."""
        ended_by_us = self.ended_by is not None
        self.kill("unreachable")
        assert self.ended_by is not None
        if ended_by_us:
            return unavailable(self._name, "its library was stopped", self.ended_by)
        return unavailable(self._name, "its library has died", self.ended_by, hint=hint)
