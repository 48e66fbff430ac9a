"""Requests that come when they come: at several rates, and as a trace says."""

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from kvstrata.bench.traffic import Conversation, Traffic, Turn
from kvstrata.bench.workloads.workload import COLD_TOKENS, Before, Scale, Step, tokens
from kvstrata.core.errors import ConfigError
from kvstrata.replay.formats import Reading, open_trace, sample_path
from kvstrata.replay.id_trace import IdTrace
from kvstrata.replay.trace import Request

__all__ = ["Arrivals", "TraceReplay", "documents", "questions", "teach"]

_PEERS: Final = ("none", "roomy", "kvstrata", "native", "lmcache")
_ANSWER_TOKENS: Final = 16
_DOCUMENTS: Final = 12
_QUESTION_TOKENS: Final = 66
_LOAD: Final = 0.7  # of a trace's prompts: of what an engine can compute that has seen none of them


class Arrivals:
    title = (
        "Open loop: questions about one of twelve known documents of about 2000 tokens arrive at "
        "random. A rate of 1 is one in the time that a prompt as long, all of it new, takes to its "
        "first token without a connector."
    )
    # A device cache with room for all forgets the documents, too, before each rate: no limit here.
    contenders = tuple(name for name in _PEERS if name != "roomy")

    def steps(self, dice: random.Random, scale: Scale) -> Iterator[Step]:
        known = documents(dice, scale)
        yield teach(known)
        for rate in scale.rates:
            yield Step(f"rate {rate:g}", questions(dice, scale, known, rate), "reset")


def documents(dice: random.Random, scale: Scale) -> list[list[int]]:
    """Twice as many as the device caches hold."""
    return [tokens(dice, scale, COLD_TOKENS - _QUESTION_TOKENS) for _ in range(_DOCUMENTS)]


def teach(known: list[list[int]], before: Before = "reset") -> Step:
    """So that all of them were seen once."""
    taught = Traffic([Conversation([Turn(document, 1)]) for document in known])
    return Step("teach", taught, before, measured=False)


def questions(dice: random.Random, scale: Scale, known: list[list[int]], rate: float) -> Traffic:
    """At times of a Poisson process, each about any of the documents; *rate* of them, on average, in
    ``Scale.cold_seconds``.
    """
    talks, due = [], 0.0
    for _ in range(max(2, round(scale.seconds * rate / scale.cold_seconds))):
        due += dice.expovariate(rate / scale.cold_seconds)
        prompt = dice.choice(known) + tokens(dice, scale, _QUESTION_TOKENS)
        talks.append(Conversation([Turn(prompt, _ANSWER_TOKENS)], due))
    return Traffic(talks, users=0)


class TraceReplay:
    """A trace in Mooncake's format. Its tokens, those of answers too, and its seconds are scaled to
    what runs here.

    What two prompts of the trace share, two prompts of the replay share in the same proportion.
    """

    contenders = _PEERS

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or sample_path()
        self.title = (
            f"The first requests of the trace {self._path.name}, prompts, answers and times scaled "
            "down."
        )

    def steps(self, dice: random.Random, scale: Scale) -> Iterator[Step]:
        trace = open_trace(self._path, Reading())
        if not isinstance(trace, IdTrace):
            raise ConfigError(
                f"--trace {self._path}: an event log does not say when whole prompts came",
                hint="give a trace in Mooncake's format",
            )
        rows = list(islice(trace.read(), scale.requests))
        per_block = max(1, self._scaled_block(trace, rows, scale))
        factor = per_block / trace.tokens_per_block
        cold = sum(r.input_tokens for r in rows) * factor / COLD_TOKENS * scale.cold_seconds
        slower = cold / _LOAD / max(rows[-1].arrival_seconds - rows[0].arrival_seconds, 1e-9)
        seed = dice.getrandbits(32)
        talks = []
        for request in rows:
            known = [
                token
                for block in request.blocks
                for token in tokens(random.Random(f"{seed} {block}"), scale, per_block)
            ]
            rest = max(1, round(request.input_tokens * factor) - len(known))
            answer_tokens = max(1, round(request.output_tokens * factor))
            answer_tokens = min(answer_tokens, scale.most_tokens // 2)
            prompt = (known + tokens(dice, scale, rest))[: scale.most_tokens - answer_tokens]
            due = (request.arrival_seconds - rows[0].arrival_seconds) * slower
            talks.append(Conversation([Turn(prompt, answer_tokens)], due))
        yield Step("trace", Traffic(talks, users=0), "reset")

    @staticmethod
    def _scaled_block(trace: IdTrace, rows: list[Request], scale: Scale) -> int:
        """Tokens for a block, so that nine of ten prompts take at most half of what a prompt may."""
        lengths = sorted(row.input_tokens for row in rows)
        long = lengths[int(0.9 * (len(lengths) - 1))]
        return int(trace.tokens_per_block * scale.most_tokens / 2 / max(long, 1))
