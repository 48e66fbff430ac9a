"""Which tokens of a blended prompt are computed anew: the steps of it, and what all rules share.

A rule decides, an engine runs. Between two steps of one prompt an engine may run those of others:
several make one batch, and a step that is too long for it can be split.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, assert_never

import numpy as np
from numpy.typing import NDArray

from kvstrata.blend.plan import BlendPlan, Positions
from kvstrata.core.errors import ConfigError, InvariantViolated

__all__ = [
    "Offer",
    "Recompute",
    "Rule",
    "ScoreAttention",
    "ScoreDeviation",
    "Scorer",
    "Scores",
    "Selection",
    "Step",
    "drive",
    "highest",
    "one_step",
    "same_kind",
    "split",
    "union",
]

Scores = NDArray[np.float32]
"""By position in the prompt, at least up to the end of the plan; the same on all ranks."""

_NO_POSITION: Final = np.empty(0, np.int64)
_NO_SCORE: Final = np.empty(0, np.float32)


@dataclass(frozen=True, eq=False, slots=True)
class Recompute:
    """Run *positions* through the model, over the cache as it is: fresh K and V replace stored."""

    positions: Positions


@dataclass(frozen=True, eq=False, slots=True)
class ScoreAttention:
    """Run *positions*; a token's score is the most attention that a probe has paid it.

    That is the highest probability over probes, heads (of all ranks) and *layers*. Those behind
    the last of these can be left out: all that was run is recomputed or written over later.
    """

    positions: Positions
    probes: Positions  # those among *positions* whose queries ask
    layers: tuple[int, ...]  # numbers, ascending


@dataclass(frozen=True, eq=False, slots=True)
class ScoreDeviation:
    """Run *positions* through the layers up to *layer*, and keep the K and V that they give.

    A token's score is the squared distance of its fresh K and V in *layer* from those before, K as
    moved to its position, summed over heads (of all ranks).
    """

    positions: Positions
    layer: int


Step = Recompute | ScoreAttention | ScoreDeviation


class Scorer(Protocol):
    """What runs the steps of one prompt."""

    def run(self, step: Step) -> Scores:
        """Run *step*; return its scores, 0 where a token has none. None are read of `Recompute`."""
        ...


def same_kind(step: Step, other: Step) -> bool:
    """Whether both, of different prompts, can be run in one forward."""
    if isinstance(step, ScoreDeviation) and isinstance(other, ScoreDeviation):
        return step.layer == other.layer
    if isinstance(step, ScoreAttention) and isinstance(other, ScoreAttention):
        return step.layers == other.layers
    return type(step) is type(other)


def split(step: Step, tokens: int) -> tuple[Step, Step | None]:
    """Return *step* with its first *tokens* positions, and the rest of it, if any.

    Run one after the other they do what the step does, as no token attends to a later one; the
    scores of the step are the maximum of both.
    """
    if tokens < 1:
        raise InvariantViolated(f"a step cannot be split at {tokens} tokens")
    if len(step.positions) <= tokens:
        return step, None
    head, rest = step.positions[:tokens], step.positions[tokens:]
    match step:
        case Recompute():
            return Recompute(head), Recompute(rest)
        case ScoreAttention(probes=probes, layers=layers):
            cut = int(np.searchsorted(probes, rest[0]))
            first = ScoreAttention(head, probes[:cut], layers)
            return first, ScoreAttention(rest, probes[cut:], layers)
        case ScoreDeviation(layer=layer):
            return ScoreDeviation(head, layer), ScoreDeviation(rest, layer)
        case _:
            assert_never(step)


Steps = Generator[Step, Scores, None]


class Selection:
    """The way of one prompt through a rule."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.step: Step | None = next(steps, None)
        """What is to be run next; None when all is done."""

    def advance(self, scores: Scores = _NO_SCORE) -> None:
        """The step has been run, with these *scores*."""
        try:
            self.step = self._steps.send(scores)
        except StopIteration:
            self.step = None


def one_step(step: Step) -> Selection:
    """Nothing but *step*."""

    def steps() -> Steps:
        yield step

    return Selection(steps())


def drive(selection: Selection, scorer: Scorer) -> Positions:
    """Run all steps; return the tokens that were recomputed."""
    recomputed = _NO_POSITION
    while (step := selection.step) is not None:
        if isinstance(step, Recompute):
            recomputed = step.positions
        selection.advance(scorer.run(step))
    return recomputed


