"""Time to first token of blended prompts, beside whole prefills of an engine without a connector.

    python -m bench.blend_latency             # 3 starts of both engines, 3 rounds each
    python -m bench.blend_latency --quick     # 1 start

Two starts of the same engine differ, so there are several. Three parts, with two engines that take
turns, A B B A:

* ``documents``: prompts of 2050 tokens, of which 97.5 % are six documents that stood elsewhere before;
  half of the rest is the question.
* ``mix``: prompts of several lengths of which several shares are known; the blending engine decides
  itself which of them are worth blending. None may take longer than a whole prefill.
* ``queue``: the prompts of ``documents``, and right behind each of them others, which fill the steps.

CPU time is of all processes of an engine and its server, from a prompt until nothing is left to do.
"""

import argparse
import dataclasses
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from bench.members import asked_at_once, roomy_members

from kvstrata.bench.fleet import EngineFailed, Member
from kvstrata.bench.models import VOCABULARY, random_model, small_llama
from kvstrata.bench.traffic import Answer
from kvstrata.blend.plan import BlendPlan, ReusedRuns
from kvstrata.core.config import Config
from kvstrata.integration.vllm.blend.rules import rule_of

__all__ = [
    "Bench",
    "Cell",
    "Measured",
    "Pair",
    "cells",
    "in_a_row",
    "in_short",
    "measure_start",
    "new_tokens",
    "prompt_of",
    "report",
    "scoring_share",
    "worst_ratio",
]

FULL, BLEND = "none", "kvstrata-blend"
PROMPT_TOKENS: Final = 2050
SHARE: Final = 0.975
MIX: Final = tuple(itertools.product((300, 1100, 2050, 4100), (0.0, 0.3, 0.6, 0.95)))
DOCUMENTS: Final = 6
QUEUE: Final = (400,) * 20  # tokens of the prompts behind one
LEAST_SPEED: Final = 3.0
MOST_SLOWDOWN: Final = 1.05
SAVED_SECONDS: Final = 0.05  # in which all of a short prompt is saved


@dataclasses.dataclass(frozen=True)
class Pair:
    """One prompt of each engine, of the same shape."""

    tokens: int
    share: float  # of them that was known
    full_seconds: float
    blend_seconds: float
    cached_tokens: int  # of the blending engine
    full_cpu_seconds: float
    blend_cpu_seconds: float


@dataclasses.dataclass(frozen=True)
class Cell:
    """All pairs of one shape."""

    tokens: int
    share: float
    full_ms: float
    blend_ms: float
    ratio: float  # blended / whole, median of the pairs
    cached_tokens: int
    cpu_ratio: float  # blended / whole, of the sums over the pairs: it is counted in 10 ms
    pairs: int

    def row(self) -> str:
        return (
            f"| {self.tokens} | {self.share:.0%} | {self.full_ms:.0f} | {self.blend_ms:.0f} "
            f"| {self.ratio:.2f} | {self.cpu_ratio:.2f} | {self.cached_tokens} | {self.pairs} |"
        )


def cells(pairs: Iterable[Pair]) -> list[Cell]:
    """Medians by shape, in the order of first appearance."""
    by_shape: dict[tuple[int, float], list[Pair]] = {}
    for pair in pairs:
        by_shape.setdefault((pair.tokens, pair.share), []).append(pair)
    return [
        Cell(
            tokens,
            share,
            1e3 * statistics.median(pair.full_seconds for pair in found),
            1e3 * statistics.median(pair.blend_seconds for pair in found),
            statistics.median(pair.blend_seconds / pair.full_seconds for pair in found),
            round(statistics.median(pair.cached_tokens for pair in found)),
            _over(
                sum(pair.blend_cpu_seconds for pair in found),
                sum(pair.full_cpu_seconds for pair in found),
            ),
            len(found),
        )
        for (tokens, share), found in by_shape.items()
    ]


def worst_ratio(pairs: Iterable[Pair]) -> float:
    """The highest of the medians: of shapes that were blended, and of lengths that were not.

    A prompt that is not blended is computed whole, whatever share of it is known.
    """
    ratios: dict[tuple[int, float | None], list[float]] = {}
    for pair in pairs:
        way = pair.tokens, pair.share if pair.cached_tokens else None
        ratios.setdefault(way, []).append(pair.blend_seconds / pair.full_seconds)
    return max(map(statistics.median, ratios.values()))


