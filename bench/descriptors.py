"""What it costs to say what a device should copy: nanoseconds a page, beside numpy's own floor.

    python bench/descriptors.py [--quick] [--json FILE]

The floor writes three int64 a page into fresh arrays, which is the least that a list of pages costs.
Where blocks are outermost a block is one span, so there a page costs less than its floor. Lists, for
which the bound is, are made of the runs of a plan: the places of their rows in host memory, and the
spans. Beside them whole jobs are measured, on a device that has copied before it is asked: with the
owners of their slots, and each chunk's lock, call and events. What a cache costs a time and what it
costs a page is told by its copies of one slot and of 64. Exits with 1 if a list is above its bound.
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
from contextlib import AbstractContextManager, closing, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from kvstrata.bench.record import processor
from kvstrata.core.errors import InvariantViolated
from kvstrata.storage.mapping import HostMapping
from kvstrata.transfer.descriptors import HostRows, PagePlace, PagePlaces, Spans
from kvstrata.transfer.devices import NOW
from kvstrata.transfer.driver import Event
from kvstrata.transfer.guarded import Copied, RankSlots, Run, split_runs
from kvstrata.transfer.lanes import Handle, Job
from kvstrata.transfer.layered import LayerGates, Part
from kvstrata.transfer.streamed import StreamedDevice, rows_of

__all__ = [
    "CASES",
    "WAYS",
    "Case",
    "InstantDevice",
    "Sample",
    "costs",
    "failures",
    "markdown",
    "measure",
    "setting",
]

BOUND_NS: Final = 50.0
PER_SLOT: Final = 16  # device blocks in a slot, whose rows are side by side
BASE: Final = 1 << 40  # of addresses, which nobody follows
TIMED_SECONDS: Final = 0.002  # of each measurement, or once
WAYS: Final = ("lists", "a job", "a job by layers", "a job a layer")

Action = Callable[[], object]


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

    @property
    def row_bytes(self) -> int:
        return self.layers * self.page_bytes


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
    """Seconds of CPU by each of ``WAYS``, and right before them for the floor."""

    case: Case
    spans: int
    seconds: dict[str, float]
    floor_seconds: float

    def page_ns(self, way: str) -> float:
        return self.seconds[way] / self.case.pages * 1e9

    @property
    def floor_ns(self) -> float:
        return self.floor_seconds / self.case.pages * 1e9


def measure(case: Case, repetitions: int) -> list[Sample]:
    places, blocks, rows = setting(case)
    spans = len(places.spans(blocks, rows).device)
    slot_bytes = -(-case.row_bytes * PER_SLOT // 4096) * 4096
    samples = []
    with closing(HostMapping.create(case.blocks // PER_SLOT, slot_bytes, b"bench")) as mapping:
        ways = dict(zip(WAYS, _actions(case, mapping), strict=True))
        for repetition in range(repetitions + 1):
            floor = _timed(lambda: [np.full(case.pages, 1, np.int64) for _ in range(3)])
            seconds = {way: _timed(action) for way, action in ways.items()}
            if repetition:  # the first one warms up
                samples.append(Sample(case, spans, seconds, floor))
    return samples


def _actions(case: Case, mapping: HostMapping) -> list[Action]:
    """Lists; a load of whole blocks, one layer after the other, and saves of one layer each."""
    places, blocks, _ = setting(case)
    device = _instant([places])
    slots = RankSlots(mapping, 0, (case.row_bytes * PER_SLOT,), (0,))
    numbers = np.random.default_rng(1).permutation(mapping.slots).tolist()
    runs: Sequence[Run] = split_runs(
        blocks.tolist(), [(n, 0) for n in numbers], per_slot=(PER_SLOT,), absent=-1
    )

    def lists() -> None:
        places.spans(*rows_of(slots, runs, 0, case.row_bytes))

    def by_layers() -> None:
        _whole(device.load_layers_job([Part(slots, runs)], NOW, LayerGates(case.layers)))

    def a_layer_each() -> None:
        part = Part(slots, runs)
        for layer in range(case.layers):
            _whole(device.save_layer_job(part, NOW, layer))

    return [lists, lambda: _whole(device.load_job(slots, runs, NOW)), by_layers, a_layer_each]


def _whole(job: Job[Copied]) -> None:
    if job(Handle()) is not Copied.WHOLE:
        raise InvariantViolated("not copied whole")


class InstantDevice:
    """Driver, stream and pins of a device that has copied before it is asked."""

    def enter(self) -> None:
        return

    def fence(self) -> Event:
        return NOW

    def bring(self, rows: object, chosen: object) -> None:
        return

    def copy(self, spans: Spans) -> None:
        return

    def record(self) -> Event:
        return NOW

    def follow(self, event: Event) -> None:
        return

    def wait_idle(self) -> None:
        return

    def pin(self, mapping: HostMapping, is_over: Callable[[], bool]) -> bool:
        return False

    def used(self) -> AbstractContextManager[None]:
        return nullcontext()

    def let_go(self) -> None:
        return


def _instant(groups: Sequence[PagePlaces]) -> StreamedDevice:
    each = InstantDevice()
    return StreamedDevice(each, groups, (each, each), each)


def setting(case: Case) -> tuple[PagePlaces, np.ndarray, HostRows]:
    num_blocks, row_bytes = 4 * case.blocks, case.row_bytes
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


def _timed(action: Action) -> float:
    """CPU seconds a time, of so many that the clock can tell."""
    times = max(1, min(20, round(TIMED_SECONDS / max(_cpu_seconds(action, 1), 1e-9))))
    return _cpu_seconds(action, times) / times


def _cpu_seconds(action: Action, times: int) -> float:
    start = time.thread_time()
    for _ in range(times):
        action()
    return time.thread_time() - start


def _medians(samples: Sequence[Sample]) -> dict[str, float]:
    return {way: statistics.median(sample.page_ns(way) for sample in samples) for way in WAYS}


def markdown(found: Sequence[Sequence[Sample]]) -> str:
    lines = [
        f"| cache | pages | spans | {' | '.join(WAYS)} | floor |",
        f"|---|---:|---:|{'---:|' * len(WAYS)}---:|",
    ]
    for samples in found:
        case, floor_ns = samples[0].case, statistics.median(s.floor_ns for s in samples)
        cells = " | ".join(f"{ns:.1f}" for ns in _medians(samples).values())
        lines.append(
            f"| {case.name} | {case.pages} | {samples[0].spans} | {cells} | {floor_ns:.1f} |"
        )
    return "\n".join(lines)


def costs(found: Sequence[Sequence[Sample]]) -> list[str]:
    """A line for each case of one slot: what it costs a time, and a page more, as of the next."""
    lines = []
    for small, large in pairwise(found):
        few, many = small[0].case, large[0].case
        if few.blocks > PER_SLOT:
            continue
        parts = []
        for way in WAYS:
            least, most = (
                statistics.median(s.seconds[way] for s in each) for each in (small, large)
            )
            page = (most - least) / (many.pages - few.pages)
            parts.append(f"{way} {(least - page * few.pages) * 1e6:.0f} µs and {page * 1e9:.1f} ns")
        lines.append(f"{few.name}, a time and a page more: {', '.join(parts)}")
    return lines


def failures(found: Sequence[Sequence[Sample]]) -> list[str]:
    """A line for each case whose lists are above the bound."""
    return [
        f"NOT met: lists of {samples[0].case.name}: {ns:.1f} ns a page, at most {BOUND_NS:.0f}"
        for samples in found
        if (ns := _medians(samples)[WAYS[0]]) > BOUND_NS
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
    print(f"ns a page, {os.cpu_count()} cores of {processor()}", end="\n\n")
    print(markdown(found), end="\n\n")
    print(*costs(found), sep="\n", end="\n\n")
    failed = failures(found)
    print(*(failed or [f"all lists within {BOUND_NS:.0f} ns a page"]), sep="\n")
    if options.json:
        about = {
            "machine": platform.platform(),
            "processor": processor(),
            "cores": os.cpu_count(),
        }
        samples = [dataclasses.asdict(s) for samples in found for s in samples]
        options.json.write_text(json.dumps({"about": about, "samples": samples}, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
