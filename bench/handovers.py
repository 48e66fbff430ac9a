"""What copies of a GPU cost the thread that launches an engine's kernels, by taking the interpreter.

    python -m bench.handovers [--repetitions 9] [--json FILE]

No GPU is needed: the link is played, at the speed of PCIe 5, by events that arrive when as many
bytes would have. All else is what a worker runs: its jobs, chunks and pauses, a call of C for each
chunk, the interpreter handed over as on a GPU. Beside them another thread calls small operations of
torch, as an engine does that launches kernels, and what it loses for each GiB is told.
"""

import argparse
import ctypes
import json
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from bench.descriptors import InstantDevice

from kvstrata.bench.record import processor
from kvstrata.core.errors import InvariantViolated
from kvstrata.core.interpreter import hand_over_sooner
from kvstrata.storage.mapping import HostMapping
from kvstrata.transfer.cuda_dma import BatchCopy
from kvstrata.transfer.descriptors import PagePlace, PagePlaces, Spans
from kvstrata.transfer.devices import NOW
from kvstrata.transfer.driver import Event
from kvstrata.transfer.guarded import Copied, RankSlots, split_runs
from kvstrata.transfer.lanes import Handle
from kvstrata.transfer.streamed import StreamedDevice

__all__ = ["CASES", "Case", "Sample", "markdown", "measure"]

_BYTES_PER_SECOND: Final = 50 << 30
_LAYERS: Final = 32
_PAGE_BYTES: Final = 64 << 10  # of 16 tokens of an 8B
_BLOCK_BYTES: Final = _LAYERS * _PAGE_BYTES
_PER_SLOT: Final = 4  # device blocks
_SLOTS: Final = 64
_JOB_SLOTS: Final = 2  # 16 MiB, as a worker splits saves
_OPERATIONS: Final = 200  # between two looks whether a step is over
_STEP_SECONDS: Final = 0.005
_MEASURED_SECONDS: Final = 0.3  # of each measurement


class Case(NamedTuple):
    name: str
    is_load: bool
    blocks_outermost: bool


CASES: Final = tuple(
    Case(f"{'loads' if is_load else 'saves'}, {order} outermost", is_load, order == "blocks")
    for order in ("blocks", "layers")
    for is_load in (False, True)
)


class Sample(NamedTuple):
    """Of one measurement: the engine's operations a second, alone and beside copies."""

    alone: float
    beside: float
    copied_bytes: int
    seconds: float

    @property
    def lost_ms_a_gib(self) -> float:
        """Of the engine's thread."""
        lost = self.seconds * (1 - self.beside / self.alone)
        return lost * 1e3 / (self.copied_bytes / 2**30)


class _Link(InstantDevice):
    """Its copies take their time, and nothing else does."""

    def __init__(self) -> None:
        entry = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value
        assert entry is not None
        self._call = BatchCopy(entry)  # it returns 0 and looks at no argument
        self._free_at = 0.0
        self.copied_bytes = 0

    def copy(self, spans: Spans) -> None:
        self._call(*spans, 0)
        total_bytes = spans.total_bytes
        begins = max(self._free_at, time.perf_counter())
        self._free_at = begins + total_bytes / _BYTES_PER_SECOND
        self.copied_bytes += total_bytes

    def record(self) -> Event:
        return _Arrival(self._free_at)


class _Arrival:
    def __init__(self, at: float) -> None:
        self._at = at

    def wait(self) -> None:
        if (left := self._at - time.perf_counter()) > 0:
            time.sleep(left)  # as a thread that waits for an event sleeps

    def hold(self, stream: Any) -> None:
        return


def measure(case: Case, repetitions: int) -> list[Sample]:
    """The sides are taken in turn, A B B A; the first pair warms up."""
    samples = []
    for repetition in range(repetitions + 1):
        alone = _engine(None)[0]
        beside, copied_bytes, seconds = _beside(case)
        again = _beside(case)
        alone_again = _engine(None)[0]
        if repetition:
            samples += [
                Sample(alone, beside, copied_bytes, seconds),
                Sample(alone_again, *again),
            ]
    return samples


