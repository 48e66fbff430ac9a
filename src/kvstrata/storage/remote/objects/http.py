"""An HTTP/1.1 client for many requests at a time from one thread, all under one deadline."""

import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, cast
from urllib.parse import urlsplit

from kvstrata.storage.remote.objects.connection import (
    Address,
    Connection,
    Exchange,
    Steps,
    Wait,
)
from kvstrata.storage.remote.objects.values import Deadline
from kvstrata.storage.remote.resolver import Place, Resolver
from kvstrata.storage.store import MOST_CALLS

__all__ = ["HttpClient"]

_STALL_SECONDS: Final = 0.1  # in which nothing has come on any connection
_IDLE_SECONDS: Final = 30.0  # others on the way forget a connection after some minutes


class HttpClient:
    """Talks to one *origin*, as ``https://host:port``. Thread-safe; each thread has its own call.

    A call opens at most *parallel* connections, and those of ``MOST_CALLS`` are kept open. It
    follows no redirects, uses no proxy and tries nothing twice.
    """

    def __init__(self, origin: str, *, parallel: int, tls: ssl.SSLContext | None) -> None:
        self.origin = origin
        split = urlsplit(origin)
        self._host = split.netloc
        self._name = split.hostname or ""
        self._port = split.port or (80 if tls is None else 443)
        self._parallel = parallel
        self._tls = tls
        self._resolver = Resolver()
        self._lock = threading.Lock()  # guards everything below
        self._idle: deque[Connection] = deque()  # who was put back last is at the right
        self._failed_connects = 0
        self._is_closed = False

    def run(self, exchanges: Sequence[Exchange], deadline: Deadline) -> None:
        """Give each of *exchanges* its ``answer``.

        Raises ``TimeoutError`` at the *deadline*, however slowly bytes trickle in, ``OSError`` if
        the server cannot be reached or hangs up, ``Nonsense`` if it does not speak HTTP. Then no
        connection of this call is used again, and some exchanges may have no answer.
        """
        pending = deque(exchanges)
        count = min(self._parallel, len(pending))
        idle = self._take_idle(count)
        addresses = _Addresses(lambda: self._places(deadline))
        is_done = False
        try:
            _drive([self._work(pending, idle, addresses) for _ in range(count)], deadline)
            is_done = True
        finally:
            for connection in idle:  # of workers that have not begun
                connection.close()
            if not is_done:  # the way that the others took may be gone too
                self._close_idle()

    def close(self) -> None:
        """Close what is idle; connections in use are closed when their calls end."""
        with self._lock:
            self._is_closed = True
        self._close_idle()

    def _places(self, deadline: Deadline) -> Sequence[Place]:
        return self._resolver.places(self._name, self._port, deadline.left_seconds())

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, deque()
        for connection in idle:
            connection.close()

    def _work(
        self, pending: deque[Exchange], idle: list[Connection], addresses: "_Addresses"
    ) -> Steps:
        """Do what is pending, one after the other, on one connection or on one after the other."""
        connection = idle.pop() if idle else None
        try:
            while pending:
                exchange = pending.popleft()
                if connection is None:
                    family, address = addresses.choose(self._failed_connects)
                    connection = Connection(family, self._host, self._tls)
                    yield from self._connect(connection, address)
                if not (yield from connection.exchange(exchange)):
                    connection.close()
                    connection = None
            if connection is not None:
                self._put_back(connection)
                connection = None
        finally:
            if connection is not None:
                connection.close()

    def _connect(self, connection: Connection, address: Address) -> Steps:
        """Connect; the next connection tries another address if this one fails or is too slow."""
        has_failed = True
        try:
            yield from connection.connect(address)
            has_failed = False
        finally:
            self._failed_connects += has_failed

    def _take_idle(self, count: int) -> list[Connection]:
        """Up to *count* that are still open; those that were idle for too long are closed."""
        taken: list[Connection] = []
        for connection in self._outdated():
            connection.close()
        while len(taken) < count:
            with self._lock:
                if not self._idle:
                    break
                connection = self._idle.pop()
            if connection.is_quiet():
                taken.append(connection)
            else:
                connection.close()
        return taken

    def _outdated(self) -> list[Connection]:
        oldest = time.monotonic() - _IDLE_SECONDS
        found: list[Connection] = []
        with self._lock:
            while self._idle and self._idle[0].idle_since_seconds < oldest:
                found.append(self._idle.popleft())
        return found

    def _put_back(self, connection: Connection) -> None:
        with self._lock:
            if not self._is_closed and len(self._idle) < MOST_CALLS * self._parallel:
                connection.idle_since_seconds = time.monotonic()
                self._idle.append(connection)
                return
        connection.close()


class _Addresses:
    """Where the server of one call is, asked for when the first connection is made."""

    def __init__(self, ask: Callable[[], Sequence[Place]]) -> None:
        self._ask = ask
        self._known: Sequence[Place] = ()

    def choose(self, number: int) -> tuple[socket.AddressFamily, Address]:
        self._known = self._known or self._ask()
        family, _, _, _, address = self._known[number % len(self._known)]
        return family, cast("Address", address)


def _drive(workers: Sequence[Steps], deadline: Deadline) -> None:
    """Run *workers* to their ends, each when what it waits for has come; closes them in any case."""
    with selectors.DefaultSelector() as selector:
        try:
            for worker in workers:
                _advance(selector, worker, None)
            while selector.get_map():
                ready = selector.select(min(deadline.left_seconds(), _STALL_SECONDS))
                for key, _ in ready:
                    _advance(selector, key.data, key)
                if not ready:
                    _wake_for_anything(selector)
        finally:
            for worker in workers:
                worker.close()


def _wake_for_anything(selector: selectors.BaseSelector) -> None:
    """Nothing has come for a while: do not insist on much at a time (``SO_RCVLOWAT``).

    A receive buffer that small packets fill may never hold as many bytes.
    """
    for key in selector.get_map().values():
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


def _advance(
    selector: selectors.BaseSelector, worker: Steps, key: selectors.SelectorKey | None
) -> None:
    wait: Wait | None = next(worker, None)
    if key is not None and wait is not None and wait.connection is key.fileobj:
        if wait.events != key.events:
            selector.modify(wait.connection, wait.events, worker)
        return
    if key is not None:
        selector.unregister(key.fileobj)
    if wait is not None:
        selector.register(wait.connection, wait.events, worker)
