"""Where in this machine a GPU is: which NUMA node it is nearest to, and whose addresses it knows."""

import ctypes
from typing import Final

import torch

from kvstrata.storage.numa import node_of_pci
from kvstrata.transfer.cuda_dma import driver_library
from kvstrata.transfer.driver import DeviceFault

__all__ = ["knows_host_addresses", "numa_node", "pci_address"]

_LONGEST = 32
_HOST_ADDRESSES: Final = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM


def numa_node(device: torch.device, *, is_rocm: bool) -> int | None:
    """The node that *device* is attached to; None where the machine does not tell."""
    address = pci_address(device.index or 0, is_rocm=is_rocm)
    return None if address is None else node_of_pci(address)


def pci_address(index: int, *, is_rocm: bool) -> str | None:
    """As in ``0000:65:00.0``, of the GPU that this process knows as *index*."""
    try:
        library = driver_library(is_rocm=is_rocm)
    except DeviceFault:
        return None
    text = ctypes.create_string_buffer(_LONGEST)
    if is_rocm:
        failed = library.hipDeviceGetPCIBusId(text, _LONGEST, index)
    else:
        device = ctypes.c_int()
        failed = library.cuDeviceGet(ctypes.byref(device), index)
        failed = failed or library.cuDeviceGetPCIBusId(text, _LONGEST, device)
    return None if failed else text.value.decode().lower()


def knows_host_addresses(index: int) -> bool:
    """Whether kernels of GPU *index* reach pinned memory by the addresses that it has here.

    Of CUDA; elsewhere, and where the driver does not tell, they are taken not to.
    """
    try:
        library = driver_library(is_rocm=False)
    except DeviceFault:
        return False
    device, found = ctypes.c_int(), ctypes.c_int()
    failed = library.cuDeviceGet(ctypes.byref(device), index)
    failed = failed or library.cuDeviceGetAttribute(ctypes.byref(found), _HOST_ADDRESSES, device)
    return not failed and found.value == 1
