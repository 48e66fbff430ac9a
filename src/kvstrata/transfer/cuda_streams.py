"""One stream of a GPU, and the way of copying that suits each list of spans."""

from typing import Any, Protocol

import torch

from kvstrata.transfer.cuda_driver import CudaEvent, faults, new_stream
from kvstrata.transfer.cuda_ways import Kernel, Ways
from kvstrata.transfer.descriptors import Numbers, Spans
from kvstrata.transfer.driver import DeviceFault, Event

__all__ = ["CudaStream"]


class Reach(Protocol):
    """Which host memory is pinned."""

    def reaches(self, spans: Spans) -> bool: ...


class CudaStream:
    """A ``CopyStream``, for one direction.

    Spans of pinned memory of up to ``kernel_bytes`` on average are copied by the kernel.
    """

    def __init__(self, device: torch.device, reach: Reach, ways: Ways, *, is_load: bool) -> None:
        self._device = device
        self._reach = reach
        self._ways = ways
        self._is_load = is_load
        self.kernel_bytes = 0
        self._stream: Any = new_stream(device)

    def copy(self, spans: Spans) -> None:
        targets, sources = (
            (spans.device, spans.host) if self._is_load else (spans.host, spans.device)
        )
        is_pinned = self._reach.reaches(spans)
        is_small = spans.total_bytes <= self.kernel_bytes * len(spans.host)
        if is_pinned and is_small and self._ways.kernel is not None:
            self._copy_by(self._ways.kernel, targets, sources, spans.lengths_bytes)
            return
        call = self._ways.dma if is_pinned else self._ways.single
        call(targets, sources, spans.lengths_bytes, self._stream.cuda_stream)

    def record(self) -> Event:
        return CudaEvent(self._stream)

    def follow(self, event: Event) -> None:
        event.hold(self._stream)

    def wait_idle(self) -> None:
        with faults():
            self._stream.synchronize()

    def _copy_by(
        self, kernel: Kernel, targets: Numbers, sources: Numbers, lengths: Numbers
    ) -> None:
        """Triton compiles the kernel when it is first used, and raises what it likes."""
        try:
            with torch.cuda.stream(self._stream):
                kernel(targets, sources, lengths, self._device)
        except Exception as e:
            lines = str(e).splitlines() or ["no message"]
            why = lines[0 if isinstance(e, RuntimeError) else -1]  # a compiler begins with the code
            raise DeviceFault(f"the copy kernel has failed: {type(e).__name__}: {why}") from e
