"""Small caches whose blocks are a function of their keys."""

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstrata.core.config import Config
from kvstrata.core.keys import ABSENT, as_key_array
from kvstrata.core.types import NAMESPACE_ID_BYTES, BlockKey, NamespaceId, StoreKey
from kvstrata.index.places import HOST, NO_SLOT
from kvstrata.manager.manager import KVManager
from kvstrata.manager.tasks import TaskStatus

BLOCK_BYTES = 4096
ALICE: NamespaceId = b"alice".ljust(16, b".")
BOB: NamespaceId = b"bob".ljust(16, b".")
PATIENCE_SECONDS = 20.0  # only a broken cache takes that long


def config(slots: int, disk: Path | None = None, disk_slots: int = 64, **changes: object) -> Config:
    """*slots* blocks of 4 KiB in host memory, *disk_slots* on disk if there is one.

    *eviction* and *write*, if given, are those of every tier; *shared* is a directory below them.
    """
    chosen = {"eviction": changes.pop("eviction", "lru")}
    written = {"write": changes.pop("write", "saved")}
    tiers = [{"kind": "host", "capacity": f"{slots * 4}KiB"} | chosen]
    if disk is not None:
        room = {"kind": "disk", "paths": str(disk), "capacity": f"{disk_slots * 8}KiB"}
        tiers.append(room | chosen | written)
    if (shared := changes.pop("shared", None)) is not None:
        tiers.append({"kind": "shared", "path": str(shared), "capacity": "1MiB"} | written)
    return Config.model_validate({"tiers": tiers, "prefault": False} | changes)


def key(*path: int) -> BlockKey:
    """The block at the end of *path*: like a chained hash it names all before it."""
    return hashlib.sha256(repr(path).encode()).digest()


def keys(*path: int) -> list[BlockKey]:
    """The blocks along *path*, first to last."""
    return [key(*path[: i + 1]) for i in range(len(path))]


def content(namespace: NamespaceId, block: BlockKey) -> bytes:
    return hashlib.sha256(namespace + block).digest() * (BLOCK_BYTES // 32)


def write(
    manager: KVManager, task: TaskStatus, namespace: NamespaceId, asked: Sequence[BlockKey]
) -> None:
    """What the workers do for a put."""
    for slot, i in zip(task.slots, task.missing, strict=True):
        manager.view(slot)[:] = content(namespace, asked[i])


def save(
    manager: KVManager,
    namespace: NamespaceId,
    asked: Sequence[BlockKey],
    *,
    parent: BlockKey | None = None,
    owner: int = 0,
    prompt_blocks: int = 0,
) -> TaskStatus:
    """A whole put: reserve, copy, complete."""
    task = manager.put_match(
        namespace, asked, parent=parent, owner=owner, prompt_blocks=prompt_blocks
    )
    if task.task_id:
        manager.launch([task.task_id], owner=owner)
        write(manager, task, namespace, asked)
        manager.complete([task.task_id], owner=owner)
    return task


def load(
    manager: KVManager, namespace: NamespaceId, asked: Sequence[BlockKey], *, owner: int = 0
) -> list[bytes]:
    """A whole get: the bytes of the prefix of *asked* that the cache gives back."""
    task = manager.get_match(namespace, asked, owner=owner)
    if not task.task_id:
        return []
    task = manager.wait([task.task_id], PATIENCE_SECONDS)[task.task_id]
    manager.launch([task.task_id], owner=owner)
    found = [bytes(manager.view(slot)) for slot in task.slots]
    manager.complete([task.task_id], owner=owner)
    return found


def contents(namespace: NamespaceId, asked: Sequence[BlockKey]) -> list[bytes]:
    return [content(namespace, block) for block in asked]


def generation_of(manager: KVManager, slot: int) -> int:
    return int(manager.memory.mapping.generations[slot])


def known(manager: KVManager) -> dict[StoreKey, int]:
    """Every block that the index knows, in whatever tier, and its leases."""
    index = manager._cache.index
    blocks: dict[StoreKey, int] = {}
    with manager._lock:
        for ids in index.ids():
            blocks |= zip(index.store_keys(ids), index.leases[ids].tolist(), strict=True)
    return blocks


def host_slot(manager: KVManager, block: StoreKey) -> int:
    """Where *block* is in host memory; below 0 if it is not."""
    index, number = manager._cache.index, NAMESPACE_ID_BYTES
    found = int(index.find(block[:number], as_key_array([block[number:]]))[0])
    here = found != ABSENT and int(index.where[found]) & HOST
    return int(index.host_slot[found]) if here else NO_SLOT


def reads_running(manager: KVManager) -> int:
    """Blocks on their way up."""
    return len(manager._gets._reads.arrivals)


def eventually(true: Callable[[], bool], what: str) -> None:
    """Wait until *true*; fails with *what* if it never is."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)  # another thread or process has to act