def _over(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def prompt_of(documents: Sequence[Sequence[int]], tokens: int, rng: random.Random) -> list[int]:
    """*documents* in any order between new tokens, the last ones a question; *tokens* in all."""
    shuffled = rng.sample(list(documents), len(documents))
    new = tokens - sum(map(len, shuffled))
    question = max(1, new // 2)
    between, rest = divmod(new - question, max(1, len(shuffled)))
    prompt: list[int] = new_tokens(rng, rest)
    for document in shuffled:
        prompt += [*new_tokens(rng, between), *document]
    return prompt + new_tokens(rng, tokens - len(prompt))


def new_tokens(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(1, VOCABULARY) for _ in range(tokens)]


def in_a_row(tokens: int) -> int:
    """Of a turn in the mix: short prompts take little time, and noise is much of it."""
    return max(1, 2400 // tokens)


def scoring_share(layers: int, block_tokens: int) -> float:
    """Return what choosing is planned to take of a whole prefill of a prompt of ``documents``."""
    size = int(PROMPT_TOKENS * SHARE) // DOCUMENTS
    new = PROMPT_TOKENS - size * DOCUMENTS
    between = (new - new // 2) // DOCUMENTS
    length = np.full(DOCUMENTS, size)
    start = (new - new // 2) % DOCUMENTS + between + np.arange(DOCUMENTS) * (size + between)
    runs = ReusedRuns(start, length, np.zeros_like(start), np.zeros(DOCUMENTS, np.bool_))
    plan = BlendPlan.of_runs(
        runs, prompt_tokens=PROMPT_TOKENS, block_tokens=block_tokens, exact_end=0
    )
    config = Config()
    rule = rule_of(config, config.recompute_ratio, layers)
    offer = rule.offer(plan)
    return (rule.work_tokens(plan) - len(offer.mandatory) - offer.budget) / PROMPT_TOKENS


class Bench:
    def __init__(self, members: Mapping[str, Member], drawn: random.Random) -> None:
        self._members = members
        self._random = drawn

    def pairs(
        self,
        tokens: int,
        share: float,
        number: int,
        *,
        in_a_row: int = 1,
        behind: Sequence[int] = (),
    ) -> list[Pair]:
        """Teach the blending engine documents of their own, then ask both, a turn each.

        Args:
            number: Of the turn: who begins changes with it.
            in_a_row: Prompts of a turn, one after the other.
            behind: The lengths of new prompts that are asked at the same time, after each.
        """
        size = int(tokens * share) // DOCUMENTS
        documents = [new_tokens(self._random, size) for _ in range(DOCUMENTS)] if size else []
        blend = self._members[BLEND]
        if documents:  # whole blocks of them are saved
            before, after = new_tokens(self._random, 17), new_tokens(self._random, 100)
            blend.run(asked_at_once([before + document + after for document in documents]))
            blend.settle()
            blend.reset()
        answers: dict[str, list[Answer]] = {}
        cpu_seconds: dict[str, float] = {}
        for name in (FULL, BLEND) if number % 2 else (BLEND, FULL):
            member = self._members[name]
            member.run(asked_at_once([new_tokens(self._random, 8)]))  # an engine in use
            used = _cpu_seconds(member)
            answers[name] = []
            for _ in range(in_a_row):
                prompts = [prompt_of(documents, tokens, self._random)]
                prompts += [new_tokens(self._random, length) for length in behind]
                answer = member.run(asked_at_once(prompts, blend=name == BLEND)).answers[0]
                if answer.failure:
                    raise EngineFailed(f"{name}: {answer.failure}")
                answers[name].append(answer)
                time.sleep(SAVED_SECONDS)
            member.settle()
            cpu_seconds[name] = (_cpu_seconds(member) - used) / in_a_row
        return [
            Pair(
                tokens,
                share,
                full.first_token_seconds,
                blended.first_token_seconds,
                blended.cached_tokens,
                cpu_seconds[FULL],
                cpu_seconds[BLEND],
            )
            for full, blended in zip(answers[FULL], answers[BLEND], strict=True)
        ]


def _cpu_seconds(member: Member) -> float:
    return sum(used.cpu_seconds for used in member.usage().values())


class Measured(NamedTuple):
    """Pairs of the three parts."""

    documents: list[Pair]
    mix: list[Pair]
    queue: list[Pair]


def measure(options: argparse.Namespace) -> tuple[Measured, float]:
    """The pairs of all starts, and the share of a whole prefill that choosing takes."""
    shape = small_llama(layers=options.layers, hidden=options.hidden, dtype=options.dtype)
    make_model = partial(random_model, shape=shape)
    drawn = random.Random(options.seed)
    measured = Measured([], [], [])
    for start in range(options.starts):
        with roomy_members((FULL, BLEND), options.folder, make_model) as (members, model):
            turns = range(start * options.rounds, (start + 1) * options.rounds)
            found = measure_start(Bench(members, drawn), turns)
        for all_pairs, pairs in zip(measured, found, strict=True):
            all_pairs.extend(pairs)
        print(f"start {start + 1}: {in_short(found)}", file=sys.stderr)
    return measured, scoring_share(options.layers, model.engine_block_tokens)


def measure_start(bench: Bench, turns: range) -> Measured:
    """*turns* go on from start to start: who begins changes with each."""
    for each in MIX[-2:]:  # warms up
        bench.pairs(*each, 0)
    documents = [pair for i in turns for pair in bench.pairs(PROMPT_TOKENS, SHARE, i)]
    mix = [
        pair
        for i in turns
        for shape in MIX
        for pair in bench.pairs(*shape, i, in_a_row=in_a_row(shape[0]))
    ]
    queue = [pair for i in turns for pair in bench.pairs(PROMPT_TOKENS, SHARE, i, behind=QUEUE)]
    return Measured(documents, mix, queue)


def in_short(measured: Measured) -> str:
    """How one start compares with the others."""
    blended, queued = (cells(part)[0].ratio for part in (measured.documents, measured.queue))
    worst = worst_ratio(measured.mix)
    return (
        f"documents {blended:.2f}, mix at most {worst:.2f}, queue {queued:.2f} of a whole prefill"
    )


def report(measured: Measured, scoring: float) -> Iterable[str]:
    documents, mix, queue = measured
    head = (
        "| tokens | known | whole prefill, ms | blending, ms | ratio | of CPU time | cached | pairs |",
        "|---" * 8 + "|",
    )
    (cell,) = cells(documents)
    yield from (*head, cell.row(), "")
    speed = 1 / cell.ratio
    word = "met    " if speed >= LEAST_SPEED else "NOT met"
    yield f"{word} {speed:.2f} times as fast as a whole prefill, at least {LEAST_SPEED:g}"
    yield f"        choosing what to compute is planned to take {100 * scoring:.1f} % of a whole prefill"
    yield from ("", *head)
    found = cells(mix)
    yield from (cell.row() for cell in found)
    worst = worst_ratio(mix)
    word = "met    " if worst <= MOST_SLOWDOWN else "NOT met"
    yield f"\n{word} at most {worst:.2f} of a whole prefill in the mix, no more than {MOST_SLOWDOWN:g}:"
    yield "        each shape that was blended, and each length of what was not, whatever was known of it"
    left = [cell for cell in found if not cell.cached_tokens]
    if left:
        most = max(cell.cpu_ratio for cell in left)
        yield f"        where nothing was reused, at most {most:.2f} of its CPU time"
    yield from ("", f"with {len(QUEUE)} prompts of {QUEUE[0]} tokens behind it:", *head)
    yield from (cell.row() for cell in cells(queue))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    number = partial(parser.add_argument, type=int, default=3, choices=range(1, 100), metavar="N")
    number("--starts", help="of the engines; default: 3")
    number("--rounds", help="of a start; default: 3")
    parser.add_argument("--quick", action="store_const", const=1, dest="starts", help="1 start")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 128")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--folder", type=Path, help="where the engines keep files; default /tmp")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    measured, scoring = measure(options)
    lines = list(report(measured, scoring))
    print("\n".join(lines))
    blended = all(pair.cached_tokens > 0 for pair in measured.documents)
    if not blended:
        print("error: a prompt of known documents was not blended", file=sys.stderr)
    return 0 if blended and not any("NOT met" in line for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
