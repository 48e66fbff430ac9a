"""Prefill seconds that each eviction policy saves, beside the most that any cache could save.

    python bench/policies.py                    # minutes; the table of docs/performance.md
    python bench/policies.py --trace my.jsonl   # a trace of yours instead

Counted, not timed: the same command prints the same figures on every machine.
"""

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, get_args

import msgspec

from kvstrata.core.tier_fields import Eviction
from kvstrata.core.units import human_bytes, parse_bytes
from kvstrata.replay.cost import Costs, Model, Rates
from kvstrata.replay.formats import Reading, open_trace, sample_path
from kvstrata.replay.generate import Kind, generate
from kvstrata.replay.outcome import OPTIMUM, Outcome
from kvstrata.replay.reuse import find_reuse
from kvstrata.replay.runs import Run, Study, run_all
from kvstrata.replay.scan import scan
from kvstrata.replay.simulator import CachePlan
from kvstrata.replay.sizes import Sizes

POLICIES: Final[tuple[Eviction, ...]] = get_args(Eviction)
HOST_SIZES: Final = "32GiB,64GiB,128GiB,256GiB"


class Traffic(NamedTuple):
    """What ``kvstrata make-trace`` would write: one hour, 5000 requests."""

    title: str
    seed: int
    mix: Mapping[Kind, float]


TRAFFIC: Final = (
    Traffic("all kinds", 11, {"chat": 0.5, "document": 0.15, "agent": 0.2, "single": 0.15}),
    Traffic("documents and chats", 12, {"chat": 0.4, "document": 0.4, "single": 0.2}),
    Traffic("agents", 13, {"agent": 0.6, "chat": 0.2, "single": 0.2}),
)
REQUESTS: Final = 5000
SECONDS: Final = 3600.0


def made(traffic: Traffic, folder: Path) -> Path:
    """The trace of *traffic* in a new file."""
    path = folder / f"seed-{traffic.seed}.jsonl"
    encoder = msgspec.json.Encoder()
    with path.open("wb") as out:
        for each in generate(REQUESTS, seconds=SECONDS, seed=traffic.seed, mix=traffic.mix):
            out.write(encoder.encode(each) + b"\n")
    return path


def replayed(path: Path, sizes: Sequence[Sizes], jobs: int) -> list[Outcome]:
    """Every policy, and the bounds, at every size."""
    with tempfile.TemporaryDirectory() as name:
        trace = open_trace(path, Reading())
        block_bytes = trace.block_bytes or Model().bytes_per_block(trace.tokens_per_block)
        costs = Costs(Rates(), trace.tokens_per_block, block_bytes)
        spool = scan(trace, Path(name))
        runs: list[Run] = [CachePlan(policy, each) for each in sizes for policy in POLICIES]
        return run_all(Study(spool, find_reuse(spool), costs), [*runs, *sizes], jobs=jobs)


def rows(title: str, outcomes: Sequence[Outcome]) -> list[str]:
    """A row of the table for each size."""
    minutes = {(each.sizes, each.policy): each.prefill_seconds / 60 for each in outcomes}
    lines = []
    for size in sorted({each.sizes for each in outcomes}):
        found = [minutes[size, policy] for policy in (*POLICIES, OPTIMUM)]
        gain = minutes[size, "cost"] / minutes[size, "lru"] - 1
        cells = [f"{value:.1f}" for value in found] + [f"{gain:+.1%}"]
        lines.append(f"| {title} | {human_bytes(size.host_bytes)} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, help="replay this file only")
    parser.add_argument("--host", default=HOST_SIZES, help=f"sizes; default {HOST_SIZES}")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    sizes = [Sizes(parse_bytes(text), 0) for text in options.host.split(",")]
    print("| trace | host memory | lru | s3fifo | cost | at most | cost / lru |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as name:
        traces = [("sample", sample_path())]
        traces += [(traffic.title, made(traffic, Path(name))) for traffic in TRAFFIC]
        if options.trace is not None:
            traces = [(options.trace.name, options.trace)]
        for title, path in traces:
            print("\n".join(rows(title, replayed(path, sizes, options.jobs))), flush=True)


if __name__ == "__main__":
    main()
