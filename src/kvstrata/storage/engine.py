"""StorageEngine: the storage of every tier, and the handles on it."""

import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from kvstrata.core.errors import ConfigError
from kvstrata.core.layout import (
    ElementType,
    KVCacheLayout,
    KVCacheLayoutType,
    KVGroup,
    group_offsets_bytes,
)
from kvstrata.core.limits import resolve_host_capacity
from kvstrata.core.remote_tiers import ObjectTier
from kvstrata.core.tiers import DiskTier, HostTier, LowestTier, SharedTier, Tier
from kvstrata.core.types import EXACT, BlockFormat
from kvstrata.core.units import human_bytes
from kvstrata.storage.compress import FRAME_OVERHEAD_BYTES, CompressedStore
from kvstrata.storage.device import Tensor, device_handle
from kvstrata.storage.disk import DiskStore
from kvstrata.storage.disk_directory import Reservation, check_directories
from kvstrata.storage.disk_lock import LOCK_NAME, lock_directory
from kvstrata.storage.disk_system import FileSystem
from kvstrata.storage.handles import DeviceType, StorageHandle
from kvstrata.storage.host import HostMemory
from kvstrata.storage.journal import JOURNAL_NAME
from kvstrata.storage.quantize import QuantizedStore, element_type_of, quantized_bytes
from kvstrata.storage.remote.open import open_remote
from kvstrata.storage.shared_fs import SharedFsStore
from kvstrata.storage.shared_fs_directory import check_directory
from kvstrata.storage.store import Store
from kvstrata.storage.superblock import SUPERBLOCK_NAME
from kvstrata.storage.wrap import ApartStore

__all__ = ["StorageEngine", "check_directories_of", "reserve_directories_of"]

_log = logging.getLogger(__name__)

_SMALL_OBJECT_BYTES: Final = 1 << 20
_KV_ELEMENT_BYTES: Final = 2  # bf16 and fp16; blocks of other types shrink less


