"""The memory of the host tier: equal slots, each with a generation that names its owner."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import ConfigError
from kvstrata.core.units import human_bytes
from kvstrata.storage.mapping import HUGE_PAGE_BYTES, PAGE_BYTES, HostMapping, header_bytes
from kvstrata.storage.numa import prefer_node

__all__ = ["HostMemory", "HostUsage"]


@dataclass(frozen=True, slots=True)
class HostUsage:
    """How the bytes of a host tier are used."""

    backed_bytes: int  # have memory behind them; all of ``total_bytes`` once prefaulted
    total_bytes: int
    padding_bytes: int  # slots are whole pages: what blocks leave of them, in all slots

    @property
    def padding_share(self) -> float:
        """Fraction of the tier that can hold no block."""
        return self.padding_bytes / self.total_bytes


class HostMemory:
    """Slots in one memfd that the workers map.

    A slot is disowned before it gets a new owner: its generation grows. A process that copies
    from a slot and finds the generation it was told unchanged afterwards has copied what it was
    promised.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int,
        block_bytes: int,
        server_id: bytes,
        huge_pages: bool = False,
        numa_node: int | None = None,
    ) -> None:
        """*huge_pages*: of 2 MiB, from those that the kernel has set aside; *capacity_bytes* is all
        that it takes. *numa_node*: where the memory should come from; of huge pages those that
        ``prefault`` backs. Raises ``ConfigError`` if the machine has not got it.
        """
        if block_bytes < 1:
            raise ConfigError(f"a block of {block_bytes} bytes cannot be kept")
        slot_bytes = -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
        # Huge pages are counted out: the generation table comes out of the capacity too.
        page_bytes = HUGE_PAGE_BYTES if huge_pages else PAGE_BYTES
        table_bytes = header_bytes(capacity_bytes // slot_bytes, page_bytes) if huge_pages else 0
        room_bytes = capacity_bytes // page_bytes * page_bytes - table_bytes
        self.slots = room_bytes // slot_bytes
        if self.slots < 1:
            raise ConfigError(
                f"the host tier of {human_bytes(capacity_bytes)} holds no block: one takes "
                f"{human_bytes(slot_bytes + table_bytes)}",
                hint="raise the capacity of the host tier in `tiers`, for example host:8GiB; a number "
                "without a unit counts bytes",
            )
        self.block_bytes = block_bytes
        self.mapping = HostMapping.create(self.slots, slot_bytes, server_id, huge_pages=huge_pages)
        self._closed = threading.Event()
        if numa_node is not None:
            try:
                prefer_node([(self.mapping.address, self.mapping.total_bytes)], numa_node)
            except ConfigError:
                self.close()
                raise

    def disown(self, slots: NDArray[np.int32]) -> None:
        """What was promised of *slots*, which are pairwise different, no longer holds."""
        self.mapping.generations[slots] += 1

    def generations(self, slots: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Of *slots*."""
        return self.mapping.generations.take(slots)

    def view(self, slot: int) -> memoryview:
        """The ``block_bytes`` bytes of *slot*, writable."""
        return memoryview(self.mapping.data[slot])[: self.block_bytes]

    def usage(self) -> HostUsage:
        """How the bytes are used; once closed nothing is backed."""
        fd, total_bytes = self.mapping.fd, self.mapping.total_bytes
        return HostUsage(
            backed_bytes=os.fstat(fd).st_blocks * 512 if fd >= 0 else 0,
            total_bytes=total_bytes,
            padding_bytes=total_bytes - self.slots * self.block_bytes,
        )

    def prefault(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Back every page with memory now; raises ``ConfigError`` if there is not enough.

        Takes about 0.7 s a GiB, 0.1 s with huge pages, without the GIL; slots may be used
        meanwhile, and ``close`` ends it early. *progress* is called with the bytes done and the
        bytes in all: at first, and after every 64 MiB.
        """
        try:
            self.mapping.touch(self._closed, progress)
        except OSError as e:
            raise ConfigError(
                f"memory for the host tier ran out within {self.mapping.total_bytes} bytes: "
                f"{e.strerror}",
                hint="lower the capacity of the host tier in `tiers`",
            ) from e

    def close(self) -> None:
        self._closed.set()
        self.mapping.close()
