"""A thread for what waits for disks, so that the thread that answers clients never does."""

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from kvstrata.core.errors import KVStrataError

_log = logging.getLogger(__name__)

T = TypeVar("T")


class SlowLane:
    """Does one thing after the other, in order."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        """*post* has something done on the thread that everything else is done on."""
        self._post = post
        self._closing = threading.Event()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]]] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="kvstrata-slow", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Call *work* on the thread; what it returns or raises is for *done*, which is posted."""
        self._jobs.put((work, done))

    def close(self, timeout_seconds: float) -> None:
        """End the thread after what it is doing, or leave it to that if it takes longer."""
        self._closing.set()
        self._jobs.put((_nothing, _ignore))
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while not self._closing.is_set():
            work, done = self._jobs.get()
            try:
                outcome = work()
            except KVStrataError as e:
                outcome = e
            except Exception as e:  # noqa: BLE001 - thread top: whoever waits must hear of it
                _log.exception("a request failed by a bug")
                outcome = e
            self._post(partial(done, outcome))


def _nothing() -> None:
    """Wakes the thread."""


def _ignore(_: object) -> None:
    """Nobody waits for it."""
