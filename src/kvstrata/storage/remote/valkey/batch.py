"""One question about many keys, put to every server that holds some of them at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Protocol, TypeVar

from kvstrata.storage.remote.valkey.address import Address
from kvstrata.storage.remote.valkey.deadline_socket import remaining_seconds, wait_readable
from kvstrata.storage.remote.valkey.resp import ErrorReply

if TYPE_CHECKING:  # which import the optional package
    from kvstrata.storage.remote.valkey.links import Link, Session

__all__ = ["Answers", "Asked", "Question", "Routes", "ask_all"]

T = TypeVar("T")
Answers = list[T | ErrorReply | None]
Groups = Mapping[Address, Sequence[int]]  # what each server is asked for: positions in the batch

_REDIRECTS: Final = 5  # of one question, as the servers' own client follows


class Routes(Protocol):
    """Which server holds which key."""

    def masters(self, session: Session) -> list[Address]:
        """Every server that holds keys."""
        ...

    def groups(self, names: Sequence[bytes], session: Session, *, may_lag: bool) -> Groups:
        """The server to ask for each of *names*; those that nobody holds are left out.

        *may_lag*: one that follows the one that decides will do.
        """
        ...

    def redirect(
        self, name: bytes, reply: ErrorReply, asked: Address
    ) -> tuple[Address, bool] | None:
        """Where *asked* sends us for *name*, and whether for this once only; ``None``: nowhere."""
        ...

    def pause_of(self, address: Address) -> Exception | None:
        """Why a server is to be left alone now, if it is."""
        ...

    def failed(self, address: Address, fault: Exception) -> None:
        """A server has not done what it was asked. Raises *fault* if no other would have."""
        ...

    def answered(self, address: Address) -> None: ...


class Question(Protocol[T]):
    """What is asked about keys, which it knows by their positions in a batch.

    *may_lag*: an answer of some moments ago will do. *once*: those for which a server is to be told that it sent us on for this once.
    """

    @property
    def may_lag(self) -> bool: ...

    def begin(self, link: Link, positions: Sequence[int], once: Container[int]) -> None:
        """Send what can be sent before anything is answered."""
        ...

    def finish(
        self, link: Link, positions: Sequence[int], once: Container[int], answers: Answers[T]
    ) -> None:
        """Read the answer for each position into *answers*."""
        ...


class Asked(NamedTuple, Generic[T]):
    """What has become of a question."""

    answers: list[T | None]  # in the order of the names; None: its server could not be asked
    faults: Mapping[int, Exception]  # why not, by position


def ask_all(
    session: Session, routes: Routes, names: Sequence[bytes], question: Question[T]
) -> Asked[T]:
    """Ask for all *names*, all servers side by side.

    Raises what *routes* make of a server's fault; else it costs the answers of that server alone,
    and no more than half of the time that is left.
    """
    answers: Answers[T] = [None] * len(names)
    faults: dict[int, Exception] = {}
    groups = routes.groups(names, session, may_lag=question.may_lag)
    if sum(map(len, groups.values())) < len(names):
        held = {position for positions in groups.values() for position in positions}
        fault = ErrorReply("CLUSTERDOWN no server of the cluster holds its slot")
        faults |= dict.fromkeys(set(range(len(names))) - held, fault)
    once: set[int] = set()
    for redirects_left in reversed(range(_REDIRECTS + 1)):
        for address, failed in _Round(session, routes, groups, once).ask(question, answers).items():
            faults |= {each: failed for each in groups[address] if answers[each] is None}
        refused = [
            (position, address, reply)
            for address, positions in groups.items()
            for position in positions
            if isinstance(reply := answers[position], ErrorReply)
        ]
        if not refused:
            break
        if not redirects_left:
            raise refused[0][-1]
        once = set()
        sent_on: defaultdict[Address, list[int]] = defaultdict(list)
        for position, asked, reply in sorted(refused):  # a key twice is asked for in its order
            answers[position] = None
            way = routes.redirect(names[position], reply, asked)
            if way is None:
                routes.failed(asked, reply)
                faults[position] = reply
                continue
            sent_on[way[0]].append(position)
            if way[1]:
                once.add(position)
        groups = sent_on
    return Asked([each for each in answers if not isinstance(each, ErrorReply)], faults)


class _Round:
    """One question to each of some servers.

    A server that fails keeps the others waiting for no longer than half of the time that is left.
    """

    def __init__(
        self, session: Session, routes: Routes, groups: Groups, once: Container[int]
    ) -> None:
        self._session = session
        self._routes = routes
        self._groups = groups
        self._once = once
        self._faults: dict[Address, Exception] = {}

    def ask(self, question: Question[T], answers: Answers[T]) -> dict[Address, Exception]:
        """Put what servers answer into *answers*; the faults of those that do not."""
        waiting = self._begin(question)
        while waiting:
            ready = self._ready(waiting)
            for address in ready or waiting:
                waiting = [each for each in waiting if each != address]
                if not ready:
                    self._session.lose(address)
                    self._fail(address, TimeoutError("it has not answered in time"))
                    continue
                positions = self._groups[address]
                finish = partial(
                    question.finish, positions=positions, once=self._once, answers=answers
                )
                if self._attempt(address, finish, is_last=not waiting):
                    self._routes.answered(address)
        return self._faults

    def _begin(self, question: Question[T]) -> list[Address]:
        """The servers that are asked now."""
        asked = []
        for number, (address, positions) in enumerate(self._groups.items(), 1):
            pause = self._routes.pause_of(address)
            begin = partial(question.begin, positions=positions, once=self._once)
            if pause is not None:
                self._faults[address] = pause
            elif self._attempt(address, begin, is_last=number == len(self._groups)):
                asked.append(address)
        return asked

    def _ready(self, waiting: Sequence[Address]) -> list[Address]:
        """Those of *waiting* whose answers begin to come; none if none do."""
        if len(self._groups) == 1:
            return list(waiting)
        streams = [self._session.link(address).stream for address in waiting]
        ready = wait_readable(streams, self._half_time())
        return [waiting[number] for number in ready]

    def _attempt(self, address: Address, step: Callable[[Link], None], *, is_last: bool) -> bool:
        """Whether *step* succeeds by the deadline, or half-way there unless it *is_last*."""
        deadline = self._session.deadline if is_last else self._half_time()
        fault = self._session.attempt(address, step, deadline)
        if fault is not None:
            self._fail(address, fault)
        return fault is None

    def _fail(self, address: Address, fault: Exception) -> None:
        self._faults[address] = fault
        self._routes.failed(address, fault)

    def _half_time(self) -> float:
        return self._session.deadline - remaining_seconds(self._session.deadline) / 2
