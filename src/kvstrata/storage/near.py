"""Host memory for one GPU from its own NUMA node: its worker's share of every slot.

The pool is one memory for all GPUs of a machine, so it cannot be near to each of them as a whole.
But where pages come from is told to the kernel range by range, and holds for whoever touches them
first: the server, most often. What has memory already stays where it is.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvstrata.core.errors import ConfigError
from kvstrata.storage.mapping import PAGE_BYTES, HostMapping
from kvstrata.storage.numa import has_policy, prefer_node

__all__ = ["bring_near"]

_SLOTS_AT_A_TIME: Final = (
    8192  # ranges of other nodes are mappings to the kernel: 65,530 are allowed
)
_MAY_MOVE: Final = 1  # MREMAP_MAYMOVE


def bring_near(mapping: HostMapping, start_bytes: int, length_bytes: int, node: int) -> bool:
    """Take those bytes of every slot from *node*, or elsewhere once it is full; whole pages only.

    Returns whether that was asked of the kernel: not of huge pages, of which each process decides
    for itself, and not where somebody has chosen already. Raises ``ConfigError`` if it refuses.
    """
    first = -(-start_bytes // PAGE_BYTES) * PAGE_BYTES
    end = min(start_bytes + length_bytes, mapping.slot_bytes) // PAGE_BYTES * PAGE_BYTES
    data = int(mapping.data.ctypes.data)
    if mapping.page_bytes != PAGE_BYTES or first >= end or has_policy(data + first):
        return False
    stride, slots = mapping.slot_bytes, mapping.slots
    for done in range(0, slots, _SLOTS_AT_A_TIME):
        count = min(_SLOTS_AT_A_TIME, slots - done)
        with _mapped_again(data + done * stride, count * stride) as address:
            if end - first == stride:
                prefer_node([(address, count * stride)], node)
            else:
                prefer_node(
                    ((address + i * stride + first, end - first) for i in range(count)), node
                )
    return True


@contextmanager
def _mapped_again(address: int, length_bytes: int) -> Iterator[int]:
    """The shared memory there at another address meanwhile, so that the mapping stays in one piece."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mremap.restype = ctypes.c_void_p
    length = ctypes.c_size_t(length_bytes)
    again = libc.mremap(ctypes.c_void_p(address), ctypes.c_size_t(0), length, _MAY_MOVE)
    if again in {None, ctypes.c_void_p(-1).value}:
        raise ConfigError(f"the host tier cannot be mapped again: error {ctypes.get_errno()}")
    try:
        yield again
    finally:
        libc.munmap(ctypes.c_void_p(again), length)
