"""What one client may ask, in which order, and the answers. Nothing here waits for anything."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from kvstrata.core.config import Config
from kvstrata.core.errors import (
    ConfigError,
    KVStrataError,
    LimitExceeded,
    NoTiers,
    ProtocolError,
)
from kvstrata.core.types import BlockFormat
from kvstrata.manager.manager import KVManager
from kvstrata.manager.states import MOST_ENDS
from kvstrata.manager.tasks import TaskStatus
from kvstrata.server import protocol as p
from kvstrata.server.client_log import ClientLog
from kvstrata.server.following import Following
from kvstrata.server.held_tasks import HeldTasks, blocks_of
from kvstrata.server.limits import Limits
from kvstrata.server.operating import OPERATOR_QUESTIONS, OPERATORS

T = TypeVar("T")
_QUESTIONS: Final = (
    *(p.GetMatch, p.PutMatch, p.TryWait, p.Workers, p.Ping),
    *OPERATOR_QUESTIONS,
)
_SHOWN_CHARACTERS: Final = 80  # of a session's name in the log
_ROLES: Final = frozenset({"engine", "worker", "observer"})


class Host(Protocol):
    """What a conversation needs of its server."""

    config: Config
    limits: Limits
    client_log: ClientLog

    @property
    def manager(self) -> KVManager | None: ...

    def open(self, block_bytes: int, block_format: BlockFormat) -> KVManager:
        """Waits for disks unless there is a manager."""
        ...

    def post(self, call: Callable[[], None]) -> None:
        """Have *call* made on the server's thread; thread-safe."""
        ...

    def submit(self, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Have *work* done on a thread that may wait, and *done* be called with what came of it."""
        ...


class Conversation:
    """One client: from its hello to its end."""

    def __init__(
        self,
        host: Host,
        send: Callable[[bytes, tuple[int, ...]], None],
        resumed: Callable[[], None],
    ) -> None:
        """*send* takes frames, and descriptors that go with the first.

        *resumed* is called when ``is_waiting`` or ``is_resetting`` has become false.
        """
        self.host = host
        self._send_frame = send
        self._resumed = resumed
        self._hello: p.Hello | None = None
        self._name = ""  # for the log, from the hello on
        self._manager: KVManager | None = None
        self._owner: int | None = None
        self._operator: int | None = None  # the owner of what an observer has brought up
        self._following: Following | None = None
        self.is_over = False  # nobody hears an answer any more
        self.is_broken = False  # by a bug: nobody can say what the client would make of an answer
        self.is_waiting = False  # for disks: the client's next request has to wait too
        self.is_resetting = False  # below host memory: another reset has to wait, nothing else
        self._held = HeldTasks(host.limits, lambda ids: self.tiers().try_wait(ids))

    @property
    def has_begun(self) -> bool:
        """Whether the client has said hello."""
        return self._hello is not None

    def take(self, body: bytes, *, is_deaf: bool) -> None:
        """Answer the request *body*; raises ``ProtocolError`` if the client cannot be talked to.

        To a client that *is_deaf*, what it only asked for the answer is of no use any more.
        """
        request = p.decode_request(body)
        if is_deaf and isinstance(request, _QUESTIONS):
            return
        if self._hello is None and not isinstance(request, p.Hello):
            raise ProtocolError("no hello came first")
        self._answer(request, partial(_HANDLERS[type(request)], self, request))

    def release(self) -> None:
        """The client asks nothing more: release all that it held. Answers may still go to it."""
        following, self._following = self._following, None
        if following is not None:
            following.end()
        owner, self._owner = self._owner, None
        if self._manager and owner is not None:
            self.host.client_log.tell("%s has left", self._name)
            self._manager.disconnect(owner)
        operator, self._operator = self._operator, None
        if operator is not None:
            self.tiers().disconnect(operator)

    # -- requests ----------------------------------------------------------------------------

    def _on_hello(self, hello: p.Hello) -> None:
        if self._hello is not None:
            raise ProtocolError("a second hello")
        if hello.version != p.PROTOCOL_VERSION:
            raise ConfigError(
                f"the client speaks protocol {hello.version}, this server {p.PROTOCOL_VERSION}",
                hint="install the same version of kvstrata on both sides",
            )
        if hello.role not in _ROLES:
            raise ProtocolError(f"unknown role {hello.role!r}")
        self._hello, self._name = hello, _name_of(hello)
        if hello.role == "observer":
            self._manager = self.host.manager
            self.send(p.Welcome(hello.seq, b"", 0, 0))
            return
        if hello.block_bytes < 1 or hello.world_size < 1:
            raise ProtocolError("blocks without bytes, or an engine without workers")
        open_tiers = partial(self.host.open, hello.block_bytes, hello.block_format)
        if self.host.manager is None:
            self.later(hello, open_tiers, partial(self._admit, hello))
        else:
            self._admit(hello, open_tiers())

    def _admit(self, hello: p.Hello, manager: KVManager) -> None:
        if hello.role == "engine":
            lasting = self.host.config.lasting_tiers
            if not hello.persistent and lasting:
                raise ConfigError(
                    "the engine's block hashes or weights cannot be told apart in its next life, "
                    f"and this server has a {lasting[0].kind} tier",
                    hint="see the engine's log for the setting to change, or use a server "
                    "with host memory alone",
                )
            self._owner = manager.connect_engine(
                hello.session, hello.world_size, life=hello.life, running=hello.running
            )
            self.host.client_log.tell(
                "%s has joined; workers here: %d of %d",
                self._name,
                manager.workers(self._owner),
                hello.world_size,
            )
        self._manager = manager
        mapping = manager.memory.mapping
        welcome = p.Welcome(hello.seq, manager.server_id, mapping.slots, mapping.slot_bytes)
        self.send(welcome, (mapping.fd,) if hello.role == "worker" else ())

    def _on_mapped(self, request: p.Mapped) -> None:
        hello = self._hello
        if hello is None or hello.role != "worker" or self._owner is not None:
            raise ProtocolError("mapped is for workers, once, after hello")
        self._owner = self._cache().connect_worker(hello.session, hello.rank)
        self.host.client_log.tell("%s has joined", self._name)
        self.send(p.Number(request.seq, 0))

    def _on_register(self, request: p.Register) -> None:
        namespace = p.checked_namespace(request.namespace)
        if sum(len(k) + len(v) for k, v in request.parts.items()) > p.MAX_PARTS_BYTES:
            raise LimitExceeded(
                f"what namespace {namespace.hex()} stands for takes more than "
                f"{p.MAX_PARTS_BYTES} bytes and is not kept"
            )
        self._cache().register_namespace(namespace, request.parts)

    def _on_get_match(self, request: p.GetMatch) -> None:
        namespace, keys = p.checked_namespace(request.namespace), p.split_keys(request.keys)
        me, cache = self._me(), self._cache()
        self._held.check()
        status = cache.get_match(
            namespace,
            keys,
            owner=me,
            request=request.request,
            states=request.states,
            settled=self._on_settled,
        )
        most = blocks_of(status, len(keys)) + MOST_ENDS * request.states
        self._held.add(status.task_id, most)
        self.send(p.Task(request.seq, p.pack(status)))

    def _on_settled(self, status: TaskStatus) -> None:
        """On an I/O thread, or within ``get_match``: the news are sent after the answer to that."""
        self.host.post(lambda: self._tell(status))

    def _tell(self, status: TaskStatus) -> None:
        if not self.is_over:
            self.send(p.Settled(p.pack(status)))

    def _on_put_match(self, request: p.PutMatch) -> None:
        namespace, keys = p.checked_namespace(request.namespace), p.split_keys(request.keys)
        parent = p.checked_parent(request.parent)
        me, cache = self._me(), self._cache()
        self._held.check()
        status = cache.put_match(
            namespace,
            keys,
            parent=parent,
            owner=me,
            request=request.request,
            prompt_blocks=request.prompt_blocks,
        )
        self._held.add(status.task_id, len(status.slots))
        self.send(p.Task(request.seq, p.pack(status)))

    def _on_launch(self, request: p.Launch) -> None:
        me = self._me()
        self._held.launched(request.task_ids)
        self._cache().launch(request.task_ids, owner=me)

    def _on_complete(self, request: p.Complete) -> None:
        me = self._me()
        self._held.completed(request.task_ids)
        self._cache().complete(request.task_ids, owner=me)

    def _on_complete_part(self, request: p.CompletePart) -> None:
        me = self._me()
        self._held.completed([request.task_id])
        self._cache().complete_part(request.task_id, request.blocks, owner=me)

    def _on_fail(self, request: p.Fail) -> None:
        me = self._me()
        self._held.failed(request.task_ids)
        self._cache().fail(request.task_ids, owner=me)

    def _on_cancel(self, request: p.Cancel) -> None:
        me = self._asker()
        self._held.cancelled(request.task_ids)
        self.tiers().cancel(request.task_ids, owner=me)

    def _on_try_wait(self, request: p.TryWait) -> None:
        self._asker()
        statuses: list[p.Status] = []
        answer_bytes = 0
        for task_id in dict.fromkeys(request.task_ids):
            for status in self.tiers().try_wait([task_id]).values():
                statuses.append(p.pack(status))
                answer_bytes += len(statuses[-1].slots) + len(statuses[-1].generations)
            if answer_bytes > self.host.limits.tasks_answer_bytes:
                raise LimitExceeded("the answer would be too long", hint="ask for fewer tasks")
        self.send(p.Tasks(request.seq, statuses))

    def _on_prefetch(self, request: p.Prefetch) -> None:
        namespace, keys = p.checked_namespace(request.namespace), p.split_keys(request.keys)
        me, cache = self._asker(), self.tiers()
        self._held.check()
        task_id = cache.prefetch(namespace, keys, owner=me)
        self._held.add(task_id, len(keys))
        self.send(p.Number(request.seq, task_id))

    def _on_reset(self, request: p.Reset) -> None:
        namespace, cache = p.checked_namespace(request.namespace), self._cache()
        answer = partial(self._answer_reset, request, cache.forget(namespace))
        if self.is_resetting:
            self.later(request, cache.drop_forgotten, answer)
            return

        def done(outcome: Exception | None) -> None:
            self.is_resetting = False
            self._conclude(request, outcome, answer)

        self.is_resetting = True
        self.host.submit(cache.drop_forgotten, done)

    def _answer_reset(self, request: p.Reset, dropped: int, _: None) -> None:
        namespace = request.namespace.hex()
        self.host.client_log.tell("namespace %s is reset; blocks dropped: %d", namespace, dropped)
        self.send(p.Number(request.seq, dropped))

    def _on_follow(self, request: p.Follow) -> None:
        namespace = p.checked_namespace(request.namespace)
        self._me()
        if self._following is not None:
            self._following.end()
        self._following = Following(self._cache().feed, namespace, self.host.post, self.send)

    def _on_heard(self, request: p.Heard) -> None:
        if self._following is not None:
            self._following.heard()

    def _on_measured(self, request: p.Measured) -> None:
        self._cache().measured(self._me(), request.blocks_per_second)

    def _on_workers(self, request: p.Workers) -> None:
        self.send(p.Number(request.seq, self._cache().workers(self._me())))

    def _on_ping(self, request: p.Ping) -> None:
        self.send(p.Number(request.seq, 0))

    # -- plumbing ----------------------------------------------------------------------------

    def later(self, request: p.Request, work: Callable[[], T], answer: Callable[[T], None]) -> None:
        """Have *work* done where it may wait; until *answer* this client's next request waits."""

        def done(outcome: T | Exception) -> None:
            self.is_waiting = False
            self._conclude(request, outcome, answer)

        self.is_waiting = True
        self.host.submit(work, done)

    def _conclude(
        self, request: p.Request, outcome: T | Exception, answer: Callable[[T], None]
    ) -> None:
        """Tell the client what came of what was submitted for *request*."""
        if self.is_over:
            return
        if isinstance(outcome, KVStrataError):
            self._refuse(request, outcome)
        elif isinstance(outcome, Exception):
            self.is_broken = True
        else:
            self._answer(request, partial(answer, outcome))
        self._resumed()

    def _answer(self, request: p.Request, answer: Callable[[], None]) -> None:
        """Call *answer*, and tell the client what it objects to."""
        try:
            answer()
        except ProtocolError:
            raise
        except KVStrataError as e:
            self._refuse(request, e)

    def tiers(self) -> KVManager:
        """The manager, for those who are no engine."""
        if self.host.manager is None:
            raise NoTiers(
                "this server has no tiers yet",
                hint="start an engine with it, or give --block-bytes",
            )
        return self.host.manager

    def _cache(self) -> KVManager:
        if self._manager is None:
            raise ProtocolError("the hello was that of an observer, or was refused")
        return self._manager

    def _me(self) -> int:
        if self._owner is None:
            raise ProtocolError("only an engine has tasks")
        return self._owner

    def _asker(self) -> int:
        """Who has blocks brought up: an engine, or an observer, who gets a number for it."""
        if self._hello is None or self._hello.role != "observer":
            return self._me()
        if self._operator is None:
            self._operator = self.tiers().connect_operator()
        return self._operator

    def _refuse(self, request: p.Request, error: KVStrataError) -> None:
        seq = getattr(request, "seq", None)
        if seq is None:
            self.host.client_log.warn("a request failed: %s", error)
            return
        message = str(error.args[0]) if error.args else str(error)
        if isinstance(request, p.Hello) and request.role != "observer":
            self.host.client_log.warn_once(f"{_name_of(request)} is refused: {message}")
        self.send(p.Refused(seq, error.code, message, error.hint))

    def send(self, reply: p.Reply, descriptors: tuple[int, ...] = ()) -> None:
        self._send_frame(p.encode(reply), descriptors)


_HANDLERS: Final[dict[type, Callable[[Conversation, Any], None]]] = {
    **OPERATORS,
    p.Hello: Conversation._on_hello,
    p.Mapped: Conversation._on_mapped,
    p.Register: Conversation._on_register,
    p.GetMatch: Conversation._on_get_match,
    p.PutMatch: Conversation._on_put_match,
    p.Launch: Conversation._on_launch,
    p.Complete: Conversation._on_complete,
    p.CompletePart: Conversation._on_complete_part,
    p.Fail: Conversation._on_fail,
    p.Cancel: Conversation._on_cancel,
    p.TryWait: Conversation._on_try_wait,
    p.Prefetch: Conversation._on_prefetch,
    p.Reset: Conversation._on_reset,
    p.Follow: Conversation._on_follow,
    p.Heard: Conversation._on_heard,
    p.Measured: Conversation._on_measured,
    p.Workers: Conversation._on_workers,
    p.Ping: Conversation._on_ping,
}


def _name_of(hello: p.Hello) -> str:
    """Who says *hello*, for the log: a session is whatever the client says, on one short line."""
    session = repr(hello.session[:_SHOWN_CHARACTERS])
    return (
        f"rank {hello.rank} of engine {session}" if hello.role == "worker" else f"engine {session}"
    )
