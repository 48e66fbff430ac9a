"""Pieces of earlier prompts, and how far a prompt agrees with one."""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from kvstrata.blend.fingerprints import Tokens
from kvstrata.blend.print_table import Ids
from kvstrata.blend.runs import Runs
from kvstrata.core.keys import KeyArray
from kvstrata.core.types import BLOCK_KEY_BYTES

_AROUND: Final = 2048  # tokens compared at first, before and after
_GROWTH: Final = 8  # so many times more each time after that


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A contiguous piece of a prompt whose KV lies in blocks of the cache."""

    domain: bytes
    tokens: Tokens
    first_position: int  # of the first token in its prompt
    keys: KeyArray  # of the blocks that the piece touches
    generation: int
    windows: Ids  # entries in the index's tables: some may be others' by now
    blocks: Ids


class Run(NamedTuple):
    """``length`` tokens from ``start`` on that are those of ``source`` from ``offset`` on."""

    start: int
    length: int
    source: Source
    offset: int
    number: int  # of the source

    @property
    def end(self) -> int:
        return self.start + self.length

    def holds(self, position: int, number: int, offset: int) -> bool:
        """Whether the token at *position* is that at *offset* of source *number*, in this run."""
        return (
            number == self.number
            and position - self.start == offset - self.offset
            and self.start <= position < self.start + self.length
        )

    def behind(self, position: int) -> "Run":
        """What of it is not before *position*."""
        less = position - self.start
        if less <= 0:
            return self
        return Run(position, self.length - less, self.source, self.offset + less, self.number)


def agreement(
    target: Tokens, at: int, source: Tokens, offset: int, reach: tuple[int, int]
) -> tuple[int, int]:
    """How many tokens before ``target[at]`` and from it on equal those around ``source[offset]``.

    *reach* says how many there are to compare, before and from there on.
    """
    before, after = min(reach[0], _AROUND), min(reach[1], _AROUND)
    around = target[at - before : at + after] != source[offset - before : offset + after]
    differs = around.tobytes()  # which is searched faster than an array
    end = differs.find(1, before)
    right = end - before if end >= 0 else after
    left = before - 1 - differs.rfind(1, 0, before)
    if right == after < reach[1]:
        mine, theirs = target[at : at + reach[1]], source[offset : offset + reach[1]]
        right = _leading(mine, theirs, right)
    if left == before < reach[0]:
        mine, theirs = target[at - reach[0] : at], source[offset - reach[0] : offset]
        left = _leading(mine[::-1], theirs[::-1], left)
    return left, right


def _leading(left: Tokens, right: Tokens, known: int) -> int:
    """How many leading tokens of both are equal, *known* of them for sure."""
    piece = _AROUND
    while known < len(left):
        piece *= _GROWTH
        some = slice(known, known + piece)
        differs = (left[some] != right[some]).tobytes()
        end: int = differs.find(1)
        if end >= 0:
            return known + end
        known += len(differs)
    return known


def as_runs(runs: list[Run], tokens_per_block: int) -> Runs:
    """*runs* as arrays, with the blocks that each touches."""
    numbers = [(r.start, r.length, r.source.first_position, r.offset) for r in runs]
    start, length, first, offset = np.array(numbers, np.int64).reshape(-1, 4).T.copy()
    position = first + offset
    skip = position % tokens_per_block
    row = position // tokens_per_block - first // tokens_per_block
    end = row + (skip + length + tokens_per_block - 1) // tokens_per_block
    offsets = np.zeros(len(runs) + 1, np.int64)
    np.cumsum(end - row, out=offsets[1:])
    rows = zip(runs, row.tolist(), end.tolist(), strict=True)
    keys = [run.source.keys[first_row:last_row] for run, first_row, last_row in rows]
    return Runs(
        start=start,
        length=length,
        delta=start - position,
        generation=np.array([run.source.generation for run in runs], np.int8),
        skip=skip,
        key_offsets=offsets,
        keys=np.concatenate(keys) if keys else np.empty((0, BLOCK_KEY_BYTES), np.uint8),
        tokens_per_block=tokens_per_block,
    )
