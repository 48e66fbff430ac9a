"""A GPU as torch knows it, by CUDA or by ROCm, which answers to the same names.

torch is asked for streams and events only; ``cuda_dma`` and ``cuda_triton`` do the copying.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from kvstrata.transfer.driver import DeviceFault, Event

__all__ = ["CudaDriver", "CudaEvent", "faults", "low_priority_stream", "register", "unregister"]

_LOWEST_PRIORITY: Final = 0  # torch has none below it; larger numbers mean the same


@contextmanager
def faults() -> Iterator[None]:
    """What torch raises on account of the device, as our own."""
    try:
        yield
    except RuntimeError as e:  # torch.AcceleratorError is one
        raise DeviceFault(f"the GPU has failed: {str(e).splitlines()[0]}") from e


class CudaEvent:
    """A point in a stream. A thread that waits sleeps: it neither spins nor holds the GIL."""

    def __init__(self, stream: Any) -> None:
        with faults():
            self._event: Any = torch.cuda.Event(blocking=True)
            self._event.record(stream)

    def wait(self) -> None:
        with faults():
            self._event.synchronize()


class CudaDriver:
    """A ``Driver``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def enter(self) -> None:
        with faults():
            torch.cuda.set_device(self._device)

    def fence(self) -> Event:
        """As in ``Driver``: vLLM launches on the current stream of its thread."""
        with faults():
            return CudaEvent(torch.cuda.current_stream(self._device))


def low_priority_stream(device: torch.device) -> Any:
    """A new stream that waits for no other, and lets every other one pass."""
    with faults():
        return torch.cuda.Stream(device, priority=_LOWEST_PRIORITY)


def register(address: int, length_bytes: int) -> None:
    """Pin host memory, for this process and all its GPUs."""
    _check("cudaHostRegister", torch.cuda.cudart().cudaHostRegister(address, length_bytes, 0))


def unregister(address: int) -> None:
    """Undo ``register`` of the memory that begins at *address*."""
    _check("cudaHostUnregister", torch.cuda.cudart().cudaHostUnregister(address))


def _check(call: str, status: Any) -> None:
    if int(status):
        raise DeviceFault(f"{call} failed with CUDA error {int(status)}")
