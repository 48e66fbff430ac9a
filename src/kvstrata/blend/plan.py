"""Runs of known tokens in a prompt → what a blended prefill reuses, and whether that pays."""

import enum
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import ConfigError, InvariantViolated

__all__ = ["BlendPlan", "Decision", "Economy", "Positions", "Reason", "ReusedRuns", "spans_of"]

Positions = NDArray[np.int64]
"""Tokens of a prompt by their position, each once, ascending."""

_NONE: Final = np.empty(0, np.int64)


class ReusedRuns(NamedTuple):
    """Runs of tokens that are known from elsewhere, ascending and apart; arrays are (runs,)."""

    start: NDArray[np.int64]  # position of the first token
    length: NDArray[np.int64]  # tokens
    delta: NDArray[np.int64]  # position here less the one at the source
    exact: NDArray[np.bool_]  # all tokens before the source are those before the run: same KV

    def tokens(self, chosen: NDArray[np.bool_] | None = None) -> Positions:
        """Return those of all runs, or of the *chosen*."""
        start = self.start if chosen is None else self.start[chosen]
        length = self.length if chosen is None else self.length[chosen]
        if not len(start):
            return _NONE
        before = np.cumsum(length) - length
        tokens: Positions = np.repeat(start - before, length) + np.arange(int(length.sum()))
        return tokens


def spans_of(positions: Positions) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return starts and lengths of the longest spans of positions that follow one another."""
    if not len(positions):
        return _NONE, _NONE
    first = np.concatenate(([0], np.flatnonzero(np.diff(positions) != 1) + 1))
    return positions[first], np.diff(np.concatenate((first, [len(positions)])))


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class BlendPlan:
    """How the tokens ``[exact_end, end)`` of a prompt get their KV without a whole prefill.

    What is before them has exact KV already; what is behind them the engine computes as ever, at
    least the last token. A token in a run takes the KV that its source has; those between runs
    are computed.

    Raises:
        InvariantViolated: the fields do not fit together.
    """

    prompt_tokens: int
    block_tokens: int  # of the engine's device blocks, which its prefix cache names
    exact_end: int  # a multiple of block_tokens
    end: int  # a multiple of block_tokens, less than prompt_tokens
    runs: ReusedRuns
    origin: NDArray[np.int64]  # (runs,): which of the runs that were found each is a part of

    @classmethod
    def of_runs(
        cls, found: ReusedRuns, *, prompt_tokens: int, block_tokens: int, exact_end: int
    ) -> Self:
        """Plan with what of the runs *found* lies between the exact prefix and the plan's end.

        That is the end of the last block that is full before the last token, so that those who ask,
        behind all runs, are computed together with what they ask about.
        """
        end = max((prompt_tokens - 1) // block_tokens * block_tokens, exact_end)
        start = np.maximum(found.start, exact_end)
        length = np.minimum(found.start + found.length, end) - start
        used = length > 0
        return cls(
            prompt_tokens=prompt_tokens,
            block_tokens=block_tokens,
            exact_end=exact_end,
            end=end if used.any() else exact_end,
            runs=ReusedRuns(start[used], length[used], found.delta[used], found.exact[used]),
            origin=np.flatnonzero(used),
        )

    def __post_init__(self) -> None:
        start, length, delta, exact = self.runs
        if len({len(each) for each in (*self.runs, self.origin)}) != 1:
            raise InvariantViolated(f"arrays of different length: {self}")
        borders = np.stack((start, start + length), 1).ravel()
        borders = np.concatenate(([self.exact_end], borders, [self.end]))
        if (
            (np.diff(borders) < 0).any()
            or (length < 1).any()
            or (start < delta).any()
            or (exact & (delta != 0)).any()
            or self.exact_end % self.block_tokens
            or self.end % self.block_tokens
            or not 0 <= self.exact_end <= self.end < self.prompt_tokens
        ):
            raise InvariantViolated(f"runs or borders that cannot be: {self}")

    @property
    def approximate(self) -> Positions:
        """Tokens of runs whose KV comes from another context, or from another position."""
        return self.runs.tokens(~self.runs.exact)

    @property
    def gaps(self) -> Positions:
        """Tokens of ``[exact_end, end)`` in no run."""
        known = np.zeros(self.end - self.exact_end, np.bool_)
        known[self.runs.tokens() - self.exact_end] = True
        return np.flatnonzero(~known) + self.exact_end

    @property
    def gaps_between(self) -> list[tuple[int, int]]:
        """Of the gaps between two runs, start and end: what is new behind reused tokens."""
        ends = (self.runs.start + self.runs.length)[:-1].tolist()
        return [
            (end, start)
            for end, start in zip(ends, self.runs.start[1:].tolist(), strict=True)
            if end < start
        ]

    @property
    def asking_from(self) -> int:
        """Where the tokens behind all runs begin."""
        return int((self.runs.start + self.runs.length).max(initial=self.exact_end))

    @property
    def taint_from(self) -> int | None:
        """Start of the first block whose KV is approximate; None if all of it will be exact.

        Everything behind an approximate token is, gaps and generated tokens included.
        """
        approximate = np.flatnonzero(~self.runs.exact)
        if not len(approximate):
            return None
        return int(self.runs.start[approximate[0]]) // self.block_tokens * self.block_tokens


class Reason(enum.Enum):
    """Why a prompt is blended or not; the values label a counter."""

    PAYS = "pays"
    NO_RUN = "no_run"  # nothing is known beyond the exact prefix
    FEW_TOKENS = "few_tokens"  # too few tokens would be saved
    SMALL_SHARE = "small_share"  # too small a part of the prefill would be


class Decision(NamedTuple):
    """Whether to blend, and what that was judged by."""

    reason: Reason
    saved_tokens: float  # of prefill; negative if blending costs more
    prefill_tokens: int  # that the engine computes without blending

    @property
    def blend(self) -> bool:
        return self.reason is Reason.PAYS


class Economy:
    """Which plans are worth their work."""

    def __init__(self, *, min_saved_tokens: int = 1024, min_saved_share: float = 0.30) -> None:
        """*min_saved_share*: of the tokens that the engine computes without blending."""
        if min_saved_tokens < 0 or not 0 <= min_saved_share <= 1:
            raise ConfigError(
                f"blending is to save at least {min_saved_tokens} tokens and a share of "
                f"{min_saved_share:g} of a prefill",
                hint="give tokens from 0 on, and a share between 0 and 1",
            )
        self._min_tokens = min_saved_tokens
        self._min_share = min_saved_share

    def is_hopeless(self, prefill_tokens: int) -> bool:
        """Whether nothing that may be known of them can make it worth it; the last is computed."""
        return prefill_tokens - 1 < self._min_tokens

    def decide(self, plan: BlendPlan, work_tokens: float) -> Decision:
        """Judge *plan* by *work_tokens*, those of a prefill that would take as long: of ``Rule``.

        What loading and moving the runs takes is left out.
        """
        prefill = plan.prompt_tokens - plan.exact_end
        saved = plan.end - plan.exact_end - work_tokens
        if not len(plan.runs.start):
            reason = Reason.NO_RUN
        elif saved < self._min_tokens:
            reason = Reason.FEW_TOKENS
        elif saved < self._min_share * prefill:
            reason = Reason.SMALL_SHARE
        else:
            reason = Reason.PAYS
        return Decision(reason, saved, prefill)
