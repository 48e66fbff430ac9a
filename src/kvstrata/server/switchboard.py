"""All clients at once: who is let in, who is served next, who has to go. Not thread-safe.

Nothing here waits but ``turn``, which does until something happens.
"""

import errno
import logging
import os
import select
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from kvstrata.core.errors import LimitExceeded, ProtocolError
from kvstrata.server import protocol as p
from kvstrata.server.connection import Connection
from kvstrata.server.conversation import Conversation, Host
from kvstrata.server.fair import FairQueue
from kvstrata.server.poller import READ, WRITE, Poller

_log = logging.getLogger(__name__)

_ACCEPTED_AT_A_TIME: Final = 32
_ACCEPT_PAUSE_SECONDS: Final = 0.1  # out of descriptors: some may be closed by then
_SWEEP_SECONDS: Final = 0.5  # between two looks for clients that are overdue
_GONE: Final = select.EPOLLHUP | select.EPOLLERR


class Client:
    """One connection, what is said over it, and what the switchboard knows of it."""

    def __init__(
        self, host: Host, connection: Connection, changed: Callable[["Client"], None]
    ) -> None:
        """*changed* is called after something was sent, or the next request need not wait."""
        self.connection = connection
        self.conversation = Conversation(host, self._send, lambda: changed(self))
        self.fd = connection.sock.fileno()
        self.since = time.monotonic()
        self.watched: int | None = None  # events that the poller reports; None: not even its end
        self.counted_bytes = 0  # of its buffers, in the sum of all
        self.is_here = True
        self._changed = changed

    def _send(self, frame: bytes, descriptors: tuple[int, ...]) -> None:
        self.connection.send(frame, descriptors)
        self._changed(self)


