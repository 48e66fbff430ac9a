"""Memory of this node that is part of a Mooncake pool."""

import logging
import subprocess
import threading
import time
from contextlib import suppress
from typing import Final

from kvstrata.storage.remote.mooncake.process import start_agent
from kvstrata.storage.remote.mooncake.wire import Orders

__all__ = ["PoolSegment"]

_log = logging.getLogger(__name__)

_LEAVE_SECONDS: Final = 3.0  # to take the memory out of the pool
_REVIVE_SECONDS: Final = 5.0  # between two starts


class PoolSegment:
    """A process with memory for the pool, which joins it as soon as there is one.

    It does nothing else, and no call of this node ends it: what is in it stays for others.
    """

    def __init__(self, name: str, orders: Orders) -> None:
        self._name = name
        self._orders = orders
        self._lock = threading.Lock()  # guards all below
        self._closed = False
        self._start()

    def keep(self) -> None:
        """Start it again if it has died. Waits for nothing."""
        if self._process.poll() is None or not self._lock.acquire(blocking=False):
            return
        try:
            if not self._closed and time.monotonic() - self._started_at > _REVIVE_SECONDS:
                _log.warning("%s: the process with this node's memory has died", self._name)
                self._life.close()
                self._start()
        finally:
            self._lock.release()

    def close(self) -> None:
        """Take the memory, and what is in it, out of the pool. Idempotent."""
        with self._lock:
            self._closed = True
            self._life.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_LEAVE_SECONDS)
            self._process.kill()
            self._process.wait()  # after SIGKILL

    def _start(self) -> None:
        self._started_at = time.monotonic()
        self._process, self._life = start_agent(self._orders)
