"""One search of a prompt for runs of known tokens."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstrata.blend.fingerprints import PIECE_WINDOWS, Fingerprints, Tokens
from kvstrata.blend.print_table import Ids, PrintTable
from kvstrata.blend.sources import Run, Source, agreement

_FIRST_WINDOWS: Final = 4096  # looked up at once at first, in case that one run holds all
_GROWTH: Final = 4  # so many times more each time after that
_FALSE_HITS: Final = 1024  # after so many in one prompt somebody has made them
_SURVEYED_WINDOWS: Final = 1 << 15  # a survey of fewer takes as long as it spares
_STRIDE: Final = 16  # a survey looks up the windows that begin in one window of so many
_LONG_GAP: Final = 4096  # windows between runs that are looked up apart from those of others
_JOINED_TOKENS: Final = 8000  # or a gap more: of arrays that malloc has at hand, as PIECE_WINDOWS

_NONE: Final[Ids] = np.empty(0, np.int32)

_Positions = NDArray[np.intp]


class Known(NamedTuple):
    """What a search finds runs in."""

    fingerprints: Fingerprints
    windows: PrintTable
    sources: Mapping[int, Source]


class _Hits(NamedTuple):
    """Windows of a prompt, ascending, whose fingerprints are known."""

    positions: list[int]
    entries: Ids


class Search:
    """Finds runs from left to right, as ``SourceIndex.match`` says.

    To look up every window is most of the work, and needless within a run, which is compared token
    by token from one window on. So of a long prompt a survey looks up a few windows in every
    thousand. Then come all that stand between the runs that it has found; those within one only if
    it is not taken in the end, since another run goes on into it.
    """

    def __init__(self, known: Known, domain: bytes, tokens: Tokens, first: int, last: int) -> None:
        self._fingerprints, self._windows, self._sources = known
        self._domain = domain
        self._tokens = tokens
        self._last = last
        self._seed = self._fingerprints.seed(domain)
        self._grid_tokens = self._fingerprints.window_tokens
        self._end = last - self._grid_tokens + 1  # of the windows
        self._position = first  # where the last run ends
        self._false_hits = 0
        self.runs: list[Run] = []
        near = first + _FIRST_WINDOWS
        self._scan(first, min(near, self._end))
        near = max(near, self._position)
        if self._end - near < _SURVEYED_WINDOWS:
            self._scan(near, self._end, PIECE_WINDOWS)
        else:
            self._scan_around(near, self._survey(near))

    def _scan(self, begin: int, end: int, windows: int = _FIRST_WINDOWS) -> None:
        """Take the runs of the windows from *begin* to *end*, so many *windows* at first."""
        while (begin := max(begin, self._position)) < end and self._false_hits < _FALSE_HITS:
            some = min(end, begin + windows)
            tokens = self._tokens[begin : some + self._grid_tokens - 1]
            prints = self._fingerprints.rolling(tokens, self._seed)
            rows, entries = self._windows.find(prints)
            self._take(_Hits((rows + begin).tolist(), entries), 0, len(rows))
            begin, windows = some, min(windows * _GROWTH, PIECE_WINDOWS)

    def _survey(self, begin: int) -> list[Run]:
        """Runs from *begin* on, apart from each other; not all."""
        starts = np.arange(begin, self._end - self._grid_tokens, _STRIDE * self._grid_tokens)
        hits = self._look_up(starts, starts + self._grid_tokens)
        found: list[Run] = []
        holders = zip(*self._windows.holders(hits.entries), strict=True)
        for hit, (number, offset) in zip(hits.positions, holders, strict=True):
            if hit < begin or self._false_hits >= _FALSE_HITS:
                continue
            run = self._run(begin, hit, number, offset)
            if run is None:
                self._false_hits += 1
            else:
                found.append(run)
                begin = run.end
        return found

    def _scan_around(self, begin: int, surveyed: Sequence[Run]) -> None:
        """Take the runs of the windows from *begin* on, of which some are *surveyed*."""
        begins = np.array([begin, *(run.end for run in surveyed)])
        # Up to the first window of its source's grid that a run has: there it is found, if taken.
        firsts = [run.start + -run.offset % self._grid_tokens for run in surveyed]
        ends = np.minimum(np.array([*firsts, self._end - 1]) + 1, self._end)
        is_short = ends - begins < _LONG_GAP
        hits = self._look_up(begins[is_short], ends[is_short])
        gaps = zip(begins.tolist(), ends.tolist(), is_short.tolist(), strict=True)
        at = 0
        for (start, end, short), run in zip(gaps, [*surveyed, None], strict=True):
            if short:
                until = bisect_left(hits.positions, end, at)
                self._take(hits, at, until, run if self._position >= start else None)
                at = until
            else:
                self._scan(start, end, PIECE_WINDOWS)
            if run is not None and self._position < run.end:
                self._scan(end, min(run.end, self._end))

    def _look_up(self, starts: _Positions, ends: _Positions) -> _Hits:
        """The hits among the windows from each of *starts* to its end, ascending."""
        some = starts < ends
        starts, ends = starts[some], ends[some]
        tokens = np.cumsum(ends - starts + (self._grid_tokens - 1))
        cuts = (np.flatnonzero(np.diff(tokens // _JOINED_TOKENS)) + 1).tolist()
        positions: list[int] = []
        entries = [_NONE]
        for first, last in pairwise([0, *cuts, len(starts)]):
            hits = self._look_up_joined(starts[first:last], ends[first:last])
            positions += hits.positions
            entries.append(hits.entries)
        return _Hits(positions, np.concatenate(entries))

    def _look_up_joined(self, starts: _Positions, ends: _Positions) -> _Hits:
        """The same of no more than ``PIECE_WINDOWS`` tokens, put together."""
        if not len(starts):
            return _Hits([], _NONE)
        more = self._grid_tokens - 1  # tokens of the last window of a piece
        tokens, spans = self._tokens, zip(starts.tolist(), ends.tolist(), strict=True)
        joined = np.concatenate([tokens[start : end + more] for start, end in spans])
        prints = self._fingerprints.rolling(joined, self._seed)
        windows = ends - starts
        before = np.cumsum(windows) - windows  # of each piece, in those that are looked up
        number = np.arange(int(windows.sum()))
        rows = np.repeat(more * np.arange(len(starts)), windows)  # without those across a seam
        rows += number
        found, entries = self._windows.find(prints.take(rows))
        pieces = np.searchsorted(before, found, "right") - 1
        return _Hits((found + (starts - before).take(pieces)).tolist(), entries)

    def _take(self, hits: _Hits, at: int, until: int, expected: Run | None = None) -> None:
        """Take the runs that the hits from number *at* to *until* are in.

        *expected* is the run around a hit in it, if nothing before it has been taken meanwhile.
        """
        positions, entries = hits
        at = bisect_left(positions, self._position, at, until)
        while at < until and self._false_hits < _FALSE_HITS:
            hit = positions[at]
            run = self._continued(hit) if self.runs else None
            if run is None:
                number, offset = self._windows.holder(entries.item(at))
                if expected is not None and expected.holds(hit, number, offset):
                    run = expected.behind(self._position)
                else:
                    run = self._run(self._position, hit, number, offset)
            if run is None:
                self._false_hits += 1
                at += 1
            else:
                self.runs.append(run)
                self._position = run.start + run.length
                at = bisect_left(positions, self._position, at, until)

    def _continued(self, hit: int) -> Run | None:
        """The run around *hit* at the same distance to its source as the one before."""
        before = self.runs[-1]
        tokens = before.source.tokens
        offset = hit - before.start + before.offset
        if offset >= len(tokens) or tokens.item(offset) != self._tokens.item(hit):
            return None
        return self._run(self._position, hit, before.number, offset)

    def _run(self, begin: int, hit: int, number: int, offset: int) -> Run | None:
        """The run around *hit*, from *begin* on, if that source has the window at *offset*."""
        source = self._sources[number]
        after = min(self._last - hit, len(source.tokens) - offset)
        if after < self._grid_tokens or source.domain != self._domain:
            return None
        reach = min(hit - begin, offset), after
        left, right = agreement(self._tokens, hit, source.tokens, offset, reach)
        if right < self._grid_tokens:
            return None
        return Run(hit - left, left + right, source, offset - left, number)