class Switchboard:
    """Serves the clients of *listener*, which is non-blocking and stays the caller's."""

    def __init__(self, host: Host, listener: socket.socket) -> None:
        self._host = host
        self._limits = host.limits
        self._listener = listener
        self._poller = Poller()
        self._poller.watch(listener.fileno(), READ, watched=None)
        self._accepts_again = 0.0  # monotonic seconds; 0: it does accept
        self._clients: dict[int, Client] = {}
        self._of_process: Counter[int] = Counter()
        self._queue: FairQueue[Client] = FairQueue()
        self._changed: dict[Client, None] = {}
        self._timed: set[Client] = set()
        self._next_sweep = 0.0
        self._buffered_bytes = 0
        self._client_log = host.client_log

    def __len__(self) -> int:
        return len(self._clients)

    def post(self, call: Callable[[], None]) -> None:
        """Have *call* made in the next turn. Thread-safe."""
        self._poller.post(call)

    def turn(self) -> None:
        """Wait until something happens; take it in, and serve one request at most."""
        for fd, events in self._poller.wait(self._patience_seconds()):
            client = self._clients.get(fd)
            if client is not None:
                self._take_in(client, events)
            elif fd == self._listener.fileno():
                self._accept()
        self._poller.run_posted()
        self._settle_changed()
        if self._queue:
            self._serve(self._queue.pop())
            self._settle_changed()
        self._sweep()

    def close(self) -> None:
        """Hang up on all."""
        for client in list(self._clients.values()):
            self._drop(client)

    def close_poller(self) -> None:
        """Nothing can be posted from now on."""
        self._poller.close()

    # -- who is let in -----------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_A_TIME):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as e:
                self._client_log.warn("a connection cannot be accepted: %s", e)
                if e.errno != errno.ECONNABORTED:
                    self._pause_accepting()
                    return
                continue
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        connection = Connection(sock)
        if connection.uid != os.getuid():
            self._client_log.warn("a connection of uid %d is refused", connection.uid)
            connection.close()
            return
        pid, too_many = connection.pid, self._too_many(connection.pid)
        if too_many:
            self._client_log.warn("a connection of process %d is refused: %s", pid, too_many)
            connection.send(p.encode(p.Refused(0, LimitExceeded.code, too_many, None)))
            connection.close()
            return
        client = Client(self._host, connection, self._note)
        self._clients[client.fd] = client
        self._of_process[pid] += 1
        self._note(client)

    def _too_many(self, pid: int) -> str | None:
        if len(self._clients) >= self._limits.connections:
            return f"this server has {len(self._clients)} connections"
        # A process in another pid namespace has number 0, as have all others there.
        if pid and self._of_process[pid] >= self._limits.connections_per_process:
            return f"this process has {self._of_process[pid]} connections"
        return None

    def _pause_accepting(self) -> None:
        self._poller.unwatch(self._listener.fileno())
        self._accepts_again = time.monotonic() + _ACCEPT_PAUSE_SECONDS

    # -- what happens ------------------------------------------------------------------------

    def _take_in(self, client: Client, events: int) -> None:
        connection = client.connection
        if events & (WRITE | _GONE):
            connection.flush()
        if events & ~WRITE:
            if self._is_read(client):
                connection.receive()
            elif events & _GONE:
                self._poller.unwatch(client.fd)  # it would be reported again and again
                client.watched = None
            else:
                self._watch(client)  # not before: mostly it is served first
        self._note(client)

    def _serve(self, client: Client) -> None:
        started = time.perf_counter()
        try:
            body = client.connection.take_frame()
            client.conversation.take(body, is_deaf=client.connection.is_deaf)
        except ProtocolError as e:
            self._drop(client, str(e))
            return
        except Exception:  # noqa: BLE001 - thread top: the others must be served
            _log.exception("a connection is closed by a bug")
            self._drop(client)
            return
        self._queue.charge(client, time.perf_counter() - started)
        self._note(client)

    def _note(self, client: Client) -> None:
        """Something about *client* may have changed."""
        if client.is_here:
            self._changed[client] = None

    def _settle_changed(self) -> None:
        """Draw the conclusions from what has happened."""
        while self._changed:
            client, _ = self._changed.popitem()
            if client.is_here:
                self._settle(client)

    def _settle(self, client: Client) -> None:
        connection = client.connection
        self._count(client)
        if connection.unread_bytes > self._limits.unread_news_bytes:
            self._drop(client, "it does not read its news")
        elif client.conversation.is_broken:
            self._drop(client, "a bug")
        elif connection.is_ended and not connection.has_frame:
            self._release(client)
            if not client.conversation.is_resetting:  # else it counts until that is answered
                self._drop(client)
        if not client.is_here:
            return
        if connection.has_frame and self._is_served(client):
            self._queue.add(client)
        else:
            self._watch(client)
        if connection.is_timed or not client.conversation.has_begun:
            self._timed.add(client)

    def _watch(self, client: Client) -> None:
        events = READ if self._is_read(client) else 0
        if client.connection.unread_bytes:
            events |= WRITE
        if events != client.watched and (events or client.watched is not None):
            self._poller.watch(client.fd, events, watched=client.watched)
            client.watched = events

    def _is_served(self, client: Client) -> bool:
        """Whether its next request may be carried out now."""
        waits = client.conversation.is_waiting
        return not waits and client.connection.unread_bytes <= self._limits.unread_bytes

    def _is_read(self, client: Client) -> bool:
        connection = client.connection
        return self._is_served(client) and not connection.has_frame and not connection.is_ended

    def _count(self, client: Client) -> None:
        """Keep the sum of all buffers within its limit."""
        buffered_bytes = client.connection.buffered_bytes
        self._buffered_bytes += buffered_bytes - client.counted_bytes
        client.counted_bytes = buffered_bytes
        if self._buffered_bytes > self._limits.buffered_bytes:
            hog = max(self._clients.values(), key=lambda c: c.connection.buffered_bytes)
            self._drop(hog, "all clients together wait for too many bytes, and it for most")

    # -- who has to go -----------------------------------------------------------------------

    def _sweep(self) -> None:
        now = time.monotonic()
        if self._accepts_again and now >= self._accepts_again:
            self._accepts_again = 0.0
            self._poller.watch(self._listener.fileno(), READ, watched=None)
        if not self._timed or now < self._next_sweep:
            return
        self._next_sweep = now + _SWEEP_SECONDS
        for client in list(self._timed):
            overdue = self._overdue(client, now)
            if overdue:
                self._drop(client, overdue)
            elif client.conversation.has_begun and not client.connection.is_timed:
                self._timed.discard(client)

    def _overdue(self, client: Client, now: float) -> str | None:
        limits = self._limits
        if not client.conversation.has_begun and now - client.since > limits.hello_seconds:
            return f"it has not said hello for {limits.hello_seconds} s"
        return client.connection.overdue(
            now,
            is_read=self._is_read(client),
            frame_seconds=limits.frame_seconds,
            send_seconds=limits.send_seconds,
        )

    def _patience_seconds(self) -> float | None:
        """How long nothing has to be done."""
        if self._queue:
            return 0.0
        if self._accepts_again:
            return _ACCEPT_PAUSE_SECONDS
        return _SWEEP_SECONDS if self._timed else None

    def _drop(self, client: Client, why: str | None = None) -> None:
        """Hang up on *client* and release what it held."""
        if not client.is_here:
            return
        client.is_here = False
        if why is not None:
            self._client_log.warn("a connection is closed: %s", why)
        self._queue.forget(client)
        self._timed.discard(client)
        self._of_process[client.connection.pid] -= 1
        if not self._of_process[client.connection.pid]:
            del self._of_process[client.connection.pid]
        self._buffered_bytes -= client.counted_bytes
        if client.watched is not None:
            self._poller.unwatch(client.fd)
        client.conversation.is_over = True
        self._release(client)
        del self._clients[client.fd]  # last: who sees that it has gone finds nothing of it
        client.connection.close()

    def _release(self, client: Client) -> None:
        """*client* asks nothing more."""
        try:
            client.conversation.release()
        except Exception:  # noqa: BLE001 - thread top: the others must be served
            _log.exception("what a client held is kept by a bug")
