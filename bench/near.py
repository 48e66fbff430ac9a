"""What it takes to tell the kernel which NUMA node one worker's share of every slot is to come from.

python bench/near.py                                       # seconds
"""

import time
from contextlib import closing
from typing import Final

from kvstrata.storage.mapping import HostMapping
from kvstrata.storage.near import bring_near
from kvstrata.storage.numa import memory_nodes

SLOTS: Final = 16384
SLOT_BYTES: Final = 256 << 10  # nothing is touched, so it takes no memory
REPETITIONS: Final = 5


def once() -> float:
    """Microseconds a slot, of the second of two workers."""
    with closing(HostMapping.create(SLOTS, SLOT_BYTES, b"bench")) as mapping:
        bring_near(mapping, 0, SLOT_BYTES // 2, memory_nodes()[0])
        start = time.perf_counter()
        bring_near(mapping, SLOT_BYTES // 2, SLOT_BYTES // 2, memory_nodes()[0])
        return (time.perf_counter() - start) / SLOTS * 1e6


if __name__ == "__main__":
    found = sorted(once() for _ in range(REPETITIONS))
    print(f"µs a slot, {SLOTS} slots, least to most: {', '.join(f'{each:.1f}' for each in found)}")
