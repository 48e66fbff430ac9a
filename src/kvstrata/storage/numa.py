"""NUMA nodes of this machine, what is near to them, and where memory should come from."""

import ctypes
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from kvstrata.core.errors import ConfigError

__all__ = ["cpus_near", "has_policy", "memory_nodes", "node_of_pci", "prefer_node"]

_MBIND: Final = {"x86_64": 237, "aarch64": 235}  # numbers of the system call
_GET_MEMPOLICY: Final = {"x86_64": 239, "aarch64": 236}
_MPOL_PREFERRED: Final = 1
_MPOL_F_ADDR: Final = 2  # of an address, not of this thread
_MASK_BITS: Final = 1024  # the most nodes a kernel can have
_NODES: Final = Path("/sys/devices/system/node")
_PCI_DEVICES: Final = Path("/sys/bus/pci/devices")


def memory_nodes(root: Path = _NODES) -> list[int]:
    """Nodes that have memory, ascending; node 0 alone where the kernel knows of none.

    *root* is the kernel's folder about nodes.
    """
    try:
        listed = (root / "has_memory").read_text().strip()
    except OSError:
        return [0]
    return [node for part in listed.split(",") if part for node in _range(part)]


def cpus_near(cpus: frozenset[int], root: Path = _NODES) -> frozenset[int]:
    """Return the processors of all nodes that have one of *cpus*; none if the kernel knows of none."""
    near: frozenset[int] = frozenset()
    for node in root.glob("node[0-9]*"):
        try:
            listed = (node / "cpulist").read_text().strip()
        except OSError:
            continue
        its_own = frozenset(cpu for part in listed.split(",") if part for cpu in _range(part))
        near |= its_own if its_own & cpus else frozenset()
    return near


def node_of_pci(address: str, root: Path = _PCI_DEVICES) -> int | None:
    """The node that the device at *address*, as in ``0000:65:00.0``, is attached to.

    None where the kernel does not know, as in many virtual machines.
    """
    try:
        node = int((root / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _range(part: str) -> range:
    """The whole numbers that ``3`` or ``0-2`` means."""
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


def has_policy(address: int) -> bool:
    """Whether somebody has said where the page at *address* should come from."""
    mode = ctypes.c_int(0)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        ctypes.c_long(_GET_MEMPOLICY.get(platform.machine(), -1)),
        ctypes.byref(mode),
        None,
        ctypes.c_ulong(0),
        ctypes.c_void_p(address),
        ctypes.c_ulong(_MPOL_F_ADDR),
    )
    return not failed and mode.value != 0


def prefer_node(ranges: Iterable[tuple[int, int]], node: int) -> None:
    """Take pages that have no memory yet from *node*, or elsewhere once it is full.

    *ranges* are addresses and lengths in bytes, of whole pages. For shared memory that holds for
    whoever touches a page first; of huge pages, for this process alone.
    Raises ``ConfigError`` if there is no such node, or the kernel refuses.
    """
    if node not in (known := memory_nodes()):
        raise ConfigError(
            f"there is no NUMA node {node} with memory here",
            hint=f"choose one of: {', '.join(map(str, known))}",
        )
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    for address, length_bytes in ranges:
        _prefer(libc, address, length_bytes, mask, node)


def _prefer(libc: ctypes.CDLL, address: int, length_bytes: int, mask: Any, node: int) -> None:
    failed = libc.syscall(
        ctypes.c_long(_MBIND.get(platform.machine(), -1)),
        ctypes.c_void_p(address),
        ctypes.c_ulong(length_bytes),
        ctypes.c_int(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(_MASK_BITS + 1),  # the kernel looks at one bit less
        ctypes.c_uint(0),
    )
    if failed:
        raise ConfigError(
            f"memory cannot be taken from NUMA node {node}: {os.strerror(ctypes.get_errno())}",
            hint="in a container allow the system call mbind (CAP_SYS_NICE), or choose no node",
        )
