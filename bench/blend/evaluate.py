"""How much of what full recompute knows is left by each rule, at each share of recomputed tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import torch
from bench.blend.donors import Before, Donors, seen_before
from bench.blend.model import Llama
from bench.blend.scorer import blend
from bench.blend.task import DOCUMENT_TOKENS, QUESTIONS, Kind, Prompts, make_prompts

from kvstrata.blend.rules import (
    BoundaryRule,
    HkvdRule,
    QueryRule,
    RandomRule,
    TwoRoundQueryRule,
    scored_layers,
)
from kvstrata.blend.selection import Rule
from kvstrata.core.blend_fields import RECOMPUTE_RATIOS

__all__ = [
    "DEEPER",
    "FULL",
    "NO_RECOMPUTE",
    "TWO_ROUND",
    "Candidate",
    "Row",
    "candidates",
    "evaluate",
]

DOCUMENTS: Final = 6
BATCH_PROMPTS: Final = 64
FULL: Final = "full recompute"
NO_RECOMPUTE: Final = "no recompute"
TWO_ROUND: Final = "two-round query"
DEEPER: Final = f"{TWO_ROUND}, layers 1 and 2, then 1"  # as of a deeper model


class Candidate(NamedTuple):
    """A rule to be evaluated; without one all is computed."""

    title: str
    ratio: float | None  # None: not the rule's to choose
    rule_of: Callable[[int], Rule] | None  # by the number of the prompt
    corrected: bool = True


class Row(NamedTuple):
    """One line of the table; shares of 1."""

    donors: Donors
    rule: str
    ratio: float | None
    recomputed: float  # of the tokens that stood elsewhere
    work: float  # of a prefill behind the exact prefix: scoring too, and the questions
    local: float  # accuracy, from here on
    alias: float
    cross: float
    divergence: float  # KL of full recompute's answers from these, nats a question


@dataclass(slots=True)
class _Tally:
    recomputed_tokens: int = 0
    work_tokens: float = 0.0
    divergence: float = 0.0
    right: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    asked: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))

    def take(self, logits: torch.Tensor, full: torch.Tensor, drawn: Prompts) -> None:
        """Logits are of the questions, (prompts, QUESTIONS, answers)."""
        right = logits.argmax(-1).numpy() == drawn.targets[:, -QUESTIONS:]
        for kind in Kind:
            of_kind = drawn.kinds == kind
            self.right[kind] += int(right[of_kind].sum())
            self.asked[kind] += int(of_kind.sum())
        log_full, log_here = full.log_softmax(-1), logits.log_softmax(-1)
        self.divergence += float((log_full.exp() * (log_full - log_here)).sum())

    def row(self, donors: Donors, candidate: Candidate, prompts: int) -> Row:
        reused = prompts * (DOCUMENTS - 1) * DOCUMENT_TOKENS
        accuracy = {kind: self.right[kind] / self.asked[kind] for kind in Kind}
        return Row(
            donors,
            candidate.title,
            candidate.ratio,
            self.recomputed_tokens / reused,
            self.work_tokens / (reused + prompts * QUESTIONS),
            accuracy[Kind.LOCAL],
            accuracy[Kind.ALIAS],
            accuracy[Kind.CROSS],
            self.divergence / (prompts * QUESTIONS),
        )


def candidates(layers: int) -> list[Candidate]:
    """Every line of the table, for a model of so many *layers*.

    Rules that have a ratio recompute nothing beyond it, so that a line's tokens are its rule's
    choice; only "with first 4" has the tokens that production recomputes in any case.
    """
    nothing = BoundaryRule(first_tokens=0, last_tokens=0)
    first = BoundaryRule(first_tokens=4, last_tokens=0)
    found = [
        Candidate(FULL, None, None),
        Candidate("no recompute, keys not moved", None, always(nothing), corrected=False),
        Candidate(NO_RECOMPUTE, None, always(nothing)),
        Candidate("boundary 2+2", None, always(BoundaryRule())),
        Candidate("first 4 (EPIC)", None, always(first)),
    ]
    for ratio in RECOMPUTE_RATIOS.values():
        found += _with_ratio(ratio, layers)
    return found


def _with_ratio(ratio: float, layers: int) -> Iterator[Candidate]:
    yield Candidate("random", ratio, lambda number: RandomRule(ratio, seed=number, sink_tokens=0))
    for layer in range(1, layers - 1):
        hkvd = HkvdRule(ratio, layer=layer, layers=layers, sink_tokens=0)
        yield Candidate(f"HKVD, layer {layer} (CacheBlend)", ratio, always(hkvd))
    own = scored_layers(layers)
    query = QueryRule(ratio, scored=own, layers=layers, sink_tokens=0)
    yield Candidate("query", ratio, always(query))
    two_round = TwoRoundQueryRule(ratio, scored=own, layers=layers, sink_tokens=0)
    yield Candidate(TWO_ROUND, ratio, always(two_round))
    with_first = TwoRoundQueryRule(ratio, scored=own, layers=layers)
    yield Candidate(f"{TWO_ROUND}, with first 4", ratio, always(with_first))
    rounds: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        DEEPER: ((1, 2), (1,)),
        f"{TWO_ROUND}, layers 1 and 2, again": ((1, 2), (1, 2)),
        f"{TWO_ROUND}, layers 1 and 2, then 2": ((1, 2), (2,)),
        f"{TWO_ROUND}, all layers": (tuple(range(layers)), tuple(range(layers))),
    }
    for title, (scored, again) in rounds.items():
        rule = TwoRoundQueryRule(
            ratio, scored=scored, layers=layers, scored_again=again, sink_tokens=0
        )
        yield Candidate(title, ratio, always(rule))


def always(rule: Rule) -> Callable[[int], Rule]:
    """The same for every prompt."""
    return lambda _: rule


def evaluate(
    model: Llama, lines: Sequence[Candidate], *, prompts: int, donors: Donors, seed: int
) -> list[Row]:
    """Ask the model 8 questions about each of *prompts* prompts of six documents, per line.

    The first document is an exact prefix, five stood elsewhere. Lines and donors with the same *seed*
    see the same prompts.
    """
    rng, foreign = np.random.default_rng(seed), np.random.default_rng((seed, 1))
    tallies = [_Tally() for _ in lines]
    for first in range(0, prompts, BATCH_PROMPTS):
        drawn = make_prompts(rng, min(BATCH_PROMPTS, prompts - first), DOCUMENTS)
        before = seen_before(model, torch.from_numpy(drawn.tokens), donors, foreign)
        for line, tally in zip(lines, tallies, strict=True):
            logits = _answers(model, before, line, first, tally)
            tally.take(logits, before.full_logits, drawn)
    return [tally.row(donors, line, prompts) for line, tally in zip(lines, tallies, strict=True)]


def _answers(
    model: Llama, before: Before, line: Candidate, first_prompt: int, tally: _Tally
) -> torch.Tensor:
    """Logits of the questions; what that took is added to *tally*."""
    plan, prompts = before.plan, len(before.full_logits)
    if line.rule_of is None:
        tally.recomputed_tokens += prompts * len(plan.approximate)
        tally.work_tokens += prompts * (len(plan.approximate) + QUESTIONS)
        return before.full_logits
    rule_of = line.rule_of
    blended = before.reused(model, corrected=line.corrected)
    recomputed = blend(blended, plan, lambda number: rule_of(first_prompt + number))
    tally.recomputed_tokens += sum(int((each < plan.asking_from).sum()) for each in recomputed)
    tally.work_tokens += prompts * (rule_of(0).work_tokens(plan) + plan.prompt_tokens - plan.end)
    return blended.compute(plan.asking_from, plan.prompt_tokens)
