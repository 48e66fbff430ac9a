"""NUMA nodes of this machine, and the one that memory should come from."""

import ctypes
import os
import platform
from pathlib import Path
from typing import Final

from kvstrata.core.errors import ConfigError

__all__ = ["memory_nodes", "prefer_node"]

_MBIND: Final = {"x86_64": 237, "aarch64": 235}  # numbers of the system call
_MPOL_PREFERRED: Final = 1
_MASK_BITS: Final = 1024  # the most nodes a kernel can have
_NODES: Final = Path("/sys/devices/system/node")


def memory_nodes(root: Path = _NODES) -> list[int]:
    """Nodes that have memory, ascending; node 0 alone where the kernel knows of none.

    *root* is the kernel's folder about nodes.
    """
    try:
        listed = (root / "has_memory").read_text().strip()
    except OSError:
        return [0]
    return [node for part in listed.split(",") if part for node in _range(part)]


def _range(part: str) -> range:
    """The whole numbers that ``3`` or ``0-2`` means."""
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


def prefer_node(address: int, length_bytes: int, node: int) -> None:
    """Take the pages there that have no memory yet from *node*, or elsewhere once it is full.

    For shared memory that holds for whoever touches a page first; of huge pages, for this process
    alone. Both are of whole pages.
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
