"""The client's end of the wire: ``KVManager``'s methods over a unix socket.

Nothing here starts a thread. ``submit`` and ``poll`` never block longer than they are told, so an
engine's scheduler can use them between two steps; the methods that ``KVManager`` has too wait for
their answer.
"""

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from kvstrata.core.errors import (
    ConfigError,
    FormatError,
    InvariantViolated,
    KVStrataError,
    LimitExceeded,
    NoTiers,
    ProtocolError,
    ServerUnavailable,
    TierUnavailable,
)
from kvstrata.core.keys import Keys
from kvstrata.core.types import BlockKey, NamespaceId
from kvstrata.manager.tasks import UNSETTLED, TaskStatus
from kvstrata.server import protocol as p
from kvstrata.server import sockets
from kvstrata.server.operator_client import OperatorRequests

_OUTBOX_BYTES: Final = 8 << 20  # unsent requests to a server that does not read
_RECEIVE_BYTES: Final = 256 << 10

_ERRORS: Final = {
    kind.code: kind
    for kind in (
        ConfigError,
        FormatError,
        TierUnavailable,
        NoTiers,
        LimitExceeded,
        ProtocolError,
        InvariantViolated,
    )
}
_R = TypeVar("_R")


class Pending:
    """A request on its way. ``reply`` is its answer, None until it is there."""

    __slots__ = ("answered_at", "reply", "sent_at", "settled_at", "status")

    def __init__(self, sent_at: float) -> None:
        self.sent_at = sent_at  # monotonic seconds
        self.reply: p.Reply | None = None
        self.status: TaskStatus | None = None  # the latest word of the task, if it makes one
        self.answered_at = 0.0  # monotonic seconds; 0 before: when there was a first word of it
        self.settled_at = 0.0  # and when there was the last


