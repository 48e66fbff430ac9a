"""Bytes, of whatever origin, read as what a client says: the shape of messages, any content."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tests.caches import BLOCK_BYTES, key

from kvstrata.server import protocol as p

SESSION: Final = "fuzz"
NAMESPACE: Final = b"fuzz".ljust(16, b".")
EDGES: Final = (
    *(0, 1, -1, 2, 255, 4096, 2**31 - 1, 2**31, 2**32),
    *(2**40, 2**63 - 1, -(2**63), 2**64 - 1),
)
TEXTS: Final = ("", "engine", "worker", "observer", "exact", "int8", SESSION, "x" * 257)
HELLO: Final = p.Hello(0, p.PROTOCOL_VERSION, "engine", SESSION, BLOCK_BYTES)
_MOST_MESSAGES: Final = 64


class _Reader:
    """Takes values from the front of *data*, and zeros when there is no more."""

    def __init__(self, data: bytes, tasks: Sequence[int]) -> None:
        self._data = data
        self._tasks = tasks
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def byte(self) -> int:
        return (self.take(1) or b"\0")[0]

    def take(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    def number(self) -> int:
        """An edge, or a small one."""
        choice = self.byte()
        return EDGES[choice] if choice < len(EDGES) else choice - 128

    def text(self) -> str:
        choice = self.byte()
        if choice < len(TEXTS):
            return TEXTS[choice]
        return self.take(choice % 16).decode("latin-1")

    def namespace(self) -> bytes:
        return self.take(16) if self.byte() % 4 == 1 else NAMESPACE

    def keys(self) -> bytes:
        choice = self.byte()
        if choice % 8 == 1:
            return self.take(choice)
        return b"".join(key(self.byte() % 12) for _ in range(choice % 12))

    def parent(self) -> bytes:
        return (b"", key(0), self.take(3))[self.byte() % 3]

    def task_ids(self) -> list[int]:
        """Mostly of tasks that this client was given."""
        return [self._task_id() for _ in range(self.byte() % 5)]

    def _task_id(self) -> int:
        choice = self.byte()
        if self._tasks and choice % 4:
            return self._tasks[-1 - choice % len(self._tasks)]
        return self.number()


def said(data: bytes, tasks: Sequence[int]) -> Iterator[bytes]:
    """The pieces in which *data* is said; *tasks* grows while they are."""
    reader = _Reader(data, tasks)
    if reader.byte() % 8:
        yield p.encode(HELLO)
    for _ in range(_MOST_MESSAGES):
        if not reader:
            return
        yield _piece(reader)


def _piece(reader: _Reader) -> bytes:
    """A whole frame, mostly, a damaged one, or noise."""
    choice = reader.byte()
    if choice < 8:
        return reader.take(choice)
    if choice < 24:
        body = reader.take(reader.byte())
        return p.LENGTH.pack(len(body)) + body
    frame = p.encode(_MESSAGES[choice % len(_MESSAGES)](reader))
    if choice < 232:
        return frame
    at, noise = reader.byte(), reader.take(choice % 4)
    return frame[:at] + noise + frame[at + choice % 3 :]


def _hello(r: _Reader) -> p.Hello:
    return p.Hello(
        r.number(),
        r.number() if r.byte() & 1 else p.PROTOCOL_VERSION,
        r.text(),
        r.text(),
        r.number(),
        bool(r.byte() & 1),
        r.number(),
        r.number(),
        r.text(),
        r.text(),
        r.task_ids(),
    )


_MESSAGES: Final[tuple[Callable[[_Reader], p.Request], ...]] = (
    _hello,
    lambda r: p.Mapped(r.number()),
    lambda r: p.Register(r.namespace(), {r.text(): r.text() for _ in range(r.byte() % 4)}),
    lambda r: p.GetMatch(r.number(), r.namespace(), r.keys()),
    lambda r: p.GetMatch(r.number(), r.namespace(), r.keys(), r.text()),
    lambda r: p.GetMatch(r.number(), r.namespace(), r.keys(), r.text(), r.byte() % 66),
    lambda r: p.PutMatch(r.number(), r.namespace(), r.keys(), r.parent()),
    lambda r: p.PutMatch(r.number(), r.namespace(), r.keys(), r.parent(), r.text(), r.number()),
    lambda r: p.Launch(r.task_ids()),
    lambda r: p.Launch(r.task_ids()),
    lambda r: p.Complete(r.task_ids()),
    lambda r: p.CompletePart(r.number(), r.number()),
    lambda r: p.CompletePart((r.task_ids() or [0])[0], r.byte() % 4),
    lambda r: p.Fail(r.task_ids()),
    lambda r: p.Cancel(r.task_ids()),
    lambda r: p.TryWait(r.number(), r.task_ids()),
    lambda r: p.Prefetch(r.number(), r.namespace(), r.keys()),
    lambda r: p.Reset(r.number(), r.namespace()),
    lambda r: p.Follow(r.namespace()),
    lambda r: p.Heard(),
    lambda r: p.Stats(r.number()),
    lambda r: p.Measured(r.number() * 0.5),
    lambda r: p.Explain(r.number(), r.text()),
    lambda r: p.Pin(r.number(), r.namespace(), r.keys(), r.number() * 0.5),
    lambda r: p.PinRequest(r.number(), r.text(), r.number() * 0.5),
    lambda r: p.Unpin(r.number(), r.number()),
    lambda r: p.Hottest(r.number(), r.number()),
    lambda r: p.Prompt(r.number(), r.namespace(), r.parent()),
    lambda r: p.Locate(r.number(), r.namespace(), r.keys()),
    lambda r: p.Clear(
        r.number(), r.namespace(), ("", "host", r.text())[r.byte() % 3], bool(r.byte() & 1)
    ),
    lambda r: p.Drain(r.number(), bool(r.byte() & 1)),
    lambda r: p.Workers(r.number()),
    lambda r: p.Ping(r.number()),
)