class StorageEngine:
    """Allocates host memory and disk, takes in a remote store and device tensors, frees all.

    Host, disk and remote hold the same BLOCKWISE blocks of ``block_bytes``. Blocks of the device
    may be smaller, in tokens and heads, and of any layout.

    >>> from kvstrata.core.config import Config
    >>> block = KVCacheLayout(KVCacheLayoutType.BLOCKWISE, 32, 1, 16, 8, 128)
    >>> engine = StorageEngine(
    ...     [KVGroup(block, ElementType.BFLOAT16)], Config(tiers="host:64MiB").tiers
    ... )
    >>> host = engine.get_storage_handle(DeviceType.HOST)
    >>> host.capacity_blocks, len(host.data.view(31))
    (32, 2097152)
    >>> engine.close()
    """

    def __init__(
        self,
        block: Sequence[KVGroup] | int,
        tiers: Sequence[Tier],
        *,
        remote: Store | None = None,
        block_format: BlockFormat = EXACT,
        reservation: Reservation | None = None,
    ) -> None:
        """*block*: the KV groups of a block, or its bytes where nobody looks inside. How many
        blocks a tier holds is for *tiers* to say, not for ``num_block``.

        Disk and remote keep blocks in *block_format*: the stores of their handles hold frames of
        another length then, and ``as_blocks`` makes blocks of them.

        *remote* is a store to use as remote tier in place of that of *tiers*; once it is
        made the engine owns it, and closes it. *reservation* is what ``reserve_directories_of`` has
        given for *tiers*. Raises ``ConfigError`` where that cannot be, and
        then leaves nothing allocated.
        """
        self.groups = () if isinstance(block, int) else tuple(block)
        self.block_bytes = block if isinstance(block, int) else group_offsets_bytes(block)[-1]
        self._handles: dict[tuple[DeviceType, int], StorageHandle[Any]] = {}
        self._shared: SharedFsStore | None = None
        self._lossy = element_type_of(block_format)
        self._kept_bytes = (
            quantized_bytes(self.block_bytes, self._lossy) if self._lossy else self.block_bytes
        )
        _check_groups(self.groups)
        host = next((tier for tier in tiers if isinstance(tier, HostTier)), None)
        disk = next((tier for tier in tiers if isinstance(tier, DiskTier)), None)
        lowest = next((tier for tier in tiers if isinstance(tier, LowestTier)), None)
        if host is None:
            raise ConfigError(
                "there is no host tier: disk and remote blocks pass through host memory",
                hint="put a host tier first, as in host:8GiB | disk:/var/cache/kv:200GiB",
            )
        self._disk_paths = list(disk.paths) if disk is not None else []
        if remote is not None:
            _check_remote(remote, self._kept_bytes)
        with ExitStack() as undo:
            undo.callback(self.close)
            memory = HostMemory(
                capacity_bytes=_capacity_bytes(host),
                block_bytes=self.block_bytes,
                server_id=secrets.token_bytes(16),
                huge_pages=host.huge_pages,
                numa_node=host.numa_node,
            )
            self._add(DeviceType.HOST, memory, memory.slots)
            if disk is not None:
                store = open_disk(disk, self._kept_bytes, reservation)
                self._add(DeviceType.DISK, store, store.statistics().capacity_blocks)
            if lowest is not None and remote is None:
                remote = self._open_lowest(lowest, memory)
            undo.pop_all()
        if remote is not None:
            self._add(DeviceType.REMOTE, remote, remote.statistics().capacity_blocks)

    @property
    def host(self) -> StorageHandle[HostMemory]:
        return self.get_storage_handle(DeviceType.HOST)

    @property
    def disk(self) -> StorageHandle[DiskStore] | None:
        return self._handles.get((DeviceType.DISK, 0))

    @property
    def remote(self) -> StorageHandle[Store] | None:
        return self._handles.get((DeviceType.REMOTE, 0))

    def get_storage_handle(self, device_type: DeviceType, device_id: int = 0) -> StorageHandle[Any]:
        """The handle of a tier; ``ConfigError`` with those that exist if there is none."""
        try:
            return self._handles[device_type, device_id]
        except KeyError:
            found = ", ".join(f"{kind.value} {number}" for kind, number in self._handles) or "none"
            raise ConfigError(
                f"there is no storage on {device_type.value} {device_id}",
                hint=f"allocated or registered are: {found}",
            ) from None

    def register_device_blocks(
        self,
        tensors: Sequence[Tensor],
        layout: KVCacheLayout,
        device_id: int,
        dtype: ElementType,
    ) -> StorageHandle[tuple[Tensor, ...]]:
        """Take *tensors* by reference: one of all layers, or one for each layer.

        Raises ``ConfigError`` if they are not as *layout* and *dtype* say, or if a block of this
        engine is not made of whole blocks of theirs.
        """
        if (DeviceType.DEVICE, device_id) in self._handles:
            raise ConfigError(
                f"the KV cache of device {device_id} is registered already",
                hint="free it before another is registered",
            )
        handle = device_handle(tensors, layout, device_id, dtype)
        self._check_device_blocks(handle.groups[0])
        self._handles[DeviceType.DEVICE, device_id] = handle
        return handle

    def free(self, device_type: DeviceType, device_id: int = 0, *, unlink: bool = False) -> None:
        """Give the storage of a tier back; what is not there may be freed too.

        Host memory goes with the last view of it, stores are closed, tensors are let go. *unlink*
        deletes the files of a disk tier, and what they hold, for good. The host tier goes last:
        before those below it, that is a ``ConfigError``.
        """
        below = {DeviceType.DISK, DeviceType.REMOTE} & {kind for kind, _ in self._handles}
        if device_type is DeviceType.HOST and below:
            raise ConfigError(
                f"host memory is freed before {', '.join(sorted(kind.value for kind in below))}",
                hint="free what is below host memory first, or close the engine",
            )
        handle = self._handles.pop((device_type, device_id), None)
        if handle is not None and device_type is not DeviceType.DEVICE:
            handle.data.close()
        if handle is not None and device_type is DeviceType.DISK and unlink:
            for path in self._disk_paths:
                _unlink_files(path)

    def close(self) -> None:
        """Free everything; files stay on disk. May be called again."""
        for device_type, device_id in reversed(list(self._handles)):
            self.free(device_type, device_id)

    def as_blocks(self, store: Store) -> Store:
        """*store*, of a handle below host memory, as one of blocks."""
        if self._lossy is None:
            return store
        return QuantizedStore(store, self._lossy, block_bytes=self.block_bytes)

    def upkeep(self) -> None:
        """What the stores need done every few seconds, from one thread."""
        if self._shared is not None:
            self._shared.sweep()

    def _open_lowest(self, tier: LowestTier, memory: HostMemory) -> Store:
        kept_bytes = self._kept_bytes + (FRAME_OVERHEAD_BYTES if tier.compress else 0)
        store: Store
        if isinstance(tier, SharedTier):
            store = self._shared = SharedFsStore(
                tier.path, block_bytes=kept_bytes, capacity_bytes=tier.capacity
            )
        else:
            if isinstance(tier, ObjectTier) and kept_bytes < _SMALL_OBJECT_BYTES:
                _log.warning(
                    "objects of %s, and each costs a request: set tokens_per_block so that a block "
                    "is larger",
                    human_bytes(kept_bytes),
                )
            store = open_remote(tier, block_bytes=kept_bytes, memory=memory.mapping)
        if not tier.compress:
            return store
        try:
            return CompressedStore(ApartStore(store, b"compressed"), _KV_ELEMENT_BYTES)
        except ConfigError:
            store.close()
            raise

    def _add(self, device_type: DeviceType, data: object, capacity_blocks: int) -> None:
        self._handles[device_type, 0] = StorageHandle(
            device_type, 0, self.groups, self.block_bytes, capacity_blocks, data
        )

    def _check_device_blocks(self, of: KVGroup) -> None:
        if self.groups and not any(_is_made_of(group, of) for group in self.groups):
            raise ConfigError(
                f"no block of host memory is made of blocks of {of.layout} of {of.dtype.label}",
                hint="the layers, head size, kv dimension and element type must be equal, tokens "
                "and heads of a block in host memory a multiple of the device's",
            )


