"""A GPU as torch knows it, by CUDA or by ROCm, which answers to the same names.

torch is asked for streams and events only; what copies is in ``cuda_ways``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvstrata.transfer.driver import DeviceFault, Event

__all__ = ["CudaDriver", "CudaEvent", "faults", "new_stream", "register", "unregister"]


@contextmanager
def faults() -> Iterator[None]:
    """What torch raises on account of the device, as our own."""
    try:
        yield
    except RuntimeError as e:  # torch.AcceleratorError is one
        first = (str(e).splitlines() or [type(e).__name__])[0]
        raise DeviceFault(f"the GPU has failed: {first}") from e


class CudaEvent:
    """A point in a stream. A thread that waits sleeps: it neither spins nor holds the GIL."""

    def __init__(self, stream: Any) -> None:
        with faults():
            self._event: Any = torch.cuda.Event(blocking=True)
            self._event.record(stream)

    def wait(self) -> None:
        with faults():
            self._event.synchronize()

    def hold(self, stream: Any) -> None:
        with faults():
            stream.wait_event(self._event)


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

    def follow(self, event: Event) -> None:
        with faults():
            stream = torch.cuda.current_stream(self._device)
        event.hold(stream)


def new_stream(device: torch.device) -> Any:
    """It waits for no other, and has the priority of the engine's: none is lower."""
    with faults():
        return torch.cuda.Stream(device)


def register(address: int, length_bytes: int) -> None:
    """Pin host memory, for this process and all its GPUs."""
    _check("cudaHostRegister", torch.cuda.cudart().cudaHostRegister(address, length_bytes, 0))


def unregister(address: int) -> None:
    """Undo ``register`` of the memory that begins at *address*."""
    _check("cudaHostUnregister", torch.cuda.cudart().cudaHostUnregister(address))


def _check(call: str, status: Any) -> None:
    if int(status):
        raise DeviceFault(f"{call} failed with CUDA error {int(status)}")
