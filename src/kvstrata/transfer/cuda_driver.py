"""A GPU as torch knows it, by CUDA or by ROCm, which answers to the same names.

torch is asked for streams and events only; what copies is in ``cuda_ways``.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvstrata.transfer.cuda_dma import driver_library
from kvstrata.transfer.cuda_ways import is_rocm
from kvstrata.transfer.driver import DeviceFault, Event

__all__ = ["CudaDriver", "CudaEvent", "faults", "new_stream", "register", "unregister"]

_PORTABLE: Final = 1  # CU_MEMHOSTREGISTER_PORTABLE, hipHostRegisterPortable


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
        self._arriving = new_stream(device)

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

    def bring(self, rows: NDArray[np.uint8], chosen: NDArray[np.int64]) -> Any:
        """As in ``Driver``: from pinned memory at the speed of the link."""
        shape = len(chosen), rows.shape[1]
        with faults():
            with torch.cuda.stream(self._arriving):
                there = torch.empty(shape, dtype=torch.uint8, device=self._device)
                for row, number in zip(there, chosen, strict=True):
                    row.copy_(torch.from_numpy(rows[number]), non_blocking=True)
            self._arriving.synchronize()
            there.record_stream(torch.cuda.current_stream(self._device))
        return there


def new_stream(device: torch.device) -> Any:
    """It waits for no other, and has the lowest priority that there is."""
    with faults():
        lowest, _ = torch.cuda.Stream.priority_range()
        return torch.cuda.Stream(device, priority=lowest)


def register(address: int, length_bytes: int) -> None:
    """Pin host memory, for this process and all its GPUs."""
    name = "hipHostRegister" if is_rocm() else "cuMemHostRegister_v2"
    _ask(name, ctypes.c_void_p(address), ctypes.c_size_t(length_bytes), _PORTABLE)


def unregister(address: int) -> None:
    """Undo ``register`` of the memory that begins at *address*."""
    name = "hipHostUnregister" if is_rocm() else "cuMemHostUnregister"
    _ask(name, ctypes.c_void_p(address))


def _ask(name: str, *arguments: Any) -> None:
    """The driver itself: the runtime keeps a refusal, and tells it of this thread's next kernel.

    Raises ``DeviceFault`` if it refuses.
    """
    with faults():
        torch.cuda.mem_get_info()  # the driver wants a context, which the runtime gives a thread
    library = driver_library(is_rocm=is_rocm())
    if status := getattr(library, name)(*arguments):
        if is_rocm():  # where both are one
            library.hipGetLastError()
        raise DeviceFault(f"{name} failed with GPU error {status}")