def _beside(case: Case) -> tuple[float, int, float]:
    link = _Link()
    device = StreamedDevice(link, [_places(case)], (link, link), link)
    with _copying(device, case):
        before = link.copied_bytes
        rate, seconds = _engine(device)
        return rate, link.copied_bytes - before, seconds


def _engine(device: StreamedDevice | None) -> tuple[float, float]:
    """Operations a second of a thread that launches them, in steps, and how long it did."""
    one, other = torch.ones(8), torch.ones(8)
    done, began = 0, time.perf_counter()
    step_over = now = began
    while now - began < _MEASURED_SECONDS:
        if device is not None and now >= step_over:
            device.step_begins()
            step_over = now + _STEP_SECONDS
        for _ in range(_OPERATIONS):
            torch.add(one, other, out=one)
        done += _OPERATIONS
        now = time.perf_counter()
    return done / (now - began), now - began


@contextmanager
def _copying(device: StreamedDevice, case: Case) -> Iterator[None]:
    """Job after job, on another thread."""
    over = threading.Event()
    slot_bytes = _PER_SLOT * _BLOCK_BYTES
    with closing(HostMapping.create(_SLOTS, slot_bytes, b"bench")) as mapping:
        slots = RankSlots(mapping, 0, (slot_bytes,), (0,))
        blocks = np.random.default_rng(0).permutation(_SLOTS * _PER_SLOT).tolist()
        runs = split_runs(
            blocks, [(slot, 0) for slot in range(_SLOTS)], per_slot=(_PER_SLOT,), absent=-1
        )
        pieces = [runs[i : i + _JOB_SLOTS] for i in range(0, len(runs), _JOB_SLOTS)]
        make = device.load_job if case.is_load else device.save_job
        failed: list[object] = []

        def run() -> None:
            for piece in cycle([runs] if case.is_load else pieces):
                if over.is_set():
                    return
                if (copied := make(slots, piece, NOW)(Handle())) is not Copied.WHOLE:
                    failed.append(copied)
                    return

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        if failed:
            raise InvariantViolated("not copied whole")


def _places(case: Case) -> PagePlaces:
    blocks = _SLOTS * _PER_SLOT
    if case.blocks_outermost:
        starts, stride = [i * _PAGE_BYTES for i in range(_LAYERS)], _BLOCK_BYTES
    else:
        starts, stride = [i * blocks * _PAGE_BYTES for i in range(_LAYERS)], _PAGE_BYTES
    base = 1 << 40  # of addresses, which nobody follows
    return PagePlaces([PagePlace(base + start, stride, _PAGE_BYTES) for start in starts], blocks)


def markdown(found: Sequence[tuple[Case, Sequence[Sample]]]) -> str:
    lines = [
        "| copies | GiB/s | the engine's thread, over alone | it loses for each GiB |",
        "|---|---:|---:|---:|",
    ]
    for case, samples in found:
        rate = statistics.median(s.copied_bytes / 2**30 / s.seconds for s in samples)
        pace = statistics.median(s.beside / s.alone for s in samples)
        lost = statistics.median(s.lost_ms_a_gib for s in samples)
        lines.append(f"| {case.name} | {rate:.1f} | {pace:.2f} | {lost:.1f} ms |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="What copies cost the engine's thread.")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement")
    options = parser.parse_args()
    if options.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    torch.set_num_threads(1)
    hand_over_sooner()
    found = [(case, measure(case, options.repetitions)) for case in CASES]
    print(f"{os.cpu_count()} cores of {processor()}", end="\n\n")
    print(markdown(found))
    if options.json:
        samples = [case._asdict() | s._asdict() for case, each in found for s in each]
        options.json.write_text(json.dumps(samples, indent=1) + "\n")


if __name__ == "__main__":
    main()
