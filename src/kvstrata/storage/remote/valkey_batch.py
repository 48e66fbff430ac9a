"""One question about many keys, put to every server that holds some of them at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage.remote.resp import ASKING, ErrorReply, get_command, set_command
from kvstrata.storage.remote.valkey_address import Address
from kvstrata.storage.remote.value import HEADER_BYTES, Proof, header_of, judge_header

if TYPE_CHECKING:  # which import the optional package
    from kvstrata.storage.remote.valkey_links import Link, Session

__all__ = ["Fetch", "Flag", "Keep", "Routes", "Value", "ask_all"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Value = tuple[StoreKey, StoreKey | None, memoryview]  # a key, its parent, what is to be kept

_REDIRECTS: Final = 5  # of one question, as the servers' own client follows
_AHEAD_BYTES: Final = 4 << 20  # of values asked for or sent while those before are not yet read
_AHEAD_COMMANDS: Final = 64


class Routes(Protocol):
    """Which server holds which key."""

    def masters(self, session: Session) -> list[Address]:
        """Every server that holds keys."""
        ...

    def master_of(self, name: bytes, session: Session) -> Address: ...

    def redirect(self, name: bytes, reply: ErrorReply, asked: Address) -> tuple[Address, bool]:
        """Where *asked* sends us for *name*, and whether for this once only; raises *reply* if it
        sends us nowhere."""
        ...

    def doubt(self) -> None:
        """Ask anew who holds what: a call has failed."""
        ...


class Question(Protocol[T_co]):
    """What is asked about keys, which it knows by their positions in a batch.

    *once*: those for which a server is to be told that it sent us on for this once.
    """

    def begin(self, link: Link, positions: Sequence[int], once: Container[int]) -> None:
        """Send what can be sent before anything is answered."""
        ...

    def finish(
        self, link: Link, positions: Sequence[int], once: Container[int]
    ) -> Iterator[T_co | ErrorReply]:
        """One answer for each position, in order."""
        ...


def ask_all(
    session: Session, routes: Routes, names: Sequence[bytes], question: Question[T]
) -> list[T]:
    """The answer for each of *names*, in order."""
    answers: dict[int, T] = {}
    groups: dict[Address, list[int]] = defaultdict(list)
    for position, name in enumerate(names):
        groups[routes.master_of(name, session)].append(position)
    once: set[int] = set()
    redirects_left = _REDIRECTS
    while groups:
        refused = list(_ask_once(session, groups, question, answers, once))
        once.clear()
        groups = defaultdict(list)
        for position, asked, reply in sorted(refused, key=itemgetter(0)):
            if not redirects_left:
                raise reply
            address, for_once = routes.redirect(names[position], reply, asked)
            groups[address].append(position)
            if for_once:
                once.add(position)
        redirects_left -= 1
    return [answers[position] for position in range(len(names))]


def _ask_once(
    session: Session,
    groups: Mapping[Address, list[int]],
    question: Question[T],
    answers: dict[int, T],
    once: Container[int],
) -> Iterator[tuple[int, Address, ErrorReply]]:
    """Ask all servers side by side. Fills *answers*; gives the positions that got none."""
    for address, positions in groups.items():
        question.begin(session.link(address), positions, once)
    for address, positions in groups.items():
        found = question.finish(session.link(address), positions, once)
        for position, answer in zip(positions, found, strict=True):
            if isinstance(answer, ErrorReply):
                yield position, address, answer
            else:
                answers[position] = answer


class Flag:
    """A command of the library's whose answer is 1 or 0: EXISTS, UNLINK."""

    def __init__(self, word: bytes, names: Sequence[bytes]) -> None:
        self._word = word
        self._names = names

    def begin(self, link: Link, positions: Sequence[int], once: Container[int]) -> None:
        commands: list[tuple[bytes, ...]] = []
        for position in positions:
            if position in once:
                commands.append((b"ASKING",))
            commands.append((self._word, self._names[position]))
        link.ask(commands)

    def finish(
        self, link: Link, positions: Sequence[int], once: Container[int]
    ) -> Iterator[bool | ErrorReply]:
        for position in positions:
            if position in once:
                link.answer()
            try:
                yield link.answer() == 1
            except ErrorReply as reply:
                yield reply