def highest(scores: Scores, candidates: Positions, count: int) -> Positions:
    """Return the *count* candidates with the highest scores, in order; of equals the first.

    What is no number comes last.
    """
    if count >= len(candidates):
        return candidates
    if count < 1:
        return _NO_POSITION
    theirs = scores[candidates]
    theirs = np.where(np.isnan(theirs), np.float32(-np.inf), theirs)
    least = np.partition(theirs, len(theirs) - count)[len(theirs) - count]
    taken = theirs > least
    taken[np.flatnonzero(theirs == least)[: count - int(taken.sum())]] = True
    chosen: Positions = candidates[taken]
    return chosen


class Offer(NamedTuple):
    """What a rule can choose from."""

    mandatory: Positions  # recomputed in any case
    candidates: Positions  # all other approximate tokens
    budget: int  # how many of the candidates to recompute

    @property
    def open(self) -> bool:
        """Whether there is anything to choose."""
        return 0 < self.budget < len(self.candidates)


class Rule:
    """Chooses the tokens to recompute.

    Always among them: those in no run, and the first of each approximate run, to which attention
    falls back if they once began a prompt (EPIC, arXiv:2410.15332). Exact runs are left alone. The
    same scores give the same choice, on whatever rank.
    """

    def __init__(self, ratio: float, *, first_tokens: int, last_tokens: int = 0) -> None:
        """
        Args:
            ratio: Share of the approximate tokens to recompute beyond those that always are.
            first_tokens: Of each approximate run, always recomputed.
            last_tokens: The same at its end.
        """
        if not 0 <= ratio <= 1 or first_tokens < 0 or last_tokens < 0:
            raise ConfigError(
                f"a share of {ratio:g} of the tokens cannot be recomputed, and {first_tokens} "
                f"first and {last_tokens} last ones of each run",
                hint="give a recompute_ratio between 0 and 1, and no negative number of tokens",
            )
        self.ratio = ratio
        self._first_tokens = first_tokens
        self._last_tokens = last_tokens

    def select(self, plan: BlendPlan, allocated_tokens: int) -> Selection:
        """Begin with *plan*; the last of the steps, if there is any, is the only `Recompute`.

        Args:
            allocated_tokens: How many leading tokens of the prompt have a place in the cache. Those
                behind the plan's end can be run to ask what they attend to; the engine computes
                them anew afterwards.
        """
        return Selection(self._steps(plan, allocated_tokens))

    def work_tokens(self, plan: BlendPlan) -> float:
        """Return about how many tokens through the whole model all steps for *plan* are worth."""
        offer = self.offer(plan)
        work = float(len(offer.mandatory) + min(offer.budget, len(offer.candidates)))
        return work + self._scoring_tokens(plan, offer) if offer.open else work

    def offer(self, plan: BlendPlan) -> Offer:
        """Return what is to be recomputed in any case, and what can be chosen beyond."""
        approximate = _mask(plan, plan.approximate)
        mandatory = _mask(plan, plan.gaps)
        start, length, _, exact = plan.runs
        start, length = start[~exact] - plan.exact_end, length[~exact]
        for number in range(self._first_tokens):
            mandatory[(start + number)[number < length]] = True
        for number in range(1, self._last_tokens + 1):
            mandatory[(start + length - number)[number <= length]] = True
        return Offer(
            mandatory=np.flatnonzero(mandatory) + plan.exact_end,
            candidates=np.flatnonzero(approximate & ~mandatory) + plan.exact_end,
            budget=int(self.ratio * approximate.sum()),
        )

    def _steps(self, plan: BlendPlan, allocated_tokens: int) -> Steps:
        offer = self.offer(plan)
        chosen = offer.candidates[: offer.budget]
        if offer.open:
            chosen = yield from self._chosen(plan, offer, allocated_tokens)
        positions = union(offer.mandatory, chosen)
        if len(positions):
            yield Recompute(positions)

    def _chosen(
        self, plan: BlendPlan, offer: Offer, allocated_tokens: int
    ) -> Generator[Step, Scores, Positions]:
        """Return ``offer.budget`` of the candidates of an open offer.

        Not needed of a rule whose ratio is 0 or 1: its offers are not open.
        """
        raise InvariantViolated(f"{type(self).__name__} cannot choose at a ratio of {self.ratio:g}")

    def _scoring_tokens(self, plan: BlendPlan, offer: Offer) -> float:
        """Work of the steps that ``_chosen`` yields, as of ``work_tokens``."""
        return 0.0


def union(left: Positions, right: Positions) -> Positions:
    """Return the positions of both, which have none in common."""
    both: Positions = np.sort(np.concatenate((left, right)), kind="stable")
    return both


def _mask(plan: BlendPlan, positions: Positions) -> NDArray[np.bool_]:
    mask = np.zeros(plan.end - plan.exact_end, np.bool_)
    mask[positions - plan.exact_end] = True
    return mask
