"""One stream of a GPU, and the way of copying that suits each list of spans."""

from typing import Any, Protocol

import torch

from kvstrata.transfer.cuda_dma import CopyCall
from kvstrata.transfer.cuda_driver import CudaEvent, faults, low_priority_stream
from kvstrata.transfer.descriptors import Numbers, Spans
from kvstrata.transfer.driver import Event

__all__ = ["CudaStream", "Kernel"]


class Kernel(Protocol):
    """``cuda_triton.copy_by_kernel``."""

    def __call__(
        self, targets: Numbers, sources: Numbers, lengths: Numbers, device: torch.device
    ) -> None: ...


class Reach(Protocol):
    """Which host memory a kernel may touch."""

    def reaches(self, spans: Spans) -> bool: ...


class CudaStream:
    """A ``CopyStream``, for one direction.

    Spans of up to ``kernel_bytes`` on average are copied by the kernel, if it reaches them.
    """

    def __init__(
        self,
        device: torch.device,
        reach: Reach,
        *,
        is_load: bool,
        copy_call: CopyCall,
        kernel: Kernel | None,
    ) -> None:
        self._device = device
        self._reach = reach
        self._is_load = is_load
        self._copy_call = copy_call
        self._kernel = kernel
        self.kernel_bytes = 0
        self._stream: Any = low_priority_stream(device)

    def copy(self, spans: Spans) -> None:
        targets, sources = (
            (spans.device, spans.host) if self._is_load else (spans.host, spans.device)
        )
        if self._kernel is not None and self._suits_kernel(spans):
            with faults(), torch.cuda.stream(self._stream):
                self._kernel(targets, sources, spans.lengths_bytes, self._device)
        else:
            self._copy_call(targets, sources, spans.lengths_bytes, self._stream.cuda_stream)

    def record(self) -> Event:
        return CudaEvent(self._stream)

    def _suits_kernel(self, spans: Spans) -> bool:
        is_small = spans.total_bytes <= self.kernel_bytes * len(spans.host)
        return is_small and self._reach.reaches(spans)
