"""Copies of a GPU beside an engine's work: what its kernels lose, and what copies lose to its Python.

`make gpu` runs it; see docs/gpu.md.
"""

import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from itertools import cycle
from typing import Any, Final, NamedTuple

import torch
from bench.gpu import GEOMETRIES, Action, Bed, Company, Geometry, copies, synchronize, timed
from bench.gpu_rows import Row

from kvstrata.core.errors import InvariantViolated

__all__ = ["busy_rows", "busy_thread", "rows", "slowdown"]

REPETITIONS: Final = 7
PRODUCTS_SECONDS: Final = 0.05  # of each measurement: time for many slots


class _Beside(NamedTuple):
    """Products of matrices, and the copies that ran meanwhile."""

    ratio: float  # of their time to that without copies
    seconds: float
    copied_bytes: int


def slowdown(
    geometry: Geometry, device: torch.device, total_bytes: int, size: int
) -> Iterator[Row]:
    """What products of bfloat16 matrices take beside copies, over what they take alone.

    Saves are those of an engine whose steps run. Raises ``InvariantViolated`` if no slot was copied
    while products ran: such a ratio would tell nothing.
    """
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(left, left)

    timed(partial(products, 3), device)  # warms up
    each_seconds = timed(partial(products, 3), device) / 3
    enough = partial(products, max(1, round(PRODUCTS_SECONDS / each_seconds)))
    with closing(Bed(geometry, device, total_bytes)) as bed:
        for is_load in (True, False):
            samples = [_measure(bed, enough, is_load=is_load) for _ in range(REPETITIONS)]
            copied_bytes = statistics.median(sample.copied_bytes for sample in samples)
            kind = "loads" if is_load else "saves"
            if not copied_bytes:
                raise InvariantViolated(f"{kind} of {geometry.name} wait for what they run beside")
            rate = statistics.median(sample.copied_bytes / sample.seconds for sample in samples)
            told = f"{copied_bytes / 2**20:.0f} MiB meanwhile, {rate / 2**30:.1f} GiB/s"
            note = "; ".join([told, *bed.remarks(is_load=is_load)])
            ratio = statistics.median(sample.ratio for sample in samples)
            what = f"matrix products beside {kind}, {geometry.name}: time"
            yield Row(what, ratio, 1.03, is_most=True, note=note)


def _measure(bed: Bed, products: Action, *, is_load: bool) -> _Beside:
    device = bed.cache.device
    alone = _compute_seconds(products, device)
    with _copying(bed, is_load=is_load) as times:
        seconds = _compute_seconds(products, device)
        over = time.perf_counter()
    slots = sum(over - seconds <= began and ended <= over for began, ended in times)
    return _Beside(seconds / alone, seconds, slots * bed.slot_row_bytes)


def _compute_seconds(action: Action, device: torch.device) -> float:
    """What *action* takes on the stream of this thread, by the device's own clock if it has one."""
    if device.type == "cpu":
        return timed(action, device)
    synchronize(device)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    action()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


@contextmanager
def _copying(bed: Bed, *, is_load: bool) -> Iterator[list[tuple[float, float]]]:
    """Slots of *bed* are copied in turn, on another thread; when each was begun and had ended."""
    over = threading.Event()
    times: list[tuple[float, float]] = []

    def run() -> None:
        with _own_stream(bed.cache.device):
            for slot in cycle(range(bed.slots)):
                if over.is_set():
                    return
                bed.device.step_begins()
                began = time.perf_counter()
                bed.copy(is_load=is_load, slot=slot)
                times.append((began, time.perf_counter()))

    with ThreadPoolExecutor(1) as pool:
        copier = pool.submit(run)
        try:
            yield times
        finally:
            over.set()
        copier.result()


def _own_stream(device: torch.device) -> AbstractContextManager[Any]:
    """What this thread launches is on no other one's stream: its copies wait for that alone."""
    if device.type == "cpu":
        return nullcontext()
    stream: AbstractContextManager[Any] = torch.cuda.stream(torch.cuda.Stream(device))
    return stream


@contextmanager
def busy_thread() -> Iterator[Company]:
    """A thread that runs Python while copies are made, and leaves the interpreter to no other.

    An engine's thread does so between its calls of the driver. The interpreter is handed over as
    soon as a worker on a GPU makes it.
    """
    works, over = threading.Event(), threading.Event()

    def run() -> None:
        while works.wait() and not over.is_set():
            while works.is_set() and not over.is_set():
                pass

    @contextmanager
    def at_work() -> Iterator[None]:
        works.set()
        try:
            yield
        finally:
            works.clear()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield Company(", beside a busy thread", at_work, bound=None)
    finally:
        over.set()
        works.set()
        thread.join()


def rows(device: torch.device, total_bytes: int, size: int = 8192) -> Iterator[Row]:
    """Those with a bound; matrices are (size, size)."""
    for geometry in GEOMETRIES[::2]:  # layers outermost: the smallest pieces
        yield from slowdown(geometry, device, total_bytes, size)


def busy_rows(device: torch.device, total_bytes: int) -> Iterator[Row]:
    """Those that are only told."""
    with busy_thread() as company:  # each copy may take a hundred times as long
        yield from copies(GEOMETRIES[1], device, total_bytes // 4, company)
