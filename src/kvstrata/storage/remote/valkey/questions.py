"""What is asked of a Valkey about keys: whether they are there, their values, to keep a value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage.remote.valkey.resp import (
    ASKING,
    ErrorReply,
    RespReader,
    get_command,
    set_command,
)
from kvstrata.storage.remote.value import HEADER_BYTES, Proof, header_of, judge_header

if TYPE_CHECKING:  # which import the optional package
    from kvstrata.storage.remote.valkey.batch import Answers
    from kvstrata.storage.remote.valkey.links import Link

__all__ = ["Fetch", "Flag", "Keep", "Value"]

T = TypeVar("T")
Value = tuple[StoreKey, StoreKey | None, memoryview]  # a key, its parent, what is to be kept

_AHEAD_BYTES: Final = 2 << 20  # of values asked for or sent while those before are not yet read
_AHEAD_COMMANDS: Final = 64
_SENT_BYTES: Final = 512 << 10  # gathered for one call of the system, unless one value is longer


class Flag:
    """A command of the library's whose answer is 1 or 0: EXISTS, UNLINK."""

    def __init__(self, word: bytes, names: Sequence[bytes], *, may_lag: bool = False) -> None:
        self.may_lag = may_lag
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
        self, link: Link, positions: Sequence[int], once: Container[int], answers: Answers[bool]
    ) -> None:
        for position in positions:
            if position in once:
                link.answer()
            try:
                answers[position] = link.answer() == 1
            except ErrorReply as reply:
                answers[position] = reply


class _InTurns(ABC, Generic[T]):
    """Values in turns: the next few are under way while the last few are read or answered.

    No more than that, since a server keeps in its memory what is asked for and not yet taken.
    """

    may_lag = False
    last_word: T | None = None  # an answer after which the server is asked no more: all get it

    def __init__(self, block_bytes: int) -> None:
        self._turn = min(_AHEAD_COMMANDS, max(1, _AHEAD_BYTES // block_bytes))

    def begin(self, link: Link, positions: Sequence[int], once: Container[int]) -> None:
        self._send(link, positions[: 2 * self._turn], once)

    def finish(
        self, link: Link, positions: Sequence[int], once: Container[int], answers: Answers[T]
    ) -> None:
        sent, rest = positions[: 2 * self._turn], positions[2 * self._turn :]
        has_last_word = False
        while sent:
            for position in sent[: self._turn]:
                if position in once:
                    link.answers.status()
                try:
                    answer = answers[position] = self._receive(link.answers, position)
                    has_last_word |= answer is self.last_word
                except ErrorReply as reply:
                    answers[position] = reply
            following = [] if has_last_word else rest[: self._turn]
            rest = rest[len(following) :]
            self._send(link, following, once)
            sent = [*sent[self._turn :], *following]
        for position in rest:
            answers[position] = self.last_word

    def _send(self, link: Link, positions: Sequence[int], once: Container[int]) -> None:
        parts: list[bytes | memoryview] = []
        gathered_bytes = 0
        for position in positions:
            question = self._question(position)
            parts += [ASKING, *question] if position in once else question
            gathered_bytes += sum(map(len, question))
            if gathered_bytes > _SENT_BYTES:
                link.stream.send_parts(parts)
                parts, gathered_bytes = [], 0
        if parts:
            link.stream.send_parts(parts)

    @abstractmethod
    def _question(self, position: int) -> list[bytes | memoryview]: ...

    @abstractmethod
    def _receive(self, answers: RespReader, position: int) -> T: ...


class Fetch(_InTurns[Read]):
    """GET into the caller's buffers; with a time to live GETEX, which renews it."""

    may_lag = True

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

    def _question(self, position: int) -> list[bytes | memoryview]:
        return [get_command(self._names[position], self._ttl)]

    def _receive(self, answers: RespReader, position: int) -> Read:
        key, buffer = self._keys[position], self._buffers[position]
        try:
            found = answers.value(HEADER_BYTES)
        except ErrorReply as reply:
            if reply.code == "WRONGTYPE":
                return Read.FOREIGN
            raise
        if found is None:
            return Read.MISS
        stored_bytes, header = found
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

    def _question(self, position: int) -> list[bytes | memoryview]:
        key, parent, value = self._values[position]
        header = header_of(key, parent, value)
        return set_command(self._names[position], header, value, self._ttl)

    def _receive(self, answers: RespReader, position: int) -> Write:
        try:
            return Write.STORED if answers.status() else Write.EXISTS
        except ErrorReply as reply:
            if reply.code == "OOM":
                return Write.FULL
            raise
