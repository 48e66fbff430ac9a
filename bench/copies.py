"""Copies between an engine's paged KV cache on the CPU and host slots, beside plain memcpy.

    python bench/copies.py [--quick] [--json FILE]

Every copy is made as a worker makes it: laid out over slots, generations checked, page by page.
Right before it, numpy copies as many bytes in one piece between the same two kinds of memory. The
ratio of the two is what counts. See bench/README.md.
"""

import argparse
import dataclasses
import json
import os
import platform
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np

from kvstrata.core.layout import ElementType, KVCacheLayout, KVCacheLayoutType
from kvstrata.storage.mapping import HostMapping
from kvstrata.transfer.cpu import CpuPageCopier, pages_of
from kvstrata.transfer.device import Bytes
from kvstrata.transfer.guarded import Copied, RankSlots, Run, load_job, save_job, split_runs
from kvstrata.transfer.lanes import Handle

__all__ = ["Case", "Sample", "cases", "failures", "markdown", "ratio"]

KIB: Final = 1 << 10
LAYERS: Final = 32
PER_SLOT: Final = 4  # device blocks in a slot
BOUNDS: Final = {16: 0.65, 64: 0.80}  # least ratio, by KiB of a page
DIRECTIONS: Final = ("save", "load")  # device to host, host to device
PARTS: Final = {"whole": 0, "part": 1}  # device blocks of a slot that are left out at its start
ORDERS: Final = ("in order", "random")  # of the device blocks
CHECKED_BYTES: Final = 16 << 20  # before anything is timed, byte by byte
CACHE_ALIGNMENT: Final = 64  # bytes; what torch gives a tensor

CACHES: Final = {
    "layers outermost": "one allocation, a page of K and V for each layer (vLLM's LBHNC)",
    "K and V apart": "an allocation for each layer, (2, blocks, tokens, heads, elements)",
    "scattered": "the same, the allocations at irregular distances",
    "blocks outermost": "one allocation, a block's layers side by side (vLLM's BLHNC)",
}
BY_LAYER: Final = ("K and V apart", "scattered")


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to copy."""

    cache: str
    page_kib: int
    direction: str
    part: str
    order: str


@dataclasses.dataclass(frozen=True)
class Sample:
    """A copy and the memcpy right before it, in seconds of CPU."""

    case: Case
    repetition: int
    seconds: float
    memcpy_seconds: float


def cases() -> Iterator[Case]:
    """Every case, those that share their memory one after the other."""
    for fields in product(CACHES, BOUNDS, DIRECTIONS, PARTS, ORDERS):
        yield Case(*fields)


def ratio(samples: Sequence[Sample]) -> float:
    """Share of memcpy's speed: the median of the pairs."""
    return statistics.median(s.memcpy_seconds / s.seconds for s in samples)


def markdown(samples: Sequence[Sample], total_bytes: int) -> str:
    """A line for each case: GiB/s of both by their medians, and the ratio of the pairs."""
    lines = [
        "| cache | page | direction | slots | blocks | GiB/s | memcpy | ratio | least |",
        "|---|---:|---|---|---|---:|---:|---:|---:|",
    ]
    for case, measured in _by_case(samples).items():
        speeds = [
            total_bytes / statistics.median(seconds) / 2**30
            for seconds in ([s.seconds for s in measured], [s.memcpy_seconds for s in measured])
        ]
        lines.append(
            f"| {case.cache} | {case.page_kib} KiB | {case.direction} | {case.part} | {case.order} "
            f"| {speeds[0]:.1f} | {speeds[1]:.1f} | {ratio(measured):.2f} "
            f"| {BOUNDS[case.page_kib]:.2f} |"
        )
    return "\n".join(lines)


def failures(samples: Sequence[Sample]) -> list[str]:
    """A line for each case below its bound."""
    return [
        f"NOT met: {case}: {ratio(measured):.2f}, least {BOUNDS[case.page_kib]:.2f}"
        for case, measured in _by_case(samples).items()
        if ratio(measured) < BOUNDS[case.page_kib]
    ]


def _by_case(samples: Sequence[Sample]) -> dict[Case, list[Sample]]:
    found: dict[Case, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.case, []).append(sample)
    return found


# -- the memory ------------------------------------------------------------------------------


