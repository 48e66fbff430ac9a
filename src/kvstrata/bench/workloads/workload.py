"""What a workload is: steps that every contender takes, one contender after the other."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from kvstrata.bench.traffic import Conversation, Traffic, Turn

__all__ = ["COLD_TOKENS", "Before", "Scale", "Step", "Tier", "Workload", "one_prompt", "tokens"]

COLD_TOKENS: Final = 2050  # whole blocks and two: ExampleConnector finds nothing at one
Before = Literal["nothing", "reset", "restart"]
Tier = Literal["none", "device", "host", "disk", "remote"]


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a workload is made, and what its prompts are made of."""

    prompt_tokens: Sequence[int]  # of single prompts
    users: int  # of a chat
    rates: Sequence[float]  # requests that arrive in *cold_seconds*, on average
    seconds: float  # of each rate
    requests: int  # of a trace
    vocabulary: int
    most_tokens: int  # of a prompt and its answer
    cold_seconds: float  # to the first token of COLD_TOKENS new ones, measured here and now


@dataclass(frozen=True, slots=True)
class Step:
    """Traffic for every contender that can take it.

    *before* it an engine's device cache is emptied (reset), or the engine is started anew
    (restart). With *tier* only contenders take it that can hit there, and it is meant to be such a
    hit: an answer counts if *cached_tokens* were reused. What is not *measured* only prepares.
    *kill_server_seconds* after the start of the traffic the server of the cache is killed,
    *restart_seconds* after it the engine is started anew (``run_with_restart``).
    """

    name: str
    traffic: Traffic
    before: Before = "nothing"
    tier: Tier | None = None
    cached_tokens: int | None = None
    measured: bool = True
    kill_server_seconds: float | None = None
    restart_seconds: float | None = None

    @property
    def longest_tokens(self) -> int:
        """Of a first prompt."""
        return max(len(talk.turns[0].tokens) for talk in self.traffic.conversations)


class Workload(Protocol):
    """A source of steps. The same *dice* give the same ones."""

    @property
    def title(self) -> str:
        """What is measured, in a sentence."""
        ...

    @property
    def contenders(self) -> tuple[str, ...]: ...

    def steps(self, dice: random.Random, scale: Scale) -> Iterator[Step]:
        """Of one round, whose tokens no other round has."""
        ...


def tokens(dice: random.Random, scale: Scale, count: int) -> list[int]:
    return [dice.randrange(1, scale.vocabulary) for _ in range(count)]


def one_prompt(prompt: list[int], answer_tokens: int = 1) -> Traffic:
    return Traffic([Conversation([Turn(prompt, answer_tokens)])])
