"""The memory of the host tier: equal slots, each with a generation that names its owner."""

import os

from kvstrata.core.errors import ConfigError
from kvstrata.storage.mapping import HostMapping, header_bytes

_PREFAULT_STEP_BYTES = 64 << 20


class HostMemory:
    """Slots in one memfd that the workers map.

    A slot is disowned before it gets a new owner: its generation grows. A process that copies
    from a slot and finds the generation it was told unchanged afterwards has copied what it was
    promised.
    """

    def __init__(self, *, capacity_bytes: int, block_bytes: int, server_id: bytes) -> None:
        slot_bytes = -(-block_bytes // 4096) * 4096
        self.slots = capacity_bytes // slot_bytes
        if self.slots < 1:
            raise ConfigError(
                f"the host tier of {capacity_bytes} bytes holds no block: one takes {slot_bytes}",
                hint="raise the capacity of the host tier in `tiers`",
            )
        self.block_bytes = block_bytes
        self.mapping = HostMapping.create(self.slots, slot_bytes, server_id)

    def disown(self, slot: int) -> None:
        """What was promised of *slot* no longer holds."""
        self.mapping.generations[slot] += 1

    def generation(self, slot: int) -> int:
        return int(self.mapping.generations[slot])

    def view(self, slot: int) -> memoryview:
        """The ``block_bytes`` bytes of *slot*, writable."""
        return memoryview(self.mapping.data[slot])[: self.block_bytes]

    def prefault(self) -> None:
        """Back every page with memory now; raises ``ConfigError`` if there is not enough.

        Takes about 0.7 s a GiB, without the GIL; slots may be used meanwhile.
        """
        total = header_bytes(self.slots) + self.mapping.data.nbytes
        fd = os.dup(self.mapping.fd)
        try:
            for start in range(0, total, _PREFAULT_STEP_BYTES):
                os.posix_fallocate(fd, start, min(_PREFAULT_STEP_BYTES, total - start))
        except OSError as e:
            raise ConfigError(
                f"memory for the host tier ran out within {total} bytes: {e.strerror}",
                hint="lower the capacity of the host tier in `tiers`",
            ) from e
        finally:
            os.close(fd)

    def close(self) -> None:
        self.mapping.close()
