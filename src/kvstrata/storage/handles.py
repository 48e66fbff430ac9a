"""What a tier of storage is to those who move blocks: a handle."""

import enum
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvstrata.core.layout import KVGroup

__all__ = ["DeviceType", "StorageHandle"]

T_co = TypeVar("T_co", covariant=True)


class DeviceType(enum.Enum):
    """Where a tier keeps its blocks."""

    DEVICE = "device"  # the engine's own KV cache
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True, eq=False)
class StorageHandle(Generic[T_co]):
    """Blocks of one tier, and what they are reached through.

    ``data`` is a ``HostMemory``, a ``Store`` (disk and remote), or the tuple of the tensors that
    were registered. It is of use until the handle is freed.
    """

    device_type: DeviceType
    device_id: int
    groups: tuple[KVGroup, ...]  # empty: nobody looks inside a block
    bytes_per_block: int
    capacity_blocks: int
    data: T_co