class Bed:
    """A paged cache of one shape, slots for *total_bytes* of it, and plain memory beside both."""

    def __init__(self, cache: str, page_kib: int, total_bytes: int) -> None:
        page_bytes = page_kib * KIB
        pages_of_block = LAYERS * (2 if cache in BY_LAYER else 1)
        self.row_bytes = page_bytes * pages_of_block
        self.rows = total_bytes // self.row_bytes
        self.blocks = self.rows * 3 // 2  # so that random ones are not all there are
        self.pages = _pages(cache, page_bytes, self.blocks)
        for page in self.pages:
            page[:] = np.random.default_rng(0).integers(0, 256, page.shape, np.uint8)
        slots = -(-self.rows // (PER_SLOT - max(PARTS.values())))
        self.mapping = HostMapping.create(slots, PER_SLOT * self.row_bytes, b"bench")
        self.mapping.touch(threading.Event())
        self.slots = RankSlots(self.mapping, 0, (PER_SLOT * self.row_bytes,), (0,))
        self.copier = CpuPageCopier(self.pages)
        self.plain = _aligned(self.rows * self.row_bytes)  # what memcpy copies to and from
        self.plain[:] = 1

    def job(self, case: Case) -> Callable[[], None]:
        """The whole copy of *case*."""
        make = save_job if case.direction == "save" else load_job
        runs = self.runs(case)
        job = make([self.copier], self.slots, runs)

        def copy() -> None:
            if job(Handle()) is not Copied.WHOLE:
                raise RuntimeError(f"{case} was not copied whole")

        return copy

    def memcpy(self, case: Case) -> Callable[[], None]:
        host = self.mapping.data.reshape(-1)[: self.plain.nbytes]
        ends = (host, self.plain) if case.direction == "save" else (self.plain, host)
        return lambda: np.copyto(*ends)

    def runs(self, case: Case) -> list[Run]:
        """A run for each slot, the first device blocks of it left out if only a part is copied."""
        chosen = list(range(self.rows))
        if case.order == "random":
            chosen = random.Random(0).sample(range(self.blocks), self.rows)
        offset = PARTS[case.part]
        step = PER_SLOT - offset
        runs = []
        for slot, start in enumerate(range(0, self.rows, step)):
            blocks = [*[-1] * offset, *chosen[start : start + step]]
            blocks += [-1] * (PER_SLOT - len(blocks))
            runs += split_runs(blocks, [(slot, 0)], per_slot=(PER_SLOT,), absent=-1)
        return runs

    def check(self, case: Case) -> None:
        """Fill the target of *case* with dirt, copy, and compare every byte."""
        source = [page.copy() for page in self.pages]
        slots = self.mapping.data
        if case.direction == "save":
            slots[:] = 0xAA
        else:
            self.job(dataclasses.replace(case, direction="save"))()
            for page in self.pages:
                page[:] = 0xAA
        self.job(case)()
        for run in self.runs(case):
            rows = self.slots.rows(run, self.row_bytes)
            for block, row in zip(run.device_blocks, rows, strict=True):
                original = np.concatenate([page[block] for page in source])
                copied = row if case.direction == "save" else self._row(block)
                if not np.array_equal(copied, original):
                    raise RuntimeError(f"{case}: device block {block} arrived with other bytes")
        for page, original in zip(self.pages, source, strict=True):
            page[:] = original

    def close(self) -> None:
        self.mapping.close()

    def _row(self, block: int) -> Bytes:
        return np.concatenate([page[block] for page in self.pages])


def _pages(cache: str, page_bytes: int, blocks: int) -> list[Bytes]:
    """The pages of a cache of *LAYERS* layers; the elements of a page are bytes here."""
    byte = ElementType.UINT8
    if cache in BY_LAYER:
        layer = KVCacheLayout(KVCacheLayoutType.LAYERWISE, 1, blocks, 1, 1, page_bytes)
        total = layer.total_bytes(byte)
        gaps = [4096 * i * i if cache == "scattered" else 0 for i in range(LAYERS)]
        tensors = [_aligned(total + gap)[:total] for gap in gaps]
        return [page for tensor in tensors for page in pages_of(tensor, layer, byte)]
    kind = "LAYERBLOCK" if cache == "layers outermost" else "BLOCKWISE"
    whole = KVCacheLayout(KVCacheLayoutType[kind], LAYERS, blocks, 1, 1, page_bytes, is_mla=True)
    return pages_of(_aligned(whole.total_bytes(byte)), whole, byte)


def _aligned(count: int) -> Bytes:
    """*count* bytes that begin like those of a large tensor, just behind the start of a page."""
    raw = np.empty(count + 2 * 4096, np.uint8)
    start = -raw.ctypes.data % 4096 + CACHE_ALIGNMENT
    return raw[start : start + count]


# -- the run ---------------------------------------------------------------------------------


def measure(repetitions: int, total_bytes: int) -> list[Sample]:
    from rich.console import Console
    from rich.progress import Progress

    samples = []
    every = list(cases())
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("copying", total=len(every) * (repetitions + 1))
        for cache, page_kib in product(CACHES, BOUNDS):
            own = [case for case in every if (case.cache, case.page_kib) == (cache, page_kib)]
            with closing(Bed(cache, page_kib, CHECKED_BYTES)) as small:
                for case in own:
                    small.check(case)
            with closing(Bed(cache, page_kib, total_bytes)) as bed:
                for repetition, case in product(range(repetitions + 1), own):
                    memcpy_seconds = _timed(bed.memcpy(case))
                    samples.append(Sample(case, repetition, _timed(bed.job(case)), memcpy_seconds))
                    progress.advance(task)
    return [sample for sample in samples if sample.repetition > 0]  # 0 warms up


def _timed(action: Callable[[], None]) -> float:
    """CPU seconds of *action*: what else runs on the machine does not count."""
    start = time.thread_time()
    action()
    return time.thread_time() - start


def to_json(options: argparse.Namespace, samples: Sequence[Sample]) -> str:
    about = {
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "repetitions": options.repetitions,
        "total_bytes": options.mib << 20,
        "layers": LAYERS,
    }
    rows = [dataclasses.asdict(sample) for sample in samples]
    return json.dumps({"about": about, "samples": rows}, indent=1)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Copies of KV pages, beside memcpy.")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="5 repetitions")
    parser.add_argument("--mib", type=int, default=128, help="MiB copied at once; default 128")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement")
    options = parser.parse_args(arguments)
    if options.mib < 4 or options.mib % 4:
        parser.error(f"--mib {options.mib}: a row is up to 4 MiB, give a multiple of that")
    if options.quick:
        options.repetitions = 5
    return options


def main() -> int:
    options = parse(sys.argv[1:])
    samples = measure(options.repetitions, options.mib << 20)
    print(markdown(samples, options.mib << 20), end="\n\n")
    failed = failures(samples)
    print(*(failed or ["every ratio is at least its bound"]), sep="\n")
    if options.json:
        options.json.write_text(to_json(options, samples) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
