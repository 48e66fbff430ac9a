"""The device blocks of an engine on a GPU: of CUDA, or of ROCm, which torch calls by that name too."""

import logging
from collections.abc import Sequence
from typing import Any

from kvstrata.core.interpreter import hand_over_sooner
from kvstrata.transfer.cuda_driver import CudaDriver, register, unregister
from kvstrata.transfer.cuda_measure import measure, report
from kvstrata.transfer.cuda_place import numa_node
from kvstrata.transfer.cuda_streams import CudaStream
from kvstrata.transfer.cuda_ways import find_ways, is_rocm
from kvstrata.transfer.descriptors import PagePlace, PagePlaces
from kvstrata.transfer.driver import DeviceFault
from kvstrata.transfer.pinning import HostPins
from kvstrata.transfer.selection import Measured, choose
from kvstrata.transfer.streamed import StreamedDevice
from kvstrata.transfer.streams import ONE_BY_ONE, CopyLimits

__all__ = ["open_device"]

_log = logging.getLogger(__name__)


def open_device(pages: Sequence[Sequence[Any]]) -> StreamedDevice:
    """*pages* as in ``kvstrata.transfer.devices.open_device``.

    Measures how this GPU copies, which takes less than a second once the kernel is compiled, and
    says what it has chosen. From then on all threads of the process hand the interpreter over
    sooner. Raises ``DeviceFault`` if nothing can be copied at all.
    """
    hand_over_sooner()
    device = pages[0][0].device
    driver = CudaDriver(device)
    driver.enter()
    groups = [PagePlaces([_place(page) for page in group], len(group[0])) for group in pages]
    sizes = {p for group in groups for p in (*group.page_bytes, group.device_block_bytes)}
    ways, measured = find_ways(device), list[Measured]()
    try:
        ways, measured = measure(device, ways, sorted(sizes))
    except DeviceFault as e:
        _log.warning("how this GPU copies cannot be measured: %s", e)
    load_bytes = choose(measured)
    _log.info("copies of %s: %s", device, report(load_bytes, measured, ways))
    pins = HostPins(register, unregister)
    loads, saves = (CudaStream(device, pins, ways, is_load=is_load) for is_load in (True, False))
    loads.kernel_bytes = load_bytes
    near = numa_node(device, is_rocm=is_rocm())
    limits = ONE_BY_ONE if ways.batch is None else CopyLimits()
    return StreamedDevice(driver, groups, (loads, saves), pins, limits, numa_node=near)


def _place(page: Any) -> PagePlace:
    return PagePlace(page.data_ptr(), page.stride(0), page.shape[1])
