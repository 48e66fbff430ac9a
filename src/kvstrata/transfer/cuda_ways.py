"""The ways in which a GPU can copy: what its driver has, and what its kernels can reach."""

from typing import Final, NamedTuple, Protocol

import torch

from kvstrata.transfer.cuda_dma import BatchCopy, CopyCall, LoopCopy, batch_entry, loop_entry
from kvstrata.transfer.cuda_place import knows_host_addresses
from kvstrata.transfer.descriptors import Numbers

__all__ = ["Kernel", "Ways", "find_kernel", "find_ways", "is_rocm"]

_OWN_ADDRESSES: Final = "no kernel and no batches: host memory has other addresses on this GPU"


class Kernel(Protocol):
    """``cuda_triton.copy_by_kernel``."""

    def __call__(
        self, targets: Numbers, sources: Numbers, lengths: Numbers, device: torch.device
    ) -> None: ...


class Ways(NamedTuple):
    """What copies; all but the first for pinned memory alone."""

    single: CopyCall
    single_pinned: CopyCall
    batch: CopyCall | None = None
    kernel: Kernel | None = None
    notes: tuple[str, ...] = ()  # why one is missing

    @property
    def dma(self) -> CopyCall:
        """What the copy engines are asked with for pinned memory."""
        return self.single_pinned if self.batch is None else self.batch


def is_rocm() -> bool:
    return torch.version.hip is not None


def find_ways(device: torch.device) -> Ways:
    """Those of *device*. Raises ``DeviceFault`` if there is none.

    A kernel is given addresses of this process, which are not everywhere the GPU's own.
    """
    rocm = is_rocm()
    plain = loop_entry(is_rocm=rocm)
    single, single_pinned = (
        LoopCopy(plain, is_rocm=rocm, is_pinned=is_pinned) for is_pinned in (False, True)
    )
    if rocm:
        return Ways(single, single_pinned, notes=("no kernel: not on ROCm",))
    if not knows_host_addresses(device.index or 0):
        return Ways(single, single_pinned, notes=(_OWN_ADDRESSES,))
    entry, kernel = batch_entry(), find_kernel()
    batch = None if entry is None else BatchCopy(entry)
    notes = [] if kernel is not None else ["no kernel: triton is not installed"]
    return Ways(single, single_pinned, batch, kernel, tuple(notes))


def find_kernel() -> Kernel | None:
    """The copy kernel, if triton is installed."""
    try:
        from kvstrata.transfer.cuda_triton import copy_by_kernel
    except ImportError:
        return None
    return copy_by_kernel