class ManagerClient(OperatorRequests):
    """One connection. After any ``ServerUnavailable`` or ``ProtocolError`` it is of no more use."""

    def __init__(self, path: Path, hello: p.Hello, *, timeout_seconds: float = 5.0) -> None:
        """Connect and say *hello*, not waiting for the answer, which is ``self.welcome``."""
        self._timeout_seconds = timeout_seconds
        self._sock = sockets.connect(path)
        self._poller = select.poll()
        self._poller.register(self._sock, select.POLLIN)
        self._polled = select.POLLIN
        self._takes_descriptors = hello.role == "worker"
        self._outbox = bytearray()
        self._inbox = bytearray()
        self._descriptors: list[int] = []
        self._next_seq = hello.seq
        self.sent = 0  # requests so far
        self.has_untold = False  # what ``tell`` took has not been tried to be sent
        self._pending: dict[int, Pending] = {}
        self._promoting: dict[int, Pending] = {}
        self._changed: list[p.Changed] = []
        self.welcome = self.submit(hello)

    # -- without waiting ---------------------------------------------------------------------

    def submit(self, request: p.Request) -> Pending:
        """Send *request*; its ``seq``, if it has one, is set here."""
        pending = self._queue(request)
        self._flush()
        return pending

    def tell(self, request: p.Request) -> Pending:
        """Send *request* with the next one that is submitted, ``send_told`` or ``poll``.

        Each message by itself wakes the server, which may take the core of whoever sends it.
        """
        pending = self._queue(request)
        self.has_untold = True
        return pending

    def send_told(self) -> None:
        """Send what ``tell`` took."""
        if self.has_untold:
            self._flush()

    def poll(self, timeout_seconds: float = 0.0) -> bool:
        """Take in what has arrived, after waiting for it up to *timeout_seconds*; whether anything.

        Raises ``ServerUnavailable`` when the server has hung up.
        """
        deadline = time.monotonic() + timeout_seconds
        while not self._wait_readable(max(0.0, deadline - time.monotonic())):
            if not self._outbox or time.monotonic() >= deadline:
                return False
        try:
            data = self._receive()
        except BlockingIOError:
            return False
        except OSError as e:
            raise self._lost(str(e)) from e
        if not data:
            raise self._lost("it has hung up")
        self._inbox += data
        self._take_frames()
        return True

    @property
    def expects_more(self) -> bool:
        """Whether anything that was asked is unanswered, unsettled or unsent."""
        return bool(self._pending or self._promoting or self._outbox)

    def abandon(self, pending: Pending) -> None:
        """Nobody waits for *pending* any more; a task that it makes is cancelled when it is known."""
        for seq, other in self._pending.items():
            if other is pending:
                self._pending[seq] = _Abandoned(pending.sent_at)
                return
        if pending.status is not None:
            self._promoting.pop(pending.status.task_id, None)
            if pending.status.task_id:
                self.submit(p.Cancel([pending.status.task_id]))

    @property
    def is_hung_up(self) -> bool:
        """Whether the connection has ended; takes nothing in. Any thread may ask."""
        fd = self._sock.fileno()
        if fd < 0:
            return True
        poller = select.poll()
        poller.register(fd, select.POLLRDHUP)
        return bool(poller.poll(0))

    def take_changed(self) -> list[p.Changed]:
        """What the server has told since the last call of what ``Follow`` named; more may come."""
        taken, self._changed = self._changed, []
        for _ in taken:
            self.submit(p.Heard())
        return taken

    def take_descriptor(self) -> int | None:
        """A file descriptor that the server has sent; the caller owns it."""
        return self._descriptors.pop(0) if self._descriptors else None

    # -- the methods of KVManager ------------------------------------------------------------

    def register_namespace(self, namespace: NamespaceId, parts: Mapping[str, str]) -> None:
        self.submit(p.Register(namespace, dict(parts)))

    def get_match(
        self, namespace: NamespaceId, keys: Keys, *, request: str = "", states: int = 0
    ) -> TaskStatus:
        return self._task(p.GetMatch(0, namespace, p.join_keys(keys), request, states))

    def put_match(
        self,
        namespace: NamespaceId,
        keys: Keys,
        *,
        parent: BlockKey | None = None,
        request: str = "",
        prompt_blocks: int = 0,
    ) -> TaskStatus:
        return self._task(
            p.PutMatch(0, namespace, p.join_keys(keys), parent or b"", request, prompt_blocks)
        )

    def launch(self, task_ids: Sequence[int]) -> None:
        for part in _parts(task_ids):
            self.submit(p.Launch(part))

    def complete(self, task_ids: Sequence[int]) -> None:
        for part in _parts(task_ids):
            self.submit(p.Complete(part))

    def complete_part(self, task_id: int, blocks: int) -> None:
        self.submit(p.CompletePart(task_id, blocks))

    def fail(self, task_ids: Sequence[int]) -> None:
        for part in _parts(task_ids):
            self.submit(p.Fail(part))

    def cancel(self, task_ids: Sequence[int]) -> None:
        for part in _parts(task_ids):
            self.submit(p.Cancel(part))

    def try_wait(self, task_ids: Sequence[int]) -> dict[int, TaskStatus]:
        found: dict[int, TaskStatus] = {}
        for part in _parts(task_ids):
            statuses = self._ask(p.TryWait(0, part), p.Tasks).statuses
            found |= {status.task_id: p.unpack(status) for status in statuses}
        return found

    def wait(self, task_ids: Sequence[int], timeout_seconds: float) -> dict[int, TaskStatus]:
        deadline = time.monotonic() + timeout_seconds
        while True:
            found = self.try_wait(task_ids)
            promoting = any(s.state in UNSETTLED for s in found.values())
            left = deadline - time.monotonic()
            if not promoting or left <= 0:
                return found
            self.poll(min(left, 0.005))  # news of a settled task ends the wait early

    def prefetch(self, namespace: NamespaceId, keys: Keys) -> int:
        return self._ask(p.Prefetch(0, namespace, p.join_keys(keys)), p.Number).value

    def reset(self, namespace: NamespaceId) -> int:
        return self._ask(p.Reset(0, namespace), p.Number).value

    def workers(self) -> int:
        """How many workers of this engine have mapped the host tier."""
        return self._ask(p.Workers(0), p.Number).value

    def ping(self) -> None:
        self._ask(p.Ping(0), p.Number)

    def shutdown(self) -> None:
        """Wake another thread that is in ``poll``: it raises ``ServerUnavailable``."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up; the server releases what this client held. Idempotent."""
        if self._sock.fileno() >= 0:
            with contextlib.suppress(ServerUnavailable):
                self._flush()
        self._sock.close()
        while (descriptor := self.take_descriptor()) is not None:
            os.close(descriptor)

    def wait_welcome(self, timeout_seconds: float) -> p.Welcome:
        """The answer to hello; raises what the server objects to."""
        return self._await(self.welcome, p.Welcome, timeout_seconds)

    # -- inside ------------------------------------------------------------------------------

    def _queue(self, request: p.Request) -> Pending:
        pending = Pending(time.monotonic())
        if hasattr(request, "seq"):
            request.seq = self._next_seq
        frame = p.encode(request)
        if hasattr(request, "seq"):
            self._pending[request.seq] = pending
            self._next_seq += 1
        self.sent += 1
        if isinstance(request, p.Launch | p.Cancel):
            for task_id in request.task_ids:
                self._promoting.pop(task_id, None)  # how the promotion ends is no news any more
        self._outbox += frame
        if len(self._outbox) > _OUTBOX_BYTES:
            raise self._lost("it has read nothing for too long")
        return pending

    def _task(self, request: p.GetMatch | p.PutMatch) -> TaskStatus:
        return p.unpack(self._ask(request, p.Task).status)

    def _ask(self, request: p.Request, kind: type[_R]) -> _R:
        return self._await(self.submit(request), kind, self._timeout_seconds)

    def _await(self, pending: Pending, kind: type[_R], timeout_seconds: float) -> _R:
        deadline = time.monotonic() + timeout_seconds
        while pending.reply is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ServerUnavailable(f"no answer within {timeout_seconds} s")
            self.poll(left)
        if isinstance(pending.reply, p.Refused):
            raise refusal(pending.reply)
        if not isinstance(pending.reply, kind):
            raise ProtocolError(f"{type(pending.reply).__name__} is no answer to the request")
        return pending.reply

    def _wait_readable(self, timeout_seconds: float) -> bool:
        """Whether there is something to receive; returns early when more can be sent."""
        if self._sock.fileno() < 0:
            raise self._lost("it was closed")
        self._flush()
        events = select.POLLIN | select.POLLOUT if self._outbox else select.POLLIN
        if events != self._polled:
            self._poller.modify(self._sock, events)
            self._polled = events
        ready = self._poller.poll(timeout_seconds * 1000)
        return bool(ready) and ready[0][1] != select.POLLOUT

    def _receive(self) -> bytes:
        if not self._takes_descriptors:
            return self._sock.recv(_RECEIVE_BYTES)
        data, descriptors, _, _ = socket.recv_fds(self._sock, _RECEIVE_BYTES, 1)
        self._descriptors += descriptors
        return data

    def _flush(self) -> None:
        self.has_untold = False
        while self._outbox:
            try:
                sent = self._sock.send(self._outbox)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self._outbox.clear()  # it may have said why: whoever reads that finds the end, too
                return
            except OSError as e:
                raise self._lost(str(e)) from e
            del self._outbox[:sent]

    def _take_frames(self) -> None:
        start = 0
        with memoryview(self._inbox) as inbox:
            while len(inbox) - start >= p.LENGTH.size:
                header_end = start + p.LENGTH.size
                end = header_end + p.frame_length(inbox[start:header_end])
                if len(inbox) < end:
                    break
                self._take(p.decode_reply(inbox[header_end:end]))
                start = end
        del self._inbox[:start]

    def _take(self, reply: p.Reply) -> None:
        if isinstance(reply, p.Settled):
            self._take_settled(p.unpack(reply.status))
            return
        if isinstance(reply, p.Changed):
            self._changed.append(reply)
            return
        pending = self._pending.pop(reply.seq, None)
        if pending is None:
            raise ProtocolError(f"an answer to request {reply.seq}, which was not sent")
        pending.reply = reply
        if not isinstance(reply, p.Task):
            return
        status = pending.status = p.unpack(reply.status)
        pending.answered_at = time.monotonic()
        if isinstance(pending, _Abandoned):
            if status.task_id:
                self.submit(p.Cancel([status.task_id]))
        elif status.state in UNSETTLED:
            self._promoting[status.task_id] = pending

    def _take_settled(self, status: TaskStatus) -> None:
        pending = self._promoting.get(status.task_id)
        if pending is None:
            return  # launched, given up: nobody waits for it any more
        pending.status = status
        pending.settled_at = time.monotonic()
        if status.state not in UNSETTLED:
            del self._promoting[status.task_id]

    def _lost(self, why: str) -> ServerUnavailable:
        with contextlib.suppress(OSError):
            self._sock.close()
        return ServerUnavailable(f"the connection to the cache server is lost: {why}")


class _Abandoned(Pending):
    """Stands for a request that was given up before its answer came."""

    __slots__ = ()


def _parts(task_ids: Sequence[int]) -> Iterator[list[int]]:
    """*task_ids* in as many pieces as they need requests."""
    for start in range(0, len(task_ids), p.MAX_TASK_IDS):
        yield list(task_ids[start : start + p.MAX_TASK_IDS])


def refusal(refused: p.Refused) -> KVStrataError:
    """The exception that the server raised, as one of ours."""
    kind: Callable[..., KVStrataError] = _ERRORS.get(refused.code, KVStrataError)
    return kind(refused.message, hint=refused.hint)


def observe(path: Path, *, timeout_seconds: float = 5.0) -> ManagerClient:
    """A connection that only looks: for ``stats`` and ``inspect``."""
    client = ManagerClient(
        path, p.Hello(0, p.PROTOCOL_VERSION, "observer"), timeout_seconds=timeout_seconds
    )
    try:
        client.wait_welcome(timeout_seconds)
    except KVStrataError:
        client.close()
        raise
    return client
