"""What it costs to say what a device should copy: nanoseconds a page, beside numpy's own floor.

    python bench/descriptors.py [--quick] [--json FILE]

The floor writes three int64 a page into fresh arrays, which is the least that a list of pages costs.
Where blocks are outermost a block is one span, so there a page costs less than its floor.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from kvstrata.transfer.descriptors import HostRows, PagePlace, PagePlaces

__all__ = ["CASES", "Case", "Sample", "failures", "markdown", "measure", "setting"]

BOUND_NS: Final = 50.0
PER_SLOT: Final = 16  # device blocks in a slot, whose rows are side by side
BASE: Final = 1 << 40  # of addresses, which nobody follows


@dataclasses.dataclass(frozen=True)
class Case:
    """A cache, and how many of its blocks are copied at once."""

    name: str
    layers: int
    page_bytes: int
    blocks: int
    blocks_outermost: bool = False

    @property
    def pages(self) -> int:
        return self.layers * self.blocks


CASES: Final = (
    Case("8B, a slot", 32, 65536, 16),
    Case("8B, 64 slots", 32, 65536, 1024),
    Case("8B, 64 slots, blocks outermost", 32, 65536, 1024, blocks_outermost=True),
    Case("MLA, a slot", 61, 18432, 16),
    Case("MLA, 64 slots", 61, 18432, 1024),
    Case("MLA, 64 slots, blocks outermost", 61, 18432, 1024, blocks_outermost=True),
)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Seconds of CPU for one list, and right before it for the floor."""

    case: Case
    spans: int
    seconds: float
    floor_seconds: float

    @property
    def page_ns(self) -> float:
        return self.seconds / self.case.pages * 1e9

    @property
    def floor_ns(self) -> float:
        return self.floor_seconds / self.case.pages * 1e9


def measure(case: Case, repetitions: int) -> list[Sample]:
    places, blocks, rows = setting(case)
    spans = len(places.spans(blocks, rows).device)
    samples = []
    for repetition in range(repetitions + 1):
        floor = _timed(lambda: [np.full(case.pages, 1, np.int64) for _ in range(3)])
        seconds = _timed(lambda: places.spans(blocks, rows))
        if repetition:  # the first one warms up
            samples.append(Sample(case, spans, seconds, floor))
    return samples


def setting(case: Case) -> tuple[PagePlaces, np.ndarray, HostRows]:
    num_blocks, row_bytes = 4 * case.blocks, case.layers * case.page_bytes
    if case.blocks_outermost:
        starts, stride = [i * case.page_bytes for i in range(case.layers)], row_bytes
    else:
        stride = case.page_bytes
        starts = [i * num_blocks * stride for i in range(case.layers)]
    pages = [PagePlace(BASE + start, stride, case.page_bytes) for start in starts]
    order = np.random.default_rng(0)
    blocks = order.permutation(num_blocks)[: case.blocks].astype(np.int64)
    slots = order.permutation(case.blocks // PER_SLOT) * PER_SLOT * row_bytes
    within = np.arange(PER_SLOT) * row_bytes
    addresses = (slots[:, None] + within).reshape(-1)
    begins = np.arange(case.blocks) % PER_SLOT == 0
    return PagePlaces(pages, num_blocks), blocks, HostRows(addresses, begins)


def _timed(action: Callable[[], object]) -> float:
    """CPU seconds a time, of so many that the clock can tell."""
    times = 20
    start = time.thread_time()
    for _ in range(times):
        action()
    return (time.thread_time() - start) / times


def _median(samples: Sequence[Sample]) -> tuple[float, float]:
    return (
        statistics.median(s.page_ns for s in samples),
        statistics.median(s.floor_ns for s in samples),
    )


def markdown(found: Sequence[Sequence[Sample]]) -> str:
    lines = [
        "| cache | pages | spans | ns a page | floor | most |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for samples in found:
        case, (page_ns, floor_ns) = samples[0].case, _median(samples)
        lines.append(
            f"| {case.name} | {case.pages} | {samples[0].spans} | {page_ns:.1f} | {floor_ns:.1f} "
            f"| {BOUND_NS:.0f} |"
        )
    return "\n".join(lines)


def failures(found: Sequence[Sequence[Sample]]) -> list[str]:
    """A line for each case above the bound."""
    return [
        f"NOT met: {samples[0].case.name}: {page_ns:.1f} ns a page, at most {BOUND_NS:.0f}"
        for samples in found
        if (page_ns := _median(samples)[0]) > BOUND_NS
    ]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What descriptors of copies cost.")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="5 repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement")
    options = parser.parse_args(arguments)
    if options.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    if options.quick:
        options.repetitions = 5
    return options


def main() -> int:
    options = parse(sys.argv[1:])
    found = [measure(case, options.repetitions) for case in CASES]
    print(markdown(found), end="\n\n")
    print(*(failures(found) or ["every case is within its bound"]), sep="\n")
    if options.json:
        about = {"machine": platform.platform(), "cores": os.cpu_count()}
        samples = [dataclasses.asdict(s) for samples in found for s in samples]
        options.json.write_text(json.dumps({"about": about, "samples": samples}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
