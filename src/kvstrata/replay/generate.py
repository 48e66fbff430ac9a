"""Synthetic traces in Mooncake's format, of four kinds of traffic.

* **chat**: a system prompt that many share, what the user has pasted, and messages with minutes
  between them; each prompt holds all that was said before.
* **document**: a question behind one of a thousand documents, the popular ones far more often.
* **agent**: a description of tools that many share, a task, and step after step a few seconds
  apart, each of which adds what a tool has said.
* **single**: a prompt that shares nothing with any other.

Only ``random.Random.random`` is asked for numbers, whose sequence Python promises to keep: a seed
gives the same trace everywhere. Memory grows with the sessions that are alive and the beginnings
that are shared, not with the trace.
"""

import heapq
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Final, Literal, NamedTuple

import msgspec

__all__ = ["MIX", "TOKENS_PER_ID", "GeneratedRequest", "Kind", "generate"]

TOKENS_PER_ID: Final = 512

Kind = Literal["chat", "document", "agent", "single"]
MIX: Final[Mapping[Kind, float]] = {"chat": 0.5, "document": 0.15, "agent": 0.2, "single": 0.15}

_MOST_TOKENS: Final = 128 * 1024  # a session that comes to more has ended


class _Tokens(NamedTuple):
    """A log-normal number of tokens."""

    median: float
    spread: float  # two thirds of the numbers are within a factor of e^spread


_NONE: Final = _Tokens(0, 0)


class _Traffic(NamedTuple):
    """What sessions of one kind look like."""

    shared: int  # how many beginnings there are; the n-th is asked for about as often as 1/n
    beginning: _Tokens  # shared
    opening: _Tokens  # of this session alone
    message: _Tokens  # added by each request
    answer: _Tokens
    requests: float  # in a session, on average
    pause_seconds: float  # between two requests, on average


_TRAFFIC: Final[Mapping[Kind, _Traffic]] = {
    "chat": _Traffic(
        shared=20,
        beginning=_Tokens(1200, 0.8),
        opening=_Tokens(800, 1.4),
        message=_Tokens(150, 1.2),
        answer=_Tokens(250, 0.9),
        requests=5,
        pause_seconds=90,
    ),
    "document": _Traffic(
        shared=1000,
        beginning=_Tokens(12_000, 0.9),
        opening=_NONE,
        message=_Tokens(80, 0.7),
        answer=_Tokens(200, 0.7),
        requests=1,
        pause_seconds=0,
    ),
    "agent": _Traffic(
        shared=8,
        beginning=_Tokens(6000, 0.5),
        opening=_Tokens(1500, 1.0),
        message=_Tokens(700, 1.0),
        answer=_Tokens(150, 0.8),
        requests=15,
        pause_seconds=8,
    ),
    "single": _Traffic(
        shared=0,
        beginning=_NONE,
        opening=_Tokens(4000, 1.0),
        message=_Tokens(100, 0.7),
        answer=_Tokens(200, 0.7),
        requests=1,
        pause_seconds=0,
    ),
}


class GeneratedRequest(msgspec.Struct, frozen=True):
    """A line of the trace."""

    timestamp: int  # ms
    input_length: int
    output_length: int
    hash_ids: list[int]


class _Beginning(NamedTuple):
    """Tokens that many prompts begin with."""

    ids: list[int]  # of its whole blocks
    tokens: int


@dataclass(slots=True)
class _Session:
    """A prompt that grows from request to request."""

    kind: Kind
    ids: list[int]  # of the whole blocks so far
    tokens: int  # so far
    requests_left: int


