"""Waiting for sockets, and for what other threads want done on the thread that waits."""

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

_log = logging.getLogger(__name__)

READ: Final = select.EPOLLIN
WRITE: Final = select.EPOLLOUT

_EVENTS: Final = 64  # a turn: others are next


class Poller:
    """An epoll with a way in for other threads; all but ``post`` is for the thread that waits."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, READ)
        # Guards the two below, and the bell. Reentrant: a signal handler posts, too.
        self._lock = threading.RLock()
        self._calls: deque[Callable[[], None]] = deque()
        self._is_closed = False

    def post(self, call: Callable[[], None]) -> None:
        """Have ``run_posted`` make *call*, waking it. Thread-safe; of no effect once closed."""
        with self._lock:
            if self._is_closed:
                return
            self._calls.append(call)
            if len(self._calls) == 1:
                os.eventfd_write(self._bell, 1)

    def run_posted(self) -> None:
        """Make the calls that wait, in order; those that come meanwhile are for the next time."""
        if self._calls:
            with self._lock:
                calls, self._calls = self._calls, deque()
            for call in calls:
                try:
                    call()
                except Exception:  # noqa: BLE001 - thread top: other calls and clients go on
                    _log.exception("a bug")

    def watch(self, fd: int, events: int, *, watched: int | None) -> None:
        """Report *events* of *fd*, 0 for none but its end; *watched* is what it was, if it was."""
        if watched is None:
            self._epoll.register(fd, events)
        else:
            self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        self._epoll.unregister(fd)

    def wait(self, timeout_seconds: float | None) -> list[tuple[int, int]]:
        """File descriptors and what became of them; without the bell, which has then been heard."""
        found = self._epoll.poll(timeout_seconds, _EVENTS)
        for i, (fd, _) in enumerate(found):
            if fd == self._bell:
                os.eventfd_read(self._bell)
                del found[i]
                break
        return found

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._calls.clear()
            os.close(self._bell)
        self._epoll.close()
