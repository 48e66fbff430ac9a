"""The scheduler half's line to the cache server: kept up, given up, taken up again."""

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvstrata.core.config import Config
from kvstrata.core.errors import (
    KVStrataError,
    LimitExceeded,
    ServerUnavailable,
    TierUnavailable,
)
from kvstrata.core.types import NamespaceId
from kvstrata.integration.vllm.link_redial import Redial
from kvstrata.observe.seldom import SeldomWarning
from kvstrata.server import protocol as p
from kvstrata.server.client import ManagerClient, Pending
from kvstrata.server.embedded import EmbeddedServer

_log = logging.getLogger(__name__)

_NO_SERVER: Final = b""
# An engine's later namespaces have random names: nobody asks for them again.
_OWED_RESETS: Final = 64
_LOOK_SECONDS: Final = 0.05  # until a hang-up is noticed where nothing is asked
_WORKERS_SECONDS: Final = 1.0  # they look for the server soon; the engine starts without them, too
_WORKERS_POLL_SECONDS: Final = 0.01


class CacheLink:
    """A connection that may be absent: then requests are not sent and nobody waits.

    No method waits, but ``poll`` as long as it is told. ``number`` grows with each connection:
    what was asked of an earlier one is void. Only ``tick`` takes up another connection, which was
    made meanwhile: ``number``, ``server_id`` and ``host_slots`` change nowhere else.
    """

    def __init__(
        self, config: Config, path: Path, hello: p.Hello, server: EmbeddedServer | None
    ) -> None:
        self.number = 0
        self.server_id = _NO_SERVER
        self.host_slots = 0  # of the server's host tier
        self._world_size = hello.world_size
        self._patience_seconds = config.start_timeout_seconds
        self._redial = Redial(config, path, hello, server)
        self._client: ManagerClient | None = None
        self._welcomed = False
        self._next_look = 0.0  # monotonic seconds
        self._probe: Pending | None = None  # outstanding while the server is too slow
        self._count_at = math.inf  # monotonic seconds: all workers should have come by then
        self._counted: Pending | None = None  # the question how many have
        self._first_namespace: NamespaceId | None = None  # of which there may be old blocks
        self._namespaces: dict[NamespaceId, dict[str, str]] = {}  # told to every new server
        self._followed: NamespaceId | None = None  # told to every new server
        self._resets: dict[NamespaceId, Pending | None] = {}  # until they are answered
        self._warn_of_length = SeldomWarning(_log)

    @property
    def ready(self) -> bool:
        """Whether there is a server that answers."""
        return self._welcomed and self._probe is None

    @property
    def connected(self) -> bool:
        """Whether there is a server, as far as is known here."""
        return self._welcomed

    @property
    def sent(self) -> tuple[int, int]:
        """The connection, and how many requests went out on it: another number, another request."""
        return self.number, self._client.sent if self._client is not None else 0

    def connect(self, timeout_seconds: float) -> None:
        """Wait for the first connection, and a moment for the workers to map the host tier.

        Raises what the server objects to. Unless that is the engine itself, the server is looked
        for from now on, whether or not it is there.
        """
        try:
            client = self._redial.dial().client
            try:
                client.wait_welcome(timeout_seconds)
            except KVStrataError:
                client.close()
                raise
            self._redial.use(client)
            self._begin(client, [])
            self._wait_for_workers(client)
        except ServerUnavailable:
            self._redial.start()
            raise
        self._redial.start()

    def tick(self) -> None:
        """Take in what has arrived, a new connection too.

        Not between the answer to vLLM's question for a request and the plan that follows from it.
        """
        self.poll(0.0)
        self._count_workers()
        dialled = self._redial.take()
        if dialled is None:
            return
        if self._client is not None:
            self._client.close()
        self._begin(dialled.client, dialled.running)

    def glance(self) -> None:
        """``tick``, but a few times a second only while nothing can have arrived but a hang-up."""
        expects_more = self._client is not None and self._client.expects_more
        now = time.monotonic()
        if expects_more or self._followed is not None or now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            self.tick()

    def poll(self, timeout_seconds: float) -> None:
        """Take in what has arrived, waiting for it up to *timeout_seconds*."""
        if self._client is None:
            return
        try:
            while self._client.poll(timeout_seconds):
                timeout_seconds = 0.0
            self._take_answers()
        except KVStrataError as e:
            self._drop(e)

    def hear(self, is_enough: Callable[[], bool], until: float) -> None:
        """Take in what has arrived, and what comes before *until* (monotonic) or it *is_enough*."""
        self.poll(0.0)
        while not is_enough() and self._client is not None:
            left = until - time.monotonic()
            if left <= 0:
                return
            self.poll(left)

    def submit(self, request: p.Request) -> Pending | None:
        """Send *request* if there is a server, and it is not too long to be sent."""
        pending = self.tell(request)
        self.send_told()
        return None if self._client is None else pending

    def tell(self, request: p.Request) -> Pending | None:
        """``submit``, but send it with what else this step or the next has to say."""
        if self._client is None or not self._welcomed:
            return None
        try:
            return self._client.tell(request)
        except LimitExceeded as e:
            self._warn_of_length("going on without the cache for one request: %s", e)
            _log.debug("%s of %s is not sent: %s", type(request).__name__, _asker(request), e)
        except KVStrataError as e:
            self._drop(e)
        return None

    def send_told(self) -> None:
        """Send what was told."""
        if self._client is None:
            return
        try:
            self._client.send_told()
        except KVStrataError as e:
            self._drop(e)

    @property
    def has_untold(self) -> bool:
        """Whether something that was told is to be sent in the next step."""
        return self._client is not None and self._client.has_untold

    def abandon(self, pending: Pending, number: int) -> None:
        """Nobody waits for *pending*, of connection *number*, any more."""
        if self._client is not None and number == self.number:
            try:
                self._client.abandon(pending)
            except KVStrataError as e:
                self._drop(e)

    def too_slow(self) -> None:
        """A request was not answered in time: ask nothing more until a ping is answered."""
        if self._probe is None and self._client is not None:
            _log.warning("the cache server does not answer: going on without a cache")
            self._probe = self.submit(p.Ping(0))

    def register(self, namespace: NamespaceId, parts: dict[str, str]) -> None:
        """Blocks of *namespace* follow; every server is told what it stands for."""
        self._first_namespace = self._first_namespace or namespace
        self._namespaces = {namespace: parts}
        self.submit(p.Register(namespace, parts))

    def follow(self, namespace: NamespaceId) -> None:
        """Hear what becomes of *namespace*, and of no other, by ``take_changed``."""
        self._followed = namespace
        self.submit(p.Follow(namespace))

    def take_changed(self) -> list[p.Changed]:
        """What this server has told since the last call of what is followed, or was before."""
        if self._client is None or not self._welcomed:
            return []
        try:
            return self._client.take_changed()
        except KVStrataError as e:
            self._drop(e)
            return []

    def reset(self, namespace: NamespaceId) -> None:
        """Drop *namespace*, now or as soon as there is a server; asked until it is answered.

        Of many that are owed the first ever registered and the latest are dropped.
        """
        self._resets.pop(namespace, None)
        self._resets[namespace] = self.submit(p.Reset(0, namespace))
        if len(self._resets) > _OWED_RESETS:
            oldest = (n for n in self._resets if n != self._first_namespace)
            del self._resets[next(oldest)]

    def write_begins(self, task_id: int) -> bool:
        """Whether workers may write into the slots of *task_id*: not if the line has ended.

        If they may, no server counts the slots as free before ``write_ended``.
        """
        return self._redial.write_begins(task_id)

    def write_ended(self, task_id: int) -> None:
        """No worker does any more; the next connection will not count it among the running."""
        self._redial.write_ended(task_id)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client, self._welcomed = None, False
        self._redial.close()

    def _wait_for_workers(self, client: ManagerClient) -> None:
        """The workers have been looking for the server before: the first request shall find them."""
        deadline = time.monotonic() + _WORKERS_SECONDS
        while client.workers() < self._world_size and time.monotonic() < deadline:
            time.sleep(_WORKERS_POLL_SECONDS)

    def _count_workers(self) -> None:
        """Say once a connection if, long after it began, some workers have not come."""
        if self._counted is not None and isinstance(self._counted.reply, p.Number):
            come, self._counted = self._counted.reply.value, None
            if come < self._world_size:
                _log.warning(
                    "%d of %d workers have mapped the host tier within %g s: until all have, nothing is "
                    "loaded or saved; the others' logs say why, and each has to run on the server's node",
                    come,
                    self._world_size,
                    self._patience_seconds,
                )
        if time.monotonic() >= self._count_at:
            self._count_at = math.inf
            self._counted = self.submit(p.Workers(0))

    def _take_answers(self) -> None:
        if self._probe is not None and self._probe.reply is not None:
            self._probe = None
            _log.warning("the cache server answers again")
        for namespace in [n for n, asked in self._resets.items() if asked and _is_done(asked)]:
            del self._resets[namespace]

    def _begin(self, client: ManagerClient, running: list[int]) -> None:
        """*client* has been welcomed; *running* are the tasks that its hello told of."""
        welcome = client.welcome.reply
        assert isinstance(welcome, p.Welcome)
        self._client, self._welcomed, self._probe = client, True, None
        self._count_at, self._counted = time.monotonic() + self._patience_seconds, None
        self.server_id, self.host_slots = welcome.server_id, welcome.slots
        self.number += 1
        written = self._redial.still_written(running)
        ended = [task_id for task_id in running if task_id not in written]
        if ended:
            self.submit(p.Fail(ended))
        for namespace in self._resets:
            self._resets[namespace] = self.submit(p.Reset(0, namespace))
        for namespace, parts in self._namespaces.items():
            self.submit(p.Register(namespace, parts))
        if self._followed is not None:
            self.submit(p.Follow(self._followed))

    def _drop(self, error: Exception) -> None:
        if self._client is not None:
            if self._redial.lost(self._client):
                _log.warning("going on without a cache: %s", error)
            self._client.close()
        self._client, self._welcomed, self._probe = None, False, None


def _asker(request: p.Request) -> str:
    """The id in vLLM of the request that asks, where the message has one."""
    return request.request if isinstance(request, p.GetMatch | p.PutMatch) else "no request"


def _is_done(reset: Pending) -> bool:
    """Whether the server has carried out *reset*, or will when its tiers are back."""
    if isinstance(reset.reply, p.Refused):
        return reset.reply.code == TierUnavailable.code
    return reset.reply is not None
