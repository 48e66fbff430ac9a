"""What an engine is asked, and what it answers: data that goes between the bench and its engines."""

from typing import Literal

import msgspec

__all__ = ["Answer", "Conversation", "Counters", "Traffic", "Turn"]


class Turn(msgspec.Struct, frozen=True):
    """Tokens that follow all that was said before, and how many the engine is to answer with."""

    tokens: list[int]
    answer_tokens: int


class Conversation(msgspec.Struct, frozen=True):
    """Turns, each of which goes on from the prompt and the answer of the one before.

    With *due_seconds* the first turn is asked then, counted from the start of the traffic, however
    busy the engine is (open loop). Without, it waits for one of ``Traffic.users``.
    """

    turns: list[Turn]
    due_seconds: float | None = None


class Traffic(msgspec.Struct, frozen=True):
    """Conversations that one engine gets.

    Those that are not due at a time wait in one queue, from which *users* take turns: the one at
    the front is asked its next turn, and then goes to the end. So between two turns of a
    conversation lie those of all others. What has no answer after *cut_seconds* is left.
    """

    conversations: list[Conversation]
    users: int = 1
    blend: bool = False
    cut_seconds: float | None = None

    @property
    def turns(self) -> int:
        return sum(len(conversation.turns) for conversation in self.conversations)


class Answer(msgspec.Struct, frozen=True):
    """One turn as it went. Times are in seconds; a turn that is due counts from when it is due."""

    conversation: int
    turn: int
    prompt_tokens: int
    cached_tokens: int
    first_token_seconds: float
    gap_seconds: list[float]  # between one output of tokens and the next
    answer_tokens: int
    failure: str | None = None  # why there is no answer
    tokens_hash: int | None = None  # equal for equal tokens; None: not kept


class Counters(msgspec.Struct, frozen=True):
    """What a contender has counted so far; empty where nothing counts."""

    moved_bytes: dict[str, int] = {}  # "host read", "disk write", ...
    promoted_blocks: dict[str, int] = {}  # by the tier that they came from
    waiting: bool = False  # something is still being saved or written


class Run(msgspec.Struct, tag=True):
    traffic: Traffic


class Ask(msgspec.Struct, tag=True):
    what: Literal["reset", "counters"]


Order = Run | Ask


class Ready(msgspec.Struct, tag=True):
    """It can be asked."""


class Ran(msgspec.Struct, tag=True):
    seconds: float
    answers: list[Answer]
    engine_died: bool = False  # of this or before: nothing more will be answered
    # From the end of a restarted engine to the next first token.
    silent_seconds: float | None = None


class WasReset(msgspec.Struct, tag=True):
    done: bool  # not while blocks are in use


class Counted(msgspec.Struct, tag=True):
    counters: Counters
    server_pids: list[int] = []  # of KVStrata's own, which does not descend from the engine


Reply = Ready | Ran | WasReset | Counted
