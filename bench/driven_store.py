"""The disk tier as the server drives it: a store behind the I/O threads, for benchmarks."""

import mmap
import random
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage.disk import DiskStore
from kvstrata.transfer.engine import WRITE_BATCH_BYTES, TransferEngine, TransferLimits

__all__ = ["DrivenStore"]

_NAMESPACE: Final = b"bench-disk".ljust(16)
_PATIENCE_SECONDS: Final = 600


class DrivenStore:
    """A full disk store behind the I/O threads of the server. Every byte that is read is checked."""

    def __init__(
        self,
        folder: Path,
        *,
        block_bytes: int,
        file_bytes: int,
        turn_bytes: int,
        depth: int,
        discard: bool = False,
    ) -> None:
        self._folder = folder
        self._block_bytes = block_bytes
        self._count = file_bytes // block_bytes
        self._store = DiskStore(
            [folder],
            block_bytes=block_bytes,
            capacity_bytes=self._count * (block_bytes + 4096),
            discard=discard,
            write_depth=depth,
        )
        if not self._store.direct:
            raise SystemExit(f"{folder} is on a file system without O_DIRECT: choose another")
        self._random = np.frombuffer(random.randbytes(block_bytes), np.uint64)
        self._digests: dict[StoreKey, bytes] = {}
        memory = memoryview(mmap.mmap(-1, turn_bytes))
        self._buffers = [
            memory[start : start + block_bytes] for start in range(0, turn_bytes, block_bytes)
        ]
        self._made = 0  # keys
        self._lock = threading.Lock()  # guards the next two
        self._to_write: list[tuple[list[StoreKey], list[StoreKey], list[memoryview]]] = []
        self._unwritten_blocks = 0
        self._written = threading.Event()
        self._engine = TransferEngine(
            self._store,
            self._write_some,
            block_bytes=block_bytes,
            limits=TransferLimits(read_threads=depth, write_threads=2 * depth),
        )
        while len(self._digests) < self._count:
            self._write(min(len(self._buffers), self._count - len(self._digests)), [])

    def read(self) -> float:
        """Bytes a second in random block order."""
        keys = random.sample(list(self._digests), len(self._buffers))
        for buffer in self._buffers:
            np.frombuffer(buffer, np.uint8).fill(0xEE)
        fates: dict[int, Read | None] = {}
        ended = threading.Event()
        lock = threading.Lock()

        def done(start: int, reads: Sequence[Read | None]) -> None:
            with lock:
                fates.update(enumerate(reads, start))
                if len(fates) == len(keys):
                    ended.set()

        started = time.perf_counter()
        self._engine.read(keys, self._buffers, done)
        if not ended.wait(_PATIENCE_SECONDS):
            raise SystemExit("the reads do not end")
        seconds = time.perf_counter() - started
        assert set(fates.values()) == {Read.HIT}
        for key, buffer in zip(keys, self._buffers, strict=True):
            if xxhash.xxh3_128_digest(buffer) != self._digests[key]:
                raise SystemExit(f"WRONG BYTES for key {key.hex()}")
        return len(keys) * self._block_bytes / seconds

    def write(self) -> float:
        """Bytes a second of new blocks in the place of randomly chosen old ones."""
        victims = random.sample(list(self._digests), len(self._buffers))
        for key in victims:
            del self._digests[key]
        return self._write(len(victims), victims)

    def close(self, *, delete: bool = True) -> None:
        """Stop the threads and close the store."""
        self._engine.close(_PATIENCE_SECONDS)
        self._store.close()
        if delete:
            shutil.rmtree(self._folder)

    def _write(self, count: int, victims: list[StoreKey]) -> float:
        keys = []
        for buffer in self._buffers[:count]:
            self._made += 1
            np.add(self._random, np.uint64(self._made), out=np.frombuffer(buffer, np.uint64))
            keys.append(_NAMESPACE + self._made.to_bytes(32, "big"))
            self._digests[keys[-1]] = xxhash.xxh3_128_digest(buffer)
        step = max(1, WRITE_BATCH_BYTES // self._block_bytes)
        parts = [slice(start, start + step) for start in range(0, count, step)]
        self._unwritten_blocks = count
        self._written.clear()
        self._to_write = [(victims[p], keys[p], self._buffers[p]) for p in reversed(parts)]
        started = time.perf_counter()
        self._engine.wake()
        if not self._written.wait(_PATIENCE_SECONDS):
            raise SystemExit("the writes do not end")
        return count * self._block_bytes / (time.perf_counter() - started)

    def _write_some(self) -> int:
        """As the server does it: make room for a batch, then write it."""
        with self._lock:
            if not self._to_write:
                return 0
            victims, keys, buffers = self._to_write.pop()
            if self._to_write:
                self._engine.wake()
            if victims:
                self._store.remove(victims)
        fates = self._store.write(keys, [None] * len(keys), buffers)
        assert set(fates) == {Write.STORED}, fates
        with self._lock:
            self._unwritten_blocks -= len(keys)
            if not self._unwritten_blocks:
                self._written.set()
        return len(keys) * self._block_bytes
