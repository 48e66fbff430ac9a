"""What a source index should find, by comparing every token with every other."""

from dataclasses import dataclass, field
from typing import NamedTuple


class BruteRun(NamedTuple):
    start: int
    length: int
    delta: int
    generation: int
    keys: tuple[bytes, ...]
    skip: int


@dataclass(eq=False)
class BruteSource:
    domain: bytes
    tokens: list[int]
    position: int
    keys: list[bytes]
    generation: int
    number: int = 0  # of those ever stored


@dataclass
class BruteSources:
    grid: int
    block: int
    capacity: int
    sources: list[BruteSource] = field(default_factory=list)  # least recently matched first
    windows: dict[tuple[bytes, tuple[int, ...]], tuple[BruteSource, int]] = field(
        default_factory=dict
    )
    stored: int = 0

    def add(self, new: BruteSource) -> int:
        found = self.search(new.domain, new.tokens, 0, len(new.tokens))
        known = [False] * len(new.tokens)
        for start, length, source, _ in found:
            if source.generation <= new.generation:
                known[start : start + length] = [True] * length
        # What another run's end separates are two pieces, even where nothing known is between.
        pieces, start = [], 0
        for run_start, length, source, _ in found:
            if source.generation <= new.generation:
                pieces.append((start, run_start))
                start = run_start + length
        pieces.append((start, len(new.tokens)))
        assert all(not any(known[s:e]) for s, e in pieces)
        return sum(self.store(new, s, min(e, s + self.capacity), oldest=False) for s, e in pieces)

    def store(self, piece: BruteSource, start: int, end: int, *, oldest: bool) -> int:
        start = max(start, 0)
        if end - start < self.grid:
            return 0
        while sum(len(s.tokens) for s in self.sources) + end - start > self.capacity:
            self.drop(self.sources[0])
        skip = piece.position % self.block
        rows = [(skip + offset) // self.block for offset in (start, end - 1)]
        keys = piece.keys[rows[0] : rows[1] + 1]
        tokens = piece.tokens[start:end]
        self.stored += 1
        source = BruteSource(
            piece.domain, tokens, piece.position + start, keys, piece.generation, self.stored
        )
        took = False
        for offset in range(0, end - start - self.grid + 1, self.grid):
            window = (piece.domain, tuple(tokens[offset : offset + self.grid]))
            holder = self.windows.get(window)
            if holder is None or holder[0].generation > piece.generation:
                self.windows[window] = (source, offset)
                took = True
        if took:
            self.sources.insert(0 if oldest else len(self.sources), source)
        return len(tokens) if took else 0

    def drop(self, source: BruteSource) -> None:
        self.sources.remove(source)
        self.windows = {w: held for w, held in self.windows.items() if held[0] is not source}

    def forget(self, keys: list[bytes]) -> int:
        before = sum(len(s.tokens) for s in self.sources)
        cut = [source for source in self.sources if set(source.keys) & set(keys)]
        for source in cut:
            self.drop(source)
        for source in sorted(cut, key=lambda source: source.number):
            start = 0
            alive = [
                source.keys[(source.position + at) // self.block - source.position // self.block]
                not in keys
                for at in range(len(source.tokens))
            ]
            for at, lives in enumerate([*alive, False]):
                if not lives:
                    self.store(source, start, at, oldest=True)
                    start = at + 1
        return before - sum(len(s.tokens) for s in self.sources)

    def search(
        self, domain: bytes, tokens: list[int], first: int, last: int
    ) -> list[tuple[int, int, BruteSource, int]]:
        runs: list[tuple[int, int, BruteSource, int]] = []
        position = at = first
        while at + self.grid <= last:
            window = tuple(tokens[at : at + self.grid])
            held = self.windows.get((domain, window))
            if held is None:
                at += 1
                continue
            source, offset = held
            if runs:
                start, _, before, begin = runs[-1]
                further = at - start + begin
                if tuple(before.tokens[further : further + self.grid]) == window:
                    source, offset = before, further
            left = right = 0
            while left < min(at - position, offset) and (
                tokens[at - left - 1] == source.tokens[offset - left - 1]
            ):
                left += 1
            while at + right < last and source.tokens[offset + right :][:1] == [tokens[at + right]]:
                right += 1
            runs.append((at - left, left + right, source, offset - left))
            position = at = at + right
        return runs

    def match(self, domain: bytes, tokens: list[int], first: int, last: int) -> list[BruteRun]:
        runs = []
        for start, length, source, offset in self.search(domain, tokens, first, last):
            self.sources.remove(source)
            self.sources.append(source)
            position = source.position + offset
            rows = [
                at // self.block - source.position // self.block
                for at in (position, position + length - 1)
            ]
            keys = tuple(source.keys[rows[0] : rows[1] + 1])
            delta = start - position
            runs.append(
                BruteRun(start, length, delta, source.generation, keys, position % self.block)
            )
        return runs
