"""Finding runs of known tokens in a prompt of 131,072: how long, how much, at what storage.

    python bench/blend_match.py [--quick] [--windows 1000000] [--json FILE]

Exits with 1 if a bound is missed. See bench/README.md for what is measured.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table
from xxhash import xxh3_64_intdigest

from kvstrata.blend.fingerprints import Fingerprints, Tokens, tokens_of
from kvstrata.blend.runs import Runs
from kvstrata.blend.source_index import SourceIndex

PROMPT_TOKENS: Final = 131_072
GRID_TOKENS: Final = 64
TOKENS_PER_BLOCK: Final = 16
WINDOWS: Final = 1_000_000
VOCABULARY: Final = 50_000
DOMAIN: Final = b"bench"
WORKLOAD: Final = "workload"

MOST_MS: Final = 2.0  # of the workload, median
LEAST_COVERAGE: Final = 0.93
MOST_STORED: Final = 1.3

DONORS: Final = 30
TARGETS: Final = 20
_DOCUMENTS: Final = 60
_DOCUMENTS_A_PROMPT: Final = 10


@dataclass
class Bed:
    """An index, the prompts that it was given, and where each of their blocks is in them."""

    capacity_tokens: int
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    prompts: list[Tokens] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.index = SourceIndex(
            Fingerprints(GRID_TOKENS),
            tokens_per_block=TOKENS_PER_BLOCK,
            capacity_tokens=self.capacity_tokens,
        )

    def tokens(self, count: int) -> Tokens:
        return self.rng.integers(0, VOCABULARY, count, dtype=np.uint32)

    def between(self, least: int, below: int) -> Tokens:
        return self.tokens(int(self.rng.integers(least, below)))

    def give(self, prompt: Tokens) -> int:
        """Add *prompt*; its blocks' keys say which block of which prompt they are of."""
        blocks = -(-len(prompt) // TOKENS_PER_BLOCK)
        keys = np.zeros((blocks, 4), np.uint64)
        keys[:, 0], keys[:, 1] = len(self.prompts), np.arange(blocks)
        self.prompts.append(prompt)
        return self.index.add(DOMAIN, prompt, 0, keys.view(np.uint8))

    def check(self, target: Tokens, runs: Runs) -> None:
        """Ends the program if a run's blocks do not hold its tokens."""
        names = runs.keys.view(np.uint64)
        for run, first in enumerate(runs.key_offsets[:-1]):
            prompt, block = names[first, :2].tolist()
            begin = block * TOKENS_PER_BLOCK + int(runs.skip[run])
            start, length = int(runs.start[run]), int(runs.length[run])
            source = self.prompts[prompt][begin : begin + length]
            same = np.array_equal(source, target[start : start + length])
            if not same or start - begin != runs.delta[run]:
                sys.exit(f"the run at {start} is not what its blocks hold")


@dataclass(frozen=True)
class Reuse:
    """What came of the workload of documents."""

    coverage: float  # share of the targets' document tokens that is in runs
    stored: float  # tokens of all sources over tokens of all documents


@dataclass(frozen=True)
class Row:
    """Milliseconds of CPU time of one kind of prompt."""

    prompt: str
    runs: int
    best_ms: float
    median_ms: float
    p99_ms: float
    list_ms: float  # median, of the prompt as vLLM has it: a list, of which an array is made first
    times_xxh3: float  # median over that of XXH3 of the prompt's tokens


class Documents:
    """Prompts of ten documents of 200 to 2000 tokens in any order, with other text between them."""

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        self.documents = [bed.between(200, 2000) for _ in range(_DOCUMENTS)]

    def prompt(self) -> tuple[Tokens, Tokens]:
        """Its tokens, and of each whether it is of a document: 1 or 0."""
        parts = [(self.bed.between(20, 200), 0)]
        for number in self.bed.rng.permutation(_DOCUMENTS)[:_DOCUMENTS_A_PROMPT]:
            parts += [(self.documents[number], 1), (self.bed.between(3, 25), 0)]
        parts.append((self.bed.tokens(60), 0))
        flags = [np.full(len(part), flag, np.uint32) for part, flag in parts]
        return np.concatenate([part for part, _ in parts]), np.concatenate(flags)

    def measure(self) -> Reuse:
        bed = self.bed
        stored = sum(bed.give(self.prompt()[0]) for _ in range(DONORS))
        covered = wanted = 0
        for _ in range(TARGETS):
            target, is_document = self.prompt()
            runs = bed.index.match(DOMAIN, target)
            bed.check(target, runs)
            wanted += int(is_document.sum())
            covered += sum(
                int(is_document[start:end].sum())
                for start, end in zip(runs.start, runs.end, strict=True)
            )
        return Reuse(covered / wanted, stored / sum(map(len, self.documents)))

    def long_prompt(self, tokens: int) -> Tokens:
        prompts: list[Tokens] = []
        while sum(map(len, prompts)) < tokens:
            prompts.append(self.prompt()[0])
        return np.concatenate(prompts)[:tokens]


def patchwork(bed: Bed, tokens: int) -> Tokens:
    """A prompt of which every window is of another source."""
    pieces = [bed.tokens(GRID_TOKENS) for _ in range(tokens // GRID_TOKENS)]
    for piece in pieces:
        bed.give(piece)
    return np.concatenate(pieces)


def fill(bed: Bed, windows: int) -> None:
    """Have that many windows known."""
    while (missing := windows - bed.index.statistics().windows) > 0:
        bed.give(bed.tokens(min(missing * GRID_TOKENS, PROMPT_TOKENS)))


def milliseconds(rounds: int, call: Callable[[], object]) -> list[float]:
    """CPU time of this thread in each round, ascending; the first round warms up."""
    taken = []
    for _ in range(rounds + 1):
        start = time.thread_time_ns()
        call()
        taken.append((time.thread_time_ns() - start) / 1e6)
    return sorted(taken[1:])


def measure(name: str, bed: Bed, prompt: Tokens, rounds: int) -> Row:
    runs = bed.index.match(DOMAIN, prompt)
    bed.check(prompt, runs)
    content = prompt.tobytes()
    ids = prompt.tolist()
    mine: list[float] = []
    listed: list[float] = []
    hashed: list[float] = []
    for _ in range(4):  # in turns: the machine may be faster now than then
        mine += milliseconds(rounds // 4, lambda: bed.index.match(DOMAIN, prompt))
        listed += milliseconds(rounds // 4, lambda: bed.index.match(DOMAIN, tokens_of(ids)))
        hashed += milliseconds(rounds // 4, lambda: xxh3_64_intdigest(content))
    median, listed_ms, hashed_ms = map(statistics.median, (mine, listed, hashed))
    return Row(
        prompt=name,
        runs=len(runs),
        best_ms=min(mine),
        median_ms=median,
        p99_ms=sorted(mine)[len(mine) * 99 // 100],
        list_ms=listed_ms,
        times_xxh3=median / hashed_ms,
    )


def failures(reuse: Reuse, rows: list[Row]) -> list[str]:
    """One line for each bound that is missed."""
    lines = []
    if reuse.coverage < LEAST_COVERAGE:
        lines.append(f"coverage is {reuse.coverage:.3f}, at least {LEAST_COVERAGE}")
    if reuse.stored > MOST_STORED:
        lines.append(f"stored / unique tokens is {reuse.stored:.2f}, at most {MOST_STORED}")
    lines += [
        f"the {row.prompt} takes {row.median_ms:.2f} ms, at most {MOST_MS}"
        for row in rows
        if row.prompt == WORKLOAD and row.median_ms > MOST_MS
    ]
    return lines


def run(windows: int, rounds: int, prompt_tokens: int = PROMPT_TOKENS) -> tuple[Reuse, list[Row]]:
    bed = Bed(capacity_tokens=(windows + 8192) * GRID_TOKENS + prompt_tokens)
    documents = Documents(bed)
    reuse = documents.measure()
    prompts = {
        WORKLOAD: documents.long_prompt(prompt_tokens),
        "nothing known": bed.tokens(prompt_tokens),
        "every window of another source": patchwork(bed, prompt_tokens),
        "everything known": bed.tokens(prompt_tokens),
    }
    bed.give(prompts["everything known"])
    fill(bed, windows)
    return reuse, [measure(name, bed, prompt, rounds) for name, prompt in prompts.items()]


def show(reuse: Reuse, rows: list[Row]) -> None:
    table = Table(title="CPU time of a match", title_justify="left")
    for column in ("prompt", "runs", "best ms", "median ms", "p99 ms", "of a list", "times XXH3"):
        table.add_column(column, justify="left" if column == "prompt" else "right")
    for row in rows:
        figures = (row.best_ms, row.median_ms, row.p99_ms, row.list_ms)
        shown = [f"{figure:.3f}" for figure in figures]
        table.add_row(row.prompt, str(row.runs), *shown, f"{row.times_xxh3:.1f}")
    console = Console(width=110)
    console.print(table)
    console.print(f"coverage {reuse.coverage:.3f}, stored / unique tokens {reuse.stored:.2f}")
    for line in failures(reuse, rows):
        console.print(f"missed: {line}")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--windows", type=int, default=WINDOWS, help="known, at least")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    options.rounds = 40 if options.quick else 400
    return options


def to_json(reuse: Reuse, rows: list[Row]) -> str:
    found: dict[str, Any] = {"reuse": vars(reuse), "match": [vars(row) for row in rows]}
    return json.dumps(found, indent=1)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    reuse, rows = run(options.windows, options.rounds)
    show(reuse, rows)
    if options.json:
        options.json.write_text(to_json(reuse, rows), encoding="utf-8")
    return 1 if failures(reuse, rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
