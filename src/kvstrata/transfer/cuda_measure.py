"""How fast a GPU copies, each way that there is: measured in less than a second, at start.

    python -m kvstrata.transfer.cuda_measure [PIECE_BYTES ...]

prints it as JSON; `kvstrata doctor` asks it so.
"""

import json
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any, Final

import numpy as np
import torch

from kvstrata.transfer.cuda_dma import CopyCall, find_copy_call
from kvstrata.transfer.cuda_driver import faults
from kvstrata.transfer.cuda_streams import CudaStream, Kernel
from kvstrata.transfer.descriptors import Spans
from kvstrata.transfer.driver import DeviceFault
from kvstrata.transfer.selection import Choice, Measured, choose

__all__ = ["find_kernel", "is_rocm", "measure", "report"]

_TOTAL_BYTES: Final = 32 << 20
_MOST_PIECES: Final = 4096  # as many as copies are asked for at once
_REPETITIONS: Final = 5
_USUAL_PIECES: Final = (18 << 10, 64 << 10, 2 << 20)  # pages of MLA, of 8B, and its whole blocks


class _Everywhere:
    """What is measured is pinned."""

    def reaches(self, spans: Spans) -> bool:
        return len(spans.host) > 0


def is_rocm() -> bool:
    return torch.version.hip is not None


def find_kernel() -> Kernel | None:
    """The copy kernel, if triton is installed."""
    try:
        from kvstrata.transfer.cuda_triton import copy_by_kernel
    except ImportError:
        return None
    return copy_by_kernel


def measure(
    device: torch.device, copy_call: CopyCall, kernel: Kernel | None, pieces: Sequence[int]
) -> list[Measured]:
    """Rates of both ways and directions for *pieces* of such sizes, in scratch memory.

    A way that fails is left out.
    """
    with faults():
        cache = torch.empty(_TOTAL_BYTES, dtype=torch.uint8, device=device)
        host = torch.empty(_TOTAL_BYTES, dtype=torch.uint8, pin_memory=True)
    found = []
    for is_load in (True, False):
        stream = CudaStream(
            device, _Everywhere(), is_load=is_load, copy_call=copy_call, kernel=kernel
        )
        for by_kernel in (False, True) if kernel is not None else (False,):
            stream.kernel_bytes = 1 << 62 if by_kernel else 0
            for piece_bytes in sorted({*pieces}):
                spans = _spans(cache.data_ptr(), host.data_ptr(), piece_bytes)
                if (rate := _rate(stream, spans)) is not None:
                    found.append(Measured(by_kernel, is_load, piece_bytes, rate))
    return found


def _spans(cache: int, host: int, piece_bytes: int) -> Spans:
    """Pieces of scratch memory, scattered on the device."""
    count = min(max(1, _TOTAL_BYTES // piece_bytes), _MOST_PIECES)
    at = np.arange(count, dtype=np.int64) * piece_bytes
    lengths = np.full(count, min(piece_bytes, _TOTAL_BYTES), np.int64)
    return Spans(cache + np.random.default_rng(0).permutation(at), host + at, lengths)


def _rate(stream: CudaStream, spans: Spans) -> float | None:
    """Bytes a second, the best of a few times; None if it fails."""
    best = float("inf")
    try:
        for repetition in range(_REPETITIONS + 1):
            start = perf_counter()
            stream.copy(spans)
            stream.record().wait()
            if repetition:  # the first one compiles
                best = min(best, perf_counter() - start)
    except DeviceFault:
        return None
    return spans.total_bytes / best


def report(choice: Choice, measured: Sequence[Measured], name: str) -> str:
    """One sentence: *name* is that of the copy call."""
    parts = []
    for is_load, what, limit in (
        (True, "loads", choice.load_bytes),
        (False, "saves", choice.save_bytes),
    ):
        own = [m for m in measured if m.is_load is is_load]
        best = max((m.bytes_per_second for m in own), default=0.0)
        way = f"kernel up to {limit} bytes, then {name}" if limit else name
        parts.append(f"{what} by {way} ({best / 2**30:.1f} GiB/s)")
    return ", ".join(parts)


def _measured_here(pieces: Sequence[int]) -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise DeviceFault("torch finds no GPU")
    copy_call = find_copy_call(is_rocm=is_rocm())
    measured = measure(torch.device("cuda", 0), copy_call, find_kernel(), pieces)
    return {
        "gpu": torch.cuda.get_device_name(),
        "report": report(choose(measured), measured, copy_call.name),
        "measured": [m._asdict() for m in measured],
    }


def main(arguments: Sequence[str]) -> int:
    try:
        found = _measured_here([int(each) for each in arguments] or _USUAL_PIECES)
    except DeviceFault as e:
        found = {"problem": str(e)}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