class _Dice:
    """Random numbers of the kinds that are needed here."""

    def __init__(self, seed: int) -> None:
        self._uniform = random.Random(seed).random

    def exponential(self, mean: float) -> float:
        return -math.log(1.0 - self._uniform()) * mean

    def tokens(self, wanted: _Tokens) -> int:
        radius = math.sqrt(-2.0 * math.log(1.0 - self._uniform()))
        normal = radius * math.cos(2 * math.pi * self._uniform())
        return min(_MOST_TOKENS, int(wanted.median * math.exp(wanted.spread * normal)))

    def geometric(self, mean: float) -> int:
        """A whole number from 1 on."""
        return 1 if mean == 1 else 1 + int(self.exponential(1.0) / -math.log(1.0 - 1.0 / mean))

    def zipf(self, choices: int) -> int:
        """A whole number from 0 to *choices* - 1, n about as often as 1 / (n + 1)."""
        return min(choices, int((choices + 1) ** self._uniform())) - 1

    def choose(self, weights: Mapping[Kind, float]) -> Kind:
        point = self._uniform() * sum(weights.values())
        for kind, weight in weights.items():
            point -= weight
            if point < 0:
                return kind
        return max(weights, key=weights.__getitem__)


def generate(
    requests: int, *, seconds: float, seed: int = 0, mix: Mapping[Kind, float] | None = None
) -> Iterator[GeneratedRequest]:
    """*requests* in order of arrival; sessions begin all along, so that they come in about *seconds*.

    *mix* says what share of the requests, about, is of which kind.
    """
    return _Generator(seed, mix or MIX).requests(requests, seconds)


class _Generator:
    def __init__(self, seed: int, mix: Mapping[Kind, float]) -> None:
        self._dice = _Dice(seed)
        self._fresh = count()
        self._beginnings: dict[tuple[Kind, int], _Beginning] = {}
        self._sessions = {
            kind: share / _TRAFFIC[kind].requests for kind, share in mix.items() if share > 0
        }
        self._requests_a_session = sum(mix.values()) / sum(self._sessions.values())

    def requests(self, wanted: int, seconds: float) -> Iterator[GeneratedRequest]:
        gap_seconds = seconds * self._requests_a_session / wanted
        order = count()  # of sessions that are due at the same time
        due: list[tuple[float, int, _Session]] = []
        next_start = self._dice.exponential(gap_seconds)
        for _ in range(wanted):
            while not due or next_start <= due[0][0]:
                heapq.heappush(due, (next_start, next(order), self._begin()))
                next_start += self._dice.exponential(gap_seconds)
            now, _, session = heapq.heappop(due)
            traffic = _TRAFFIC[session.kind]
            self._grow(session, max(1, self._dice.tokens(traffic.message)))
            answer = max(1, self._dice.tokens(traffic.answer))
            yield GeneratedRequest(int(now * 1000), session.tokens, answer, self._hash_ids(session))
            self._grow(session, answer)
            session.requests_left -= 1
            if session.requests_left and session.tokens < _MOST_TOKENS:
                later = now + self._dice.exponential(traffic.pause_seconds)
                heapq.heappush(due, (later, next(order), session))

    def _begin(self) -> _Session:
        kind = self._dice.choose(self._sessions)
        traffic = _TRAFFIC[kind]
        beginning = self._beginning(kind) if traffic.shared else _Beginning([], 0)
        requests = self._dice.geometric(traffic.requests)
        session = _Session(kind, beginning.ids.copy(), beginning.tokens, requests)
        self._grow(session, self._dice.tokens(traffic.opening))
        return session

    def _beginning(self, kind: Kind) -> _Beginning:
        """One of those that prompts of this kind share, made when it is first needed."""
        key = (kind, self._dice.zipf(_TRAFFIC[kind].shared))
        if key not in self._beginnings:
            tokens = self._dice.tokens(_TRAFFIC[kind].beginning)
            ids = [next(self._fresh) for _ in range(tokens // TOKENS_PER_ID)]
            self._beginnings[key] = _Beginning(ids, tokens)
        return self._beginnings[key]

    def _grow(self, session: _Session, tokens: int) -> None:
        session.tokens += tokens
        while len(session.ids) < session.tokens // TOKENS_PER_ID:
            session.ids.append(next(self._fresh))

    def _hash_ids(self, session: _Session) -> list[int]:
        """Also one for a part of a block at the end, which is another in every request."""
        tail = [next(self._fresh)] if session.tokens % TOKENS_PER_ID else []
        return [*session.ids, *tail]
