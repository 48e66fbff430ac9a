"""What KVStrata costs vLLM when it has nothing to give, and what a hit costs beside its peers.

    python -m bench.overhead --lmcache FOLDER                  # 20 rounds, 15 repetitions
    python -m bench.overhead --lmcache FOLDER --quick          # 3 and 3
    python -m bench.overhead --only throughput --json run.json # one part; every measurement

Two parts, each with engines of its own that run side by side and take turns:

* ``throughput``: batches of prompts with KVStrata and without a connector, A B B A; first with
  nothing to be found, then with all of it in the device cache.
* ``peers``: the first token of a prompt of 2050 tokens with KVStrata, LMCache's daemon, vLLM's
  ExampleConnector and no connector: a miss, a device hit, and a hit in what is outside.

What the hooks cost a step of the scheduler is measured by ``step_hooks.py``.
"""

import argparse
import dataclasses
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from bench.engine_process import Engine, environment
from bench.vllm_hit import (
    VOCABULARY,
    Bound,
    Run,
    Sample,
    Samples,
    Verdict,
    add_engine_options,
    choose_configurations,
    failed_hits,
    markdown,
    start_engines,
    verdicts,
)

__all__ = ["Batch", "Share", "parse", "peer_bounds", "shares", "turns"]

PARTS: Final = ("throughput", "peers")
PEERS: Final = ("none", "kvstrata", "lmcache", "example")
PEER_PROMPT_TOKENS: Final = 2050
LEAST_SHARE: Final = {"miss": 0.97, "device hit": 0.99}  # of the throughput without a connector
ENGINE_BLOCK_TOKENS: Final = 32


@dataclasses.dataclass(frozen=True)
class Batch:
    """One batch that one engine worked off."""

    round: int
    operation: str  # of LEAST_SHARE
    configuration: str
    seconds: float
    tokens: int  # that it took in and gave out
    as_meant: bool  # as many of its tokens were cached as should be


@dataclasses.dataclass(frozen=True)
class Share:
    """Throughput with KVStrata as a share of that without."""

    operation: str
    rounds: int
    median: float  # of the rounds
    total: float  # of all rounds together
    least: float

    @property
    def met(self) -> bool:
        return self.median >= self.least

    def __str__(self) -> str:
        word = "met    " if self.met else "NOT met"
        return (
            f"{word} throughput, {self.operation}: {self.median:.1%} of no connector's "
            f"(all {self.rounds} rounds together {self.total:.1%}), at least {self.least:.0%}"
        )


def turns(first: str, second: str) -> tuple[tuple[str, int], ...]:
    """A B B A: (engine, which of the round's two sets of prompts)."""
    return (first, 0), (second, 0), (second, 1), (first, 1)


def shares(batches: Iterable[Batch]) -> list[Share]:
    """One for each operation; a round counts if all four of its batches were as meant."""
    rounds: dict[tuple[str, int], list[Batch]] = {}
    for batch in batches:
        rounds.setdefault((batch.operation, batch.round), []).append(batch)
    found = []
    for operation, least in LEAST_SHARE.items():
        pairs = []
        for (op, _), four in rounds.items():
            if op == operation and len(four) == 4 and all(b.as_meant for b in four):
                pairs.append(tuple(_seconds(four, name) for name in ("none", "kvstrata")))
        if pairs:
            ratios = [without / with_it for without, with_it in pairs]
            total = sum(p[0] for p in pairs) / sum(p[1] for p in pairs)
            found.append(Share(operation, len(pairs), statistics.median(ratios), total, least))
    return found


def _seconds(batches: Iterable[Batch], configuration: str) -> float:
    return sum(b.seconds for b in batches if b.configuration == configuration)


def table(batches: Sequence[Batch]) -> str:
    """Tokens a second, in and out."""
    lines = [
        "| operation | configuration | batches | tokens/s, median | best |",
        "|---|---|---:|---:|---:|",
    ]
    for operation in LEAST_SHARE:
        for name in ("none", "kvstrata"):
            rates = [
                b.tokens / b.seconds
                for b in batches
                if b.as_meant and (b.operation, b.configuration) == (operation, name)
            ]
            if rates:
                figures = f"{len(rates)} | {statistics.median(rates):.0f} | {max(rates):.0f}"
                lines.append(f"| {operation} | {name} | {figures} |")
    return "\n".join(lines)


