"""What of a prompt is known, chunk by chunk, in the words of UCM's users."""

import enum
import logging
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from kvstrata.blend.runs import Runs
from kvstrata.core.errors import ConfigError
from kvstrata.core.types import BlockKey

DEFAULT_CHUNK_TOKENS: Final = 64

_log = logging.getLogger(__name__)


class ChunkType(enum.Enum):
    """How much of a chunk is known."""

    FULL_MATCH = "full_match"  # every token
    PARTIAL_MATCH = "partial_match"  # some: those in its parts, and no other
    NO_MATCH = "no_match"


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Tokens of a chunk that are known, and the one block that their KV lies in."""

    start_idx: int  # position in the prompt
    length: int  # tokens
    source_block_id: BlockKey
    block_offset: int  # tokens of the block before the first of these
    source_position: int  # of the first of these in the prompt that the block was computed for


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of a prompt from ``start_idx`` up to ``end_idx``."""

    start_idx: int
    end_idx: int
    chunk_type: ChunkType
    parts: tuple[ChunkPart, ...]  # ascending, without overlap


class ChunkAnalyzer:
    """Says of the chunks of a prompt whether all, some or none of their tokens are known.

    For those who look into prompts (docs/extending.md): ``BlendConnector`` works with the runs.

    ``min_match_ratio`` is accepted because UCM's users set it, and changes nothing. There, a chunk
    of which at least that share is like a known one counts as a match. But KV belongs to its token:
    that of a similar chunk is wrong for every token in which it differs. Here the tokens that are
    exactly equal are reused, be they many or few, and the others are computed.

    Args:
        chunk_size: Tokens of a chunk, ``blend_chunk_size`` of the configuration.
        min_match_ratio: From 0 to 1.

    Raises:
        ConfigError: One of them cannot be.
    """

    def __init__(
        self, chunk_size: int = DEFAULT_CHUNK_TOKENS, min_match_ratio: float | None = None
    ) -> None:
        if chunk_size < 1:
            raise ConfigError(
                f"blend_chunk_size is {chunk_size!r}",
                hint=f"give a number of tokens, for example {DEFAULT_CHUNK_TOKENS}",
            )
        if min_match_ratio is not None:
            if not 0 <= min_match_ratio <= 1:
                raise ConfigError(
                    f"min_match_ratio is {min_match_ratio!r}",
                    hint="give a number from 0 to 1, or take it away: it changes nothing",
                )
            _log.info(
                "min_match_ratio %s changes nothing: tokens are reused where they are equal, "
                "and computed where they are not",
                min_match_ratio,
            )
        self.chunk_size = chunk_size

    def analyze(self, prompt_tokens: int, runs: Runs) -> list[Chunk]:
        """The chunks of a prompt of that many tokens, of which *runs* are known.

        They stand side by side from position 0 on; the last one may be shorter. A ``ChunkPart`` is
        made for each block that a chunk's known tokens lie in.

        Raises:
            ValueError: A run is not within the prompt.
        """
        if len(runs) and int(runs.end[-1]) > prompt_tokens:
            raise ValueError(f"a run ends at {int(runs.end[-1])} of {prompt_tokens} tokens")
        parts: dict[int, list[ChunkPart]] = {}
        for run in range(len(runs)):
            for part in self._parts(runs, run):
                parts.setdefault(part.start_idx // self.chunk_size, []).append(part)
        return [
            _chunk(start, min(start + self.chunk_size, prompt_tokens), parts.get(number, []))
            for number, start in enumerate(range(0, prompt_tokens, self.chunk_size))
        ]

    def _parts(self, runs: Runs, run: int) -> list[ChunkPart]:
        """One run, cut where a chunk or a block ends."""
        start, end = int(runs.start[run]), int(runs.end[run])
        delta = int(runs.delta[run])
        block = runs.tokens_per_block
        chunk_ends = np.arange(-(-start // self.chunk_size) * self.chunk_size, end, self.chunk_size)
        block_ends = np.arange(-(-(start - delta) // block) * block + delta, end, block)
        cuts = np.unique(np.concatenate(([start], chunk_ends, block_ends, [end]))).tolist()
        first_block = (start - delta) // block
        first_key = int(runs.key_offsets[run])
        parts = []
        for begin, stop in pairwise(cuts):
            row, offset = divmod(begin - delta, block)
            key = runs.keys[first_key + row - first_block].tobytes()
            parts.append(ChunkPart(begin, stop - begin, key, offset, begin - delta))
        return parts


def _chunk(start: int, end: int, parts: list[ChunkPart]) -> Chunk:
    known = sum(part.length for part in parts)
    if known == end - start:
        kind = ChunkType.FULL_MATCH
    else:
        kind = ChunkType.PARTIAL_MATCH if known else ChunkType.NO_MATCH
    return Chunk(start, end, kind, tuple(parts))
