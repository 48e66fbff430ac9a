"""A remote engine as the fault suite sees it: servers that a test starts, harms and asks."""

import os
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.remote.proxy import Proxy

from kvstrata.core.types import StoreKey
from kvstrata.storage.store import Store

START_SECONDS = 30.0


class RemoteEngine(ABC):
    """One kind of remote engine, real, on loopback: its server processes and stores on them.

    ``faults.RemoteFaults`` runs the same faults against each.
    """

    @abstractmethod
    def start(self, folder: Path) -> None:
        """Start it, empty; *folder* is its own. Fails with the remedy if it is not installed."""

    @abstractmethod
    def address(self) -> tuple[str, int]:
        """Host and port of the server that data is asked from: what a ``Proxy`` stands before."""

    @abstractmethod
    def open(
        self,
        *,
        block_bytes: int,
        proxy: Proxy | None = None,
        host: str | None = None,
        wrong_credentials: bool = False,
        ttl_seconds: float | None = None,
        timeout_seconds: float = 1.0,
    ) -> Store:
        """A store on it: through *proxy*, or by another name of its *host*."""

    @abstractmethod
    def pids(self) -> Sequence[int]:
        """Its server processes."""

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL all of it; ``restart`` may follow."""

    @abstractmethod
    def restart(self) -> None:
        """Start what was killed, at the same address, with nothing in it."""

    def revive(self) -> None:
        """Start what was killed, with what it has kept."""
        self.restart()

    @abstractmethod
    def stop(self) -> None:
        """End what still runs."""

    @abstractmethod
    def raw(self, key: StoreKey) -> bytes | None:
        """The value stored for *key*, header included, past the store; ``None`` if there is none."""

    @abstractmethod
    def put_raw(self, key: StoreKey, value: bytes) -> None:
        """Replace what is stored for *key* behind the back of any store."""

    def pause(self) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGCONT)


class BoundedEngine(RemoteEngine):
    """One that holds its values in memory: it may be full, and may evict."""

    @abstractmethod
    def fill(self) -> None:
        """Leave little room, and let it make none."""

    @abstractmethod
    def let_evict(self) -> None:
        """Have it evict before it holds more than 64 MiB."""


def wait_until(true: Callable[[], bool], process: "subprocess.Popen[bytes]", what: str) -> None:
    """Until *true*; fails with *what* if it takes too long or *process* ends before."""
    deadline = time.monotonic() + START_SECONDS
    while not true():
        assert process.poll() is None, f"{what} ended with {process.returncode} at its start"
        assert time.monotonic() < deadline, f"{what} did not start within {START_SECONDS} s"
        time.sleep(0.02)


def answers(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection((host, port), 1).close()
    except OSError:
        return False
    return True
