"""How fast a GPU copies, each way that there is: measured at start, in scratch memory."""

from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, Final

import numpy as np
import torch

from kvstrata.transfer.cuda_driver import CudaDriver, faults
from kvstrata.transfer.cuda_place import numa_node
from kvstrata.transfer.cuda_streams import CudaStream
from kvstrata.transfer.cuda_ways import Ways, find_ways, is_rocm
from kvstrata.transfer.descriptors import Spans
from kvstrata.transfer.driver import DeviceFault
from kvstrata.transfer.selection import Measured, choose

__all__ = ["measure", "measure_here", "report"]

_TOTAL_BYTES: Final = 32 << 20
_MOST_PIECES: Final = 4096  # as many as copies are asked for at once
_REPETITIONS: Final = 5
_USUAL_PIECES: Final = (18 << 10, 64 << 10, 2 << 20)  # pages of MLA, of 8B, and its whole blocks


class _Everywhere:
    """What is measured is pinned."""

    def reaches(self, spans: Spans) -> bool:
        return len(spans.host) > 0


def measure(device: torch.device, ways: Ways, pieces: Sequence[int]) -> tuple[Ways, list[Measured]]:
    """Those *ways* that work, and their rates for *pieces* of such sizes; the kernel's for loads.

    If batches are refused, single copies are measured in their place.
    """
    with faults():
        cache = torch.empty(_TOTAL_BYTES, dtype=torch.uint8, device=device)
        host = torch.empty(_TOTAL_BYTES, dtype=torch.uint8, pin_memory=True)
    lists = [(each, _spans(cache.data_ptr(), host.data_ptr(), each)) for each in sorted({*pieces})]
    measured, why = _try(device, ways, lists, by_kernel=False)
    if why is not None and ways.batch is not None:
        ways = ways._replace(batch=None, notes=(*ways.notes, f"no {ways.batch.name}: {why}"))
        measured, why = _try(device, ways, lists, by_kernel=False)
    if why is not None:
        ways = ways._replace(notes=(*ways.notes, f"{ways.dma.name} fails: {why}"))
    if ways.kernel is None:
        return ways, measured
    by_kernel, why = _try(device, ways, lists, by_kernel=True)
    if why is None:
        return ways, measured + by_kernel
    return ways._replace(kernel=None, notes=(*ways.notes, f"no kernel: {why}")), measured


def _try(
    device: torch.device, ways: Ways, lists: Sequence[tuple[int, Spans]], *, by_kernel: bool
) -> tuple[list[Measured], str | None]:
    """Rates of one way, and why it has failed, if it has."""
    found: list[Measured] = []
    for is_load in (True,) if by_kernel else (True, False):
        stream = CudaStream(device, _Everywhere(), ways, is_load=is_load)
        stream.kernel_bytes = 1 << 62 if by_kernel else 0
        try:
            found += [
                Measured(by_kernel, is_load, size, _rate(stream, spans)) for size, spans in lists
            ]
        except DeviceFault as e:
            with suppress(DeviceFault):
                stream.wait_idle()  # its memory is about to be somebody else's
            return found, str(e)
    return found, None


def _spans(cache: int, host: int, piece_bytes: int) -> Spans:
    """Pieces of scratch memory, scattered on the device."""
    count = min(max(1, _TOTAL_BYTES // piece_bytes), _MOST_PIECES)
    at = np.arange(count, dtype=np.int64) * piece_bytes
    lengths = np.full(count, min(piece_bytes, _TOTAL_BYTES), np.int64)
    return Spans(cache + np.random.default_rng(0).permutation(at), host + at, lengths)


def _rate(stream: CudaStream, spans: Spans) -> float:
    """Bytes a second, the best of a few times. Raises ``DeviceFault``."""
    best = float("inf")
    for repetition in range(_REPETITIONS + 1):
        start = perf_counter()
        stream.copy(spans)
        stream.record().wait()
        if repetition:  # the first one compiles
            best = min(best, perf_counter() - start)
    return spans.total_bytes / best


def report(load_bytes: int, measured: Sequence[Measured], ways: Ways) -> str:
    """One sentence; *load_bytes* as ``choose`` gives it."""
    parts = []
    for is_load, what, limit in ((True, "loads", load_bytes), (False, "saves", 0)):
        dma = f"{ways.dma.name} ({_best(measured, is_load, by_kernel=False)})"
        kernel = f"kernel ({_best(measured, is_load, by_kernel=True)}) up to {limit} bytes, then "
        parts.append(f"{what} by {kernel if limit else ''}{dma}")
    return "; ".join([", ".join(parts), *ways.notes])


def _best(measured: Sequence[Measured], is_load: bool, *, by_kernel: bool) -> str:
    own = [m for m in measured if (m.is_load, m.by_kernel) == (is_load, by_kernel)]
    best = max((m.bytes_per_second for m in own), default=0.0)
    return f"{best / 2**30:.1f} GiB/s"


def measure_here(pieces: Sequence[int]) -> dict[str, Any]:
    """What this machine's first GPU would choose for *pieces* of such sizes, or for usual ones."""
    device = torch.device("cuda", 0)
    CudaDriver(device).enter()
    ways, measured = measure(device, find_ways(device), pieces or _USUAL_PIECES)
    node = numa_node(device, is_rocm=is_rocm())
    place = "" if node is None else f"; at NUMA node {node}"
    return {
        "gpu": torch.cuda.get_device_name(),
        "report": report(choose(measured), measured, ways) + place,
        "measured": [m._asdict() for m in measured],
    }
