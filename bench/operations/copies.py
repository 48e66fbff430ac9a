"""Hot paths of bytes on their way: descriptors of device copies, batches of the disk tier."""

import contextlib
import mmap
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Final

from bench.descriptors import Case, setting
from bench.operations.cache import NAMESPACE, random_keys
from bench.operations.count import Count

from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage.disk import DiskStore

__all__ = ["descriptors", "disk_read", "disk_write"]

_BATCH_BLOCKS: Final = 32
_BLOCK_BYTES: Final = 128 << 10
_STORE_BLOCKS: Final = 8 * _BATCH_BLOCKS


def descriptors(count: Count, *, blocks_outermost: bool) -> Generator[None]:
    """Of 1024 device blocks of 32 layers in 64 slots."""
    case = Case("8B", 32, 65536, 1024, blocks_outermost=blocks_outermost)
    places, blocks, rows = setting(case)
    while True:
        count(places.spans, blocks, rows)
        yield


def disk_write(count: Count) -> Generator[None]:
    """Of a batch of new blocks, in the place of older ones once the store is full."""
    with _disk() as (store, buffers):
        batches: list[list[StoreKey]] = []
        for turn in range(1 << 20):
            batches.append(_keys(turn))
            if len(batches) * _BATCH_BLOCKS > _STORE_BLOCKS:
                store.remove(batches.pop(0))
            fates = count(store.write, batches[-1], [None] * _BATCH_BLOCKS, buffers)
            assert set(fates) == {Write.STORED}
            yield


def disk_read(count: Count) -> Generator[None]:
    """Of a batch of blocks that were written together."""
    with _disk() as (store, buffers):
        keys = _keys(0)
        store.write(keys, [None] * _BATCH_BLOCKS, buffers)
        while True:
            fates = count(store.read_into, keys, buffers)
            assert set(fates) == {Read.HIT}
            yield


@contextlib.contextmanager
def _disk() -> Iterator[tuple[DiskStore, list[memoryview]]]:
    """A store, and buffers of a batch that lie as host slots do: page-aligned, side by side."""
    memory = memoryview(mmap.mmap(-1, _BATCH_BLOCKS * _BLOCK_BYTES))
    buffers = [memory[i * _BLOCK_BYTES :][:_BLOCK_BYTES] for i in range(_BATCH_BLOCKS)]
    with tempfile.TemporaryDirectory() as folder:
        capacity_bytes = _STORE_BLOCKS * (_BLOCK_BYTES + 4096)
        store = DiskStore(
            [Path(folder, "store")], block_bytes=_BLOCK_BYTES, capacity_bytes=capacity_bytes
        )
        with contextlib.closing(store):
            yield store, buffers


def _keys(seed: int) -> list[StoreKey]:
    return [NAMESPACE + key.tobytes() for key in random_keys(seed, _BATCH_BLOCKS)]