class _InTurns(ABC, Generic[T]):
    """Values in turns: the next few are under way while the last few are read or answered.

    No more than that, since a server keeps in its memory what is asked for and not yet taken.
    """

    last_word: T | None = None  # an answer after which the server is asked no more: all get it

    def __init__(self, block_bytes: int) -> None:
        self._turn = min(_AHEAD_COMMANDS, max(1, _AHEAD_BYTES // block_bytes))

    def begin(self, link: Link, positions: Sequence[int], once: Container[int]) -> None:
        self._send(link, positions[: self._turn], once)

    def finish(
        self, link: Link, positions: Sequence[int], once: Container[int]
    ) -> Iterator[T | ErrorReply]:
        sent, rest = positions[: self._turn], positions[self._turn :]
        last_word: T | None = None
        while sent:
            following = [] if last_word is not None else rest[: self._turn]
            rest = rest[len(following) :]
            self._send(link, following, once)
            for position in sent:
                if position in once:
                    link.answers.status()
                answer = self._answer(link, position)
                if answer is self.last_word:
                    last_word = self.last_word
                yield answer
            sent = following
        if last_word is not None:
            yield from [last_word] * len(rest)

    def _answer(self, link: Link, position: int) -> T | ErrorReply:
        try:
            return self._receive(link, position)
        except ErrorReply as reply:
            return reply

    def _send(self, link: Link, positions: Sequence[int], once: Container[int]) -> None:
        parts: list[bytes | memoryview] = []
        for position in positions:
            parts += [ASKING] if position in once else []
            parts += self._question(position)
        if parts:
            link.stream.send_parts(parts)

    @abstractmethod
    def _question(self, position: int) -> Sequence[bytes | memoryview]: ...

    @abstractmethod
    def _receive(self, link: Link, position: int) -> T: ...


class Fetch(_InTurns[Read]):
    """GET into the caller's buffers; with a time to live GETEX, which renews it."""

    def __init__(
        self,
        names: Sequence[bytes],
        keys: Sequence[StoreKey],
        buffers: Sequence[memoryview],
        block_bytes: int,
        ttl_milliseconds: int | None,
    ) -> None:
        super().__init__(block_bytes)
        self._names = names
        self._keys = keys
        self._buffers = buffers
        self._ttl = ttl_milliseconds

    def _question(self, position: int) -> Sequence[bytes | memoryview]:
        return [get_command(self._names[position], self._ttl)]

    def _receive(self, link: Link, position: int) -> Read:
        key, buffer = self._keys[position], self._buffers[position]
        answers = link.answers
        try:
            stored_bytes = answers.value_bytes()
        except ErrorReply as reply:
            if reply.code == "WRONGTYPE":
                return Read.FOREIGN
            raise
        if stored_bytes is None:
            return Read.MISS
        header = answers.take(min(stored_bytes, HEADER_BYTES))
        fate = judge_header(header, key, stored_bytes, buffer.nbytes)
        value_bytes = stored_bytes - len(header)
        if fate is Read.HIT:
            proof = Proof(header)
            answers.receive(buffer[:value_bytes], proof.add)
            fate = proof.verdict()
        else:
            answers.discard(value_bytes, buffer)
        answers.end_value()
        return fate


class Keep(_InTurns[Write]):
    """SET of what is not there, from the caller's buffers."""

    last_word = Write.FULL

    def __init__(
        self,
        names: Sequence[bytes],
        values: Sequence[Value],
        block_bytes: int,
        ttl_milliseconds: int | None,
    ) -> None:
        super().__init__(block_bytes)
        self._names = names
        self._values = values
        self._ttl = ttl_milliseconds

    def _question(self, position: int) -> Sequence[bytes | memoryview]:
        key, parent, value = self._values[position]
        return set_command(self._names[position], header_of(key, parent, value), value, self._ttl)

    def _receive(self, link: Link, position: int) -> Write:
        try:
            return Write.STORED if link.answers.status() else Write.EXISTS
        except ErrorReply as reply:
            if reply.code == "OOM":
                return Write.FULL
            raise