def check_directories_of(tiers: Sequence[Tier]) -> None:
    """Raise ``ConfigError`` where no block size would let a tier be opened; changes nothing."""
    for tier in tiers:
        if isinstance(tier, DiskTier):
            check_directories(tier.paths, tier.capacity)
        elif isinstance(tier, SharedTier):
            check_directory(tier.path)


def reserve_directories_of(tiers: Sequence[Tier]) -> Reservation | None:
    """Keep the disk tier, if there is one, for this process until it can be opened."""
    disk = next((tier for tier in tiers if isinstance(tier, DiskTier)), None)
    return Reservation(disk.paths) if disk is not None else None


def open_disk(
    tier: DiskTier, block_bytes: int, reservation: Reservation | None = None
) -> DiskStore:
    return DiskStore(
        tier.paths,
        block_bytes=block_bytes,
        capacity_bytes=tier.capacity,
        max_blocks_per_file=tier.max_blocks_per_file,
        discard=tier.discard,
        write_depth=tier.write_depth,
        reservation=reservation,
    )


def _unlink_files(directory: Path) -> None:
    """Delete the files of a closed disk store. Dying half-way leaves a store without blocks."""
    system = FileSystem()
    lock = lock_directory(system, directory, timeout_seconds=0)
    try:
        for pattern in (JOURNAL_NAME, "kvstrata_*.bin", SUPERBLOCK_NAME, LOCK_NAME):
            for file in directory.glob(pattern):
                file.unlink()
    finally:
        os.close(lock)


def _capacity_bytes(tier: HostTier) -> int:
    """Huge pages that are set aside do not count as available memory: mapping them tells."""
    if tier.huge_pages and tier.capacity != "auto":
        return tier.capacity
    return resolve_host_capacity(tier)


def _check_groups(groups: Sequence[KVGroup]) -> None:
    for group in groups:
        if group.layout.type is not KVCacheLayoutType.BLOCKWISE:
            raise ConfigError(
                f"blocks below the device are BLOCKWISE, not {group.layout.type.name}",
                hint="give the engine BLOCKWISE layouts, and register_device_blocks the device's",
            )


def _check_remote(store: Store, block_bytes: int) -> None:
    found = store.statistics()
    if found.block_bytes == block_bytes or (found.variable and found.block_bytes > block_bytes):
        return
    raise ConfigError(
        f"the remote tier holds blocks of {found.block_bytes} bytes, host memory of {block_bytes}",
        hint=f"open the remote store with block_bytes={block_bytes}",
    )


def _is_made_of(block: KVGroup, part: KVGroup) -> bool:
    """Whether some blocks of *part*, of several token runs or ranks, are one of *block*."""
    ours, theirs = block.layout, part.layout
    return (
        (ours.num_layer, ours.head_size, ours.is_mla, block.dtype)
        == (theirs.num_layer, theirs.head_size, theirs.is_mla, part.dtype)
        and ours.tokens_per_block % theirs.tokens_per_block == 0
        and ours.num_head % theirs.num_head == 0
    )
