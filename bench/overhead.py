"""What KVStrata costs vLLM when it has nothing to give: throughput beside no connector.

    python -m bench.overhead                   # 4 starts of both engines, 5 rounds each
    python -m bench.overhead --quick --json run.json   # 1 start, 3 rounds; every measurement

Batches of prompts with KVStrata and without a connector, A B B A; first with nothing to be found, then
with all of it in the device cache. Two starts of the same engine differ by more than the bounds leave,
so there are several. What the hooks cost a step of the scheduler is measured by
``step_hooks.py``, what a hit costs beside its peers by ``kvstrata bench --workload single``.
"""

import argparse
import dataclasses
import json
import random
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from bench.members import asked_at_once, roomy_members

from kvstrata.bench.fleet import Member, environment
from kvstrata.bench.models import Model

__all__ = ["Batch", "Share", "parse", "shares", "table", "throughput", "turns"]

LEAST_SHARE: Final = {"miss": 0.97, "device hit": 0.99}  # of the throughput without a connector
CONTENDERS: Final = ("none", "kvstrata")


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


def throughput(
    members: Mapping[str, Member], model: Model, options: argparse.Namespace, start: int
) -> list[Batch]:
    """*options.rounds* rounds of start number *start*; one before them warms up and is not counted."""
    drawn = random.Random(start)
    block = model.engine_block_tokens
    cached_when_hit = (options.prompt_tokens - 1) // block * block
    tokens = options.prompts * (options.prompt_tokens + options.new_tokens)
    batches = []
    before = start * options.rounds
    for number in range(before, before + options.rounds + 1):
        sets = [
            [
                [drawn.randrange(1, model.vocabulary) for _ in range(options.prompt_tokens)]
                for _ in range(options.prompts)
            ]
            for _ in range(2)
        ]
        for operation in LEAST_SHARE:
            expected = cached_when_hit if operation == "device hit" else 0
            order = CONTENDERS if number % 2 else CONTENDERS[::-1]
            for name, which in turns(*order):
                ran = members[name].run(asked_at_once(sets[which], options.new_tokens))
                members[name].settle()
                as_meant = all(
                    answer.failure is None and answer.cached_tokens == expected
                    for answer in ran.answers
                )
                batches.append(Batch(number, operation, name, ran.seconds, tokens, as_meant))
        for member in members.values():
            member.reset()  # room for the next round's prompts, and none of these to be found
        counted = [batch for batch in batches if batch.round > before]
        print(
            f"start {start + 1}, round {number - before}",
            *shares(counted),
            sep="; ",
            file=sys.stderr,
        )
    return counted


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--starts", type=int, default=4, help="of the engines; default: 4")
    parser.add_argument("--rounds", type=int, default=5, help="of a start; default: 5")
    parser.add_argument("--quick", action="store_true", help="1 start, 3 rounds")
    parser.add_argument("--prompts", type=int, default=16, help="of a batch; default: 16")
    parser.add_argument("--prompt-tokens", type=int, default=514, help="default: 514")
    parser.add_argument("--new-tokens", type=int, default=32, help="default: 32")
    parser.add_argument("--folder", type=Path, help="where the engines keep files; default /tmp")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement")
    options = parser.parse_args(arguments)
    if options.quick:
        options.starts, options.rounds = 1, 3
    return options


def main() -> int:
    options = parse(sys.argv[1:])
    batches: list[Batch] = []
    for start in range(options.starts):
        with roomy_members(CONTENDERS, options.folder) as (members, model):
            batches += throughput(members, model, options, start)
    print(table(batches), end="\n\n")
    print(*shares(batches), sep="\n")
    if options.json:
        about = {name: str(value) for name, value in vars(options).items()}
        about["model"] = model.title
        about["threads_bind"] = environment(None)["VLLM_CPU_OMP_THREADS_BIND"]
        rows = [dataclasses.asdict(batch) for batch in batches]
        options.json.write_text(json.dumps({"about": about, "measured": rows}, indent=1) + "\n")
    failed = [
        f"{batch.configuration}: round {batch.round}: a batch was no {batch.operation}"
        for batch in batches
        if not batch.as_meant
    ]
    if failed:
        print(*failed, sep="\n", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