def peer_bounds() -> Iterator[Bound]:
    """KVStrata is ahead of both in all three."""
    at = (PEER_PROMPT_TOKENS,)
    for name, external in (("lmcache", "host hit"), ("example", "disk hit")):
        for ours, theirs in (
            ("miss", "miss"),
            ("device hit", "device hit"),
            ("host hit", external),
        ):
            text = f"{ours} / {name}'s {theirs}"
            yield Bound(text, at, (ours, "kvstrata"), (theirs, name), 1.0)


def throughput(engines: dict[str, Engine], options: argparse.Namespace) -> list[Batch]:
    """*options.rounds* rounds; the one before them warms up and is not counted."""
    drawn = random.Random(1)
    cached_when_hit = (options.prompt_tokens - 1) // ENGINE_BLOCK_TOKENS * ENGINE_BLOCK_TOKENS
    tokens = options.prompts * (options.prompt_tokens + options.new_tokens)
    batches = []
    for number in range(options.rounds + 1):
        sets = [
            [
                [drawn.randrange(1, VOCABULARY) for _ in range(options.prompt_tokens)]
                for _ in range(options.prompts)
            ]
            for _ in range(2)
        ]
        for operation in LEAST_SHARE:
            expected = options.prompts * cached_when_hit if operation == "device hit" else 0
            order = ("none", "kvstrata") if number % 2 else ("kvstrata", "none")
            for name, which in turns(*order):
                seconds, cached = engines[name].batch(sets[which], options.new_tokens)
                engines[name].settle()
                batch = Batch(number, operation, name, seconds, tokens, cached == expected)
                batches.append(batch)
        for engine in engines.values():
            engine.reset()  # room for the next round's prompts, and none of these to be found
    return [batch for batch in batches if batch.round > 0]


def peers(engines: dict[str, Engine], options: argparse.Namespace) -> list[Sample]:
    run = Run(engines, lambda: None, (PEER_PROMPT_TOKENS,))
    for number in range(options.repetitions + 1):
        run.repetition(number)
    return [sample for sample in run.samples if sample.repetition > 0]


def run_part(part: str, options: argparse.Namespace) -> tuple[list[Batch], list[Sample]]:
    """Start the engines of *part*, measure, and end them."""
    names = ("none", "kvstrata") if part == "throughput" else options.configurations
    part_options = argparse.Namespace(**{**vars(options), "configurations": names})
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-", dir=options.folder) as folder:
        engines = start_engines(part_options, Path(folder))
        try:
            if part == "throughput":
                return throughput(engines, options), []
            return [], peers(engines, options)
        finally:
            for engine in engines.values():
                engine.close()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="KVStrata's cost in vLLM, and its peers'.")
    add_engine_options(parser)
    parser.add_argument("--only", choices=PARTS, help="default: both parts")
    parser.add_argument("--rounds", type=int, default=20, help="of throughput; default: 20")
    parser.add_argument("--repetitions", type=int, default=15, help="of peers; default: 15")
    parser.add_argument("--quick", action="store_true", help="3 rounds, 3 repetitions")
    parser.add_argument("--prompts", type=int, default=16, help="of a batch; default: 16")
    parser.add_argument("--prompt-tokens", type=int, default=514, help="default: 514")
    parser.add_argument("--new-tokens", type=int, default=32, help="default: 32")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds = options.repetitions = 3
    choose_configurations(parser, options, PEERS)
    return options


def main() -> int:
    options = parse(sys.argv[1:])
    batches: list[Batch] = []
    samples: list[Sample] = []
    for part in [options.only] if options.only else PARTS:
        more_batches, more_samples = run_part(part, options)
        batches += more_batches
        samples += more_samples
    judged: list[Share | Verdict] = [*shares(batches), *verdicts(Samples(samples), peer_bounds())]
    if batches:
        print(table(batches), end="\n\n")
    if samples:
        print(markdown(Samples(samples)), end="\n\n")
    print(*judged, sep="\n")
    if options.json:
        about = {k: str(v) for k, v in vars(options).items()}
        about["threads_bind"] = environment()["VLLM_CPU_OMP_THREADS_BIND"]
        rows = [*map(dataclasses.asdict, batches), *map(dataclasses.asdict, samples)]
        options.json.write_text(json.dumps({"about": about, "measured": rows}, indent=1) + "\n")
    failed = failed_hits(samples) + [
        f"{b.configuration}: round {b.round}: a batch was no {b.operation}"
        for b in batches
        if not b.as_meant
    ]
    if failed:
        print(*failed, sep="\n", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
