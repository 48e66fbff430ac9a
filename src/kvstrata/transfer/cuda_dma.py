"""Copies by the copy engines of a GPU: a whole list of spans in one call of the driver, or one each.

``cuMemcpyBatchAsync`` came with CUDA 12.8. It is called through its address, with the arrays as they
are: the Python function of cuda-bindings would take lists, and make them one number at a time. Of a
long list the GIL is released meanwhile: the driver has all of it to go through.
"""

import contextlib
import ctypes
import os
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstrata.transfer.descriptors import Numbers
from kvstrata.transfer.driver import DeviceFault

__all__ = [
    "BatchCopy",
    "CopyCall",
    "LoopCopy",
    "batch_entry",
    "driver_library",
    "loop_entry",
]

_BATCH_NAME: Final = b"cuMemcpyBatchAsync"
_BATCH_VERSION: Final = 12080  # the first, and of the signature below
_STREAM_ORDER: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read in the stream's turn
_DIRECTION_BY_ADDRESS: Final = 4  # hipMemcpyDefault
_FEW_SPANS: Final = 16  # a call for them is over before the GIL, once given away, is had again


class CopyCall(Protocol):
    """Asks a GPU for copies."""

    @property
    def name(self) -> str: ...

    def __call__(self, targets: Numbers, sources: Numbers, lengths: Numbers, stream: int) -> None:
        """Copy ``lengths[i]`` bytes from ``sources[i]`` to ``targets[i]``, some time later.

        *stream* is the driver's own name of one. Raises ``DeviceFault`` if the driver refuses.
        """
        ...


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_location_hint", _Location),
        ("target_location_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class BatchCopy:
    """All spans in one call."""

    name: Final = "batched DMA"
    ARGUMENTS: Final = (
        ctypes.c_void_p,  # targets
        ctypes.c_void_p,  # sources
        ctypes.c_void_p,  # lengths
        ctypes.c_size_t,  # how many
        ctypes.POINTER(_Attributes),
        ctypes.POINTER(ctypes.c_size_t),  # the first span that each of the attributes is for
        ctypes.c_size_t,  # how many attributes
        ctypes.POINTER(ctypes.c_size_t),  # the span that was refused
        ctypes.c_void_p,  # stream
    )

    def __init__(self, entry: int) -> None:
        """*entry*: the address of ``cuMemcpyBatchAsync``."""
        self._call = ctypes.CFUNCTYPE(ctypes.c_int, *self.ARGUMENTS)(entry)
        self._call_with_gil = ctypes.PYFUNCTYPE(ctypes.c_int, *self.ARGUMENTS)(entry)
        self._attributes = _Attributes(_STREAM_ORDER)
        self._first = ctypes.c_size_t(0)

    def __call__(self, targets: Numbers, sources: Numbers, lengths: Numbers, stream: int) -> None:
        columns = [np.ascontiguousarray(column) for column in (targets, sources, lengths)]
        refused = ctypes.c_size_t(0)
        call = self._call_with_gil if len(targets) <= _FEW_SPANS else self._call
        status = call(
            *(column.ctypes.data for column in columns),
            len(targets),
            ctypes.byref(self._attributes),
            ctypes.byref(self._first),
            1,
            ctypes.byref(refused),
            stream,
        )
        if status:
            raise DeviceFault(
                f"cuMemcpyBatchAsync refused {len(targets)} copies with CUDA error {status}"
            )


class LoopCopy:
    """A call for each span."""

    name: Final = "DMA, a call for each span"
    ARGUMENTS: Final = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    ARGUMENTS_OF_ROCM: Final = (*ARGUMENTS[:3], ctypes.c_int, ctypes.c_void_p)

    def __init__(self, entry: int, *, is_rocm: bool, is_pinned: bool) -> None:
        """*entry*: the address of ``cuMemcpyAsync`` or, with ROCm, of ``hipMemcpyAsync``.

        A call for pinned memory comes back at once, unless the driver's queue is full, and keeps the
        GIL: a busy thread would take it for 5 ms at every span. One for other memory waits for the
        copy, and releases it.
        """
        signature: Any = ctypes.PYFUNCTYPE if is_pinned else ctypes.CFUNCTYPE
        arguments = self.ARGUMENTS_OF_ROCM if is_rocm else self.ARGUMENTS
        self._call: Any = signature(ctypes.c_int, *arguments)(entry)
        self._direction = (_DIRECTION_BY_ADDRESS,) if is_rocm else ()

    def __call__(self, targets: Numbers, sources: Numbers, lengths: Numbers, stream: int) -> None:
        call, direction = self._call, self._direction
        for target, source, length in zip(*map(_as_ints, (targets, sources, lengths)), strict=True):
            if status := call(target, source, length, *direction, stream):
                raise DeviceFault(f"a copy of {length} bytes was refused with GPU error {status}")


def _as_ints(column: NDArray[np.int64]) -> list[int]:
    found: list[int] = column.tolist()
    return found


def batch_entry() -> int | None:
    """The address of ``cuMemcpyBatchAsync``; None without cuda-bindings or in an older driver."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    status, entry, _ = driver.cuGetProcAddress(_BATCH_NAME, _BATCH_VERSION, 0)
    return int(entry) if int(status) == 0 and int(entry) else None


def loop_entry(*, is_rocm: bool) -> int:
    """The address of the driver's plain copy. Raises ``DeviceFault`` if there is none."""
    library = driver_library(is_rocm=is_rocm)
    call = library.hipMemcpyAsync if is_rocm else library.cuMemcpyAsync
    return ctypes.cast(call, ctypes.c_void_p).value or 0


def driver_library(*, is_rocm: bool) -> ctypes.CDLL:
    """The driver's own library, which torch has loaded. Raises ``DeviceFault`` if there is none."""
    names = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")
    for mode in (os.RTLD_NOLOAD, ctypes.DEFAULT_MODE):  # another HIP would be a second runtime
        for name in names if is_rocm else ("libcuda.so.1",):
            with contextlib.suppress(OSError):
                return ctypes.CDLL(name, mode)
    raise DeviceFault("the driver's library of this GPU cannot be loaded")
