"""Finds runs of known tokens at any offset of a prompt."""

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstrata.blend.fingerprints import Fingerprints, Prints, Tokens
from kvstrata.blend.print_table import Ids, PrintTable
from kvstrata.blend.runs import Runs
from kvstrata.blend.search import Known, Search
from kvstrata.blend.sources import Run, Source, as_runs
from kvstrata.core.keys import KeyArray, as_key_array
from kvstrata.core.types import BLOCK_KEY_BYTES, BlockKey

EXACT_GENERATION: Final = 0
BLENDED_GENERATION: Final = 1

_MAX_CAPACITY: Final = 1 << 31  # places in a source are 32 bits wide
_NONE: Final[Ids] = np.empty(0, np.int32)


class IndexStatistics(NamedTuple):
    """What an index holds."""

    sources: int
    tokens: int  # of all sources
    windows: int
    nbytes: int  # address space of tokens, keys and tables


class SourceIndex:
    """Pieces of prompts whose KV lies in blocks of the cache, found by their tokens alone.

    One thread at a time. A *source* is not copied: it refers to the blocks that its KV lies in. Of
    each source the windows of a grid are known by their fingerprints, and what a fingerprint finds
    is compared token by token. Sources of one *domain* (the salt of a tenant, an adapter, hashes of
    images: whatever changes KV beside the tokens or keeps prompts apart) are never found for
    another.

    When the sources have more than *capacity_tokens* tokens, those go that were longest neither
    added nor matched.

    Args:
        fingerprints: Their windows are the grid, and the least length of a run.
        tokens_per_block: Of the blocks that the keys name.
        capacity_tokens: A token takes about 10 bytes with windows of 64 tokens and blocks of 16.
    """

    def __init__(
        self, fingerprints: Fingerprints, *, tokens_per_block: int, capacity_tokens: int
    ) -> None:
        self.grid_tokens = fingerprints.window_tokens
        if tokens_per_block < 1:
            raise ValueError(f"{tokens_per_block} tokens per block")
        if not self.grid_tokens <= capacity_tokens <= _MAX_CAPACITY:
            bounds = f"between {self.grid_tokens} and {_MAX_CAPACITY}"
            raise ValueError(f"an index of {capacity_tokens} tokens; it must be {bounds}")
        self.tokens_per_block = tokens_per_block
        self.capacity_tokens = capacity_tokens
        self._fingerprints = fingerprints
        self._weights = np.frombuffer(os.urandom(BLOCK_KEY_BYTES), np.uint64) | np.uint64(1)
        self._numbers = count()
        self.clear()

    def statistics(self) -> IndexStatistics:
        held = sum(s.tokens.nbytes + s.keys.nbytes for s in self._sources.values())
        return IndexStatistics(
            sources=len(self._sources),
            tokens=self._tokens,
            windows=len(self._windows),
            nbytes=held + self._windows.nbytes + self._blocks.nbytes,
        )

    def add(
        self,
        domain: bytes,
        tokens: Tokens,
        first_position: int,
        keys: Sequence[BlockKey] | KeyArray,
        generation: int = EXACT_GENERATION,
    ) -> int:
        """Remember a piece of a prompt whose KV was computed in its place: no part was reused.

        The KV of reused tokens is not what their tokens and position say, and must not be passed on
        as if it were: the caller leaves them out. Only what the index does not know becomes a
        source, if it is a window long. What is known with a greater *generation* counts as unknown.

        Args:
            domain: What else the KV depends on.
            tokens: The piece.
            first_position: Of its first token in the prompt.
            keys: Of the blocks of the prompt that the piece touches, in order.
            generation: ``EXACT_GENERATION``, or ``BLENDED_GENERATION`` for KV that was computed
                over reused KV.

        Returns:
            How many tokens were not known, and are now.

        Raises:
            ValueError: The number of keys does not fit, the tokens are not of type uint32, or
                another argument cannot be.
        """
        _check_tokens(tokens)
        rows = as_key_array(keys)
        if first_position < 0 or generation not in {EXACT_GENERATION, BLENDED_GENERATION}:
            raise ValueError(f"position {first_position}, generation {generation}")
        skip = first_position % self.tokens_per_block
        wanted = -(-(skip + len(tokens)) // self.tokens_per_block) if len(tokens) else 0
        if len(rows) != wanted:
            place = f"{len(tokens)} tokens from position {first_position} on"
            raise ValueError(f"{len(rows)} keys for {place}, which touch {wanted} blocks")
        piece = Source(domain, tokens, first_position, rows, generation, _NONE, _NONE)
        known = self._walk(domain, tokens, 0, len(tokens))
        kept = [(run.start, run.end) for run in known if run.source.generation <= generation]
        starts = [0, *(end for _, end in kept)]
        ends = [*(start for start, _ in kept), len(tokens)]
        return sum(self._store(piece, s, e) for s, e in zip(starts, ends, strict=True))

    def match(self, domain: bytes, tokens: Tokens, first: int = 0, last: int | None = None) -> Runs:
        """Runs of ``tokens[first:last]`` that are known in *domain*, as if just used.

        From left to right, the first window that is known, and all tokens around it that equal
        those of its source, are a run; the next one begins behind it. Where the source of the run
        before has the tokens at the same distance too, it is taken; otherwise one with exact KV
        comes before one of generation 1. No run is shorter than a window. A prompt made to be full
        of equal fingerprints of unequal tokens is not searched to its end.

        Raises:
            ValueError: The tokens are not of type uint32, or the range is not within them.
        """
        _check_tokens(tokens)
        last = len(tokens) if last is None else last
        if not 0 <= first <= last <= len(tokens):
            raise ValueError(f"tokens {first} to {last} of {len(tokens)}")
        runs = list(self._walk(domain, tokens, first, last))
        for run in runs:
            self._sources.move_to_end(run.number)
        return as_runs(runs, self.tokens_per_block)

    def forget(self, keys: Sequence[BlockKey] | KeyArray) -> int:
        """Offer nothing any more that lies in the blocks *keys*, which the cache has no more.

        What remains of a source is the next to go.

        Returns:
            How many tokens are known no more.
        """
        entries = self._blocks.find_all(self._key_prints(as_key_array(keys)))
        gone: dict[int, set[int]] = {}
        for number, row in zip(*self._blocks.holders(entries), strict=True):
            gone.setdefault(number, set()).add(row)
        before = self._tokens
        # All go before what remains of any is stored, or it would count as known by what is to go.
        cut = [(self._remove(number), sorted(gone[number])) for number in sorted(gone)]
        for source, rows in cut:
            for start, end in self._remains(source, rows):
                if self._store(source, start, end):
                    self._sources.move_to_end(next(reversed(self._sources)), last=False)
        return before - self._tokens

    def clear(self, domain: bytes | None = None) -> None:
        """Forget all sources of *domain*, or all there are."""
        if domain is not None:
            for number in [n for n, s in self._sources.items() if s.domain == domain]:
                self._remove(number)
            return
        most = self.capacity_tokens // self.grid_tokens
        self._sources: OrderedDict[int, Source] = OrderedDict()  # that matched last at the end
        self._tokens = 0
        self._windows = PrintTable(most)
        self._blocks = PrintTable(self.capacity_tokens // self.tokens_per_block + 2 * most)

    def _walk(self, domain: bytes, tokens: Tokens, first: int, last: int) -> list[Run]:
        known = Known(self._fingerprints, self._windows, self._sources)
        return Search(known, domain, tokens, first, last).runs

    def _store(self, piece: Source, start: int, end: int) -> int:
        """Make a source of what *piece* has from offset *start* to *end*; its tokens, 0 if none."""
        end = min(end, start + self.capacity_tokens)
        if end - start < self.grid_tokens:
            return 0
        while self._tokens + end - start > self.capacity_tokens:
            self._remove(next(iter(self._sources)))
        tokens = piece.tokens[start:end].copy()
        seed = self._fingerprints.seed(piece.domain)
        prints, which = np.unique(self._fingerprints.grid(tokens, seed), return_index=True)
        free = self._free_windows(prints, piece.generation)
        if not free.any():
            return 0
        skip = piece.first_position % self.tokens_per_block
        first_row = (skip + start) // self.tokens_per_block
        rows = slice(first_row, (skip + end - 1) // self.tokens_per_block + 1)
        keys = piece.keys[rows].copy()
        number = next(self._numbers)
        self._sources[number] = Source(
            domain=piece.domain,
            tokens=tokens,
            first_position=piece.first_position + start,
            keys=keys,
            generation=piece.generation,
            windows=self._windows.add(prints[free], number, which[free] * self.grid_tokens),
            blocks=self._blocks.add(self._key_prints(keys), number, np.arange(len(keys))),
        )
        self._tokens += len(tokens)
        return len(tokens)

    def _free_windows(self, prints: Prints, generation: int) -> NDArray[np.bool_]:
        """Which of *prints* no source has; one of a greater generation loses its own."""
        rows, entries = self._windows.find(prints)
        numbers, _ = self._windows.holders(entries)
        worse = [self._sources[number].generation > generation for number in numbers]
        lost = np.array(worse, np.bool_)
        self._windows.remove(entries[lost])
        free = np.ones(len(prints), np.bool_)
        free[rows[~lost]] = False
        return free

    def _remove(self, number: int) -> Source:
        source = self._sources.pop(number)
        self._tokens -= len(source.tokens)
        self._windows.remove(self._windows.owned(source.windows, number))
        self._blocks.remove(source.blocks)
        return source

    def _key_prints(self, keys: KeyArray) -> Prints:
        prints: Prints = (keys.view(np.uint64) * self._weights).sum(axis=1, dtype=np.uint64)
        return prints

    def _remains(self, source: Source, rows: list[int]) -> Iterator[tuple[int, int]]:
        """The pieces of *source* between the blocks *rows*, from which offset to which."""
        begin = -(source.first_position % self.tokens_per_block)  # offset of the first block
        start = 0
        for row in rows:
            yield start, begin + row * self.tokens_per_block
            start = begin + (row + 1) * self.tokens_per_block
        yield start, len(source.tokens)


def _check_tokens(tokens: Tokens) -> None:
    if tokens.dtype != np.uint32 or tokens.ndim != 1:
        raise ValueError(f"tokens of type {tokens.dtype} and shape {tokens.shape}")
