"""Hot paths of the tiers below host memory: promotions, and batches through all that is put around a store."""

import contextlib
import mmap
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Final, Literal

from bench.operations.cache import NAMESPACE, random_keys
from bench.operations.count import Count
from bench.operations.valkey_peer import ValkeyPeer

from kvstrata.core.config import Config
from kvstrata.core.keys import KeyArray
from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.manager.manager import KVManager
from kvstrata.manager.tasks import TaskState, TaskStatus
from kvstrata.storage.store import Store

__all__ = ["promotion", "shared_write", "valkey_read", "valkey_write"]

_BLOCK_BYTES: Final = 4096
_PROMPT_BLOCKS: Final = 64
_BATCH_BLOCKS: Final = 32
_PATIENCE_SECONDS: Final = 60


def promotion(count: Count, tier: Literal["disk", "shared"]) -> Generator[None]:
    """Of a prompt that another has driven out of host memory: ``get_match``, the search where *tier*
    has to be asked, and the read.
    """
    prompts = random_keys(0, _PROMPT_BLOCKS), random_keys(1, _PROMPT_BLOCKS)
    with _manager(tier) as manager:
        for prompt in prompts:
            task = manager.put_match(NAMESPACE, prompt)
            manager.launch([task.task_id])
            manager.complete([task.task_id])
            assert all(lower.drain(_PATIENCE_SECONDS) for lower in manager._lower.values())
        promote = _Promotions(count, manager)
        for turn in range(1 << 20):
            status = promote(prompts[turn % 2])
            assert len(status.slots) == _PROMPT_BLOCKS
            manager.launch([status.task_id])
            manager.complete([status.task_id])
            yield


class _Promotions:
    """Has each step counted on its own thread."""

    def __init__(self, count: Count, manager: KVManager) -> None:
        self._count, self._manager = count, manager
        self._told: list[TaskStatus] = []
        self._ended = threading.Event()
        for lower in manager._lower.values():
            for owner, name in ((lower._finder, "_find"), (lower._transfer, "_read_part")):
                setattr(owner, name, self._counted(getattr(owner, name)))

    def __call__(self, keys: KeyArray) -> TaskStatus:
        self._told.clear()
        self._ended.clear()
        self._count(self._manager.get_match, NAMESPACE, keys, settled=self._told.append)
        assert self._ended.wait(_PATIENCE_SECONDS)
        return self._told[-1]

    def _counted(self, step: Callable[..., None]) -> Callable[..., None]:
        def counted(*args: Any) -> None:
            self._count(step, *args)
            if self._told and self._told[-1].state is TaskState.READY:
                self._ended.set()

        return counted


def shared_write(count: Count) -> Generator[None]:
    """Of a batch of new blocks."""
    with _manager("shared") as manager:
        yield from _write(count, manager._lower["remote"]._store)


def valkey_write(count: Count) -> Generator[None]:
    """Likewise."""
    with ValkeyPeer(_BLOCK_BYTES) as peer, _manager("valkey", peer.store) as manager:
        yield from _write(count, manager._lower["remote"]._store)


def valkey_read(count: Count) -> Generator[None]:
    """Of a batch of blocks."""
    with ValkeyPeer(_BLOCK_BYTES) as peer, _manager("valkey", peer.store) as manager:
        store = manager._lower["remote"]._store
        next(_write(Count(), store))
        buffers = _buffers()
        while True:
            fates = count(store.read_into, _keys(0), buffers)
            assert set(fates) == {Read.HIT}
            yield


def _write(count: Count, store: Store) -> Generator[None]:
    buffers = _buffers()
    for turn in range(1 << 20):
        fates = count(store.write, _keys(turn), [None] * _BATCH_BLOCKS, buffers)
        assert set(fates) == {Write.STORED}
        yield


@contextlib.contextmanager
def _manager(
    tier: Literal["disk", "shared", "valkey"], remote: Store | None = None
) -> Iterator[KVManager]:
    """With host memory for one prompt, and *tier* below it, of which *remote* is the store if given."""
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder, "store"))
        below = {
            "disk": [{"kind": "disk", "paths": place, "capacity": "16MiB"}],
            "shared": [{"kind": "shared", "path": place, "capacity": "1GiB"}],
            "valkey": [],
        }
        host = {"kind": "host", "capacity": f"{_PROMPT_BLOCKS * _BLOCK_BYTES // 1024}KiB"}
        config = Config.model_validate(
            {
                "tiers": [host, *below[tier]],
                "prefault": False,
                "recompute": "never",
                "remote_lookup_seconds": _PATIENCE_SECONDS,
            }
        )
        with contextlib.closing(
            KVManager(config, block_bytes=_BLOCK_BYTES, remote=remote)
        ) as manager:
            yield manager


def _keys(seed: int) -> list[StoreKey]:
    return [NAMESPACE + key.tobytes() for key in random_keys(seed, _BATCH_BLOCKS)]


def _buffers() -> list[memoryview]:
    memory = memoryview(mmap.mmap(-1, _BATCH_BLOCKS * _BLOCK_BYTES))
    return [memory[i * _BLOCK_BYTES :][:_BLOCK_BYTES] for i in range(_BATCH_BLOCKS)]
