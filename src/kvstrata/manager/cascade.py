"""The disk below host memory: blocks go down in the background and come up on demand."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvstrata.core.errors import TierUnavailable
from kvstrata.core.types import NamespaceId, Read, StoreKey, Write
from kvstrata.index.prefix_index import Entry
from kvstrata.manager.report import TierReport
from kvstrata.manager.residency import Residency
from kvstrata.observe import metrics
from kvstrata.storage.disk import DiskStore
from kvstrata.storage.wrap import BreakerStore
from kvstrata.transfer.engine import TransferEngine

_log = logging.getLogger(__name__)

_WRITE_BATCH_BYTES: Final = 32 << 20  # some parts for each of the threads that write
_DRAIN_POLL_SECONDS: Final = 0.005
_FORGET_SECONDS: Final = 5.0  # for the batch that is on its way to disk


class Cascade:
    """Writes every block of host memory through to disk, and reads blocks back.

    *lock* guards *cache* and is not held over I/O.
    """

    def __init__(
        self,
        disk: DiskStore,
        cache: Residency,
        lock: threading.Condition,
        counters: metrics.Counters,
    ) -> None:
        self._disk = disk
        self._cache = cache
        self._lock = lock
        self._counters = counters
        self._block_bytes = disk.statistics().block_bytes
        self._store = BreakerStore(disk)
        self._write_lock = threading.Lock()  # held while a batch is on its way to disk
        self._owed_removals: list[StoreKey] = []  # left the index, and the disk refused to hear it
        self._owed_drops: list[NamespaceId] = []
        cache.restore(disk.blocks())
        self._transfer = TransferEngine(
            self._store, self._write_some, block_bytes=self._block_bytes
        )

    def wake(self) -> None:
        """There are new blocks in host memory."""
        self._transfer.wake()

    def promote(
        self,
        promotions: Sequence[tuple[Entry, int]],
        done: Callable[[int, Sequence[Read | None]], None],
    ) -> None:
        """Read each entry into its host slot; *done* as ``TransferEngine.read`` calls it."""
        self._transfer.read(
            [entry.key for entry, _ in promotions],
            [self._cache.memory.view(slot) for _, slot in promotions],
            done,
        )

    def forget(self, namespace: NamespaceId) -> None:
        """Drop the blocks of *namespace*, durably, after any batch that may still hold some.

        On ``TierUnavailable`` it is done later, before anything else is written.
        """
        self._owed_drops.append(namespace)
        if not self._write_lock.acquire(timeout=_FORGET_SECONDS):
            raise TierUnavailable(f"the disk does not end a write within {_FORGET_SECONDS} s")
        try:
            self._pay_drops()
        finally:
            self._write_lock.release()

    def report(self) -> TierReport:
        size = self._disk.statistics()
        return TierReport(
            "disk",
            size.capacity_blocks,
            self._cache.disk_used,
            self._block_bytes,
            waiting_blocks=self._cache.unwritten,
            switched_off=self._store.is_open,
        )

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until all of host memory is on disk too; whether that was so in time."""
        deadline = time.monotonic() + timeout_seconds
        while self._write_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            try:
                with self._lock:
                    if not self._cache.unwritten and not self._owed_drops:
                        return True
            finally:
                self._write_lock.release()
            if time.monotonic() > deadline:
                return False
            self._transfer.wake()
            time.sleep(_DRAIN_POLL_SECONDS)  # lets the writer have its lock
        return False

    def close(self, timeout_seconds: float) -> None:
        """Write what is not on disk yet, *timeout_seconds* long at most, and let the disk go."""
        if not self.drain(timeout_seconds):
            _log.warning("%d blocks could not be written to disk in time", self._cache.unwritten)
        self._transfer.close(timeout_seconds)
        self._disk.close()

    def _write_some(self) -> int:
        """Write a batch of blocks; its bytes, 0 without one. On the writer thread."""
        with self._write_lock:
            try:
                self._pay_drops()
            except TierUnavailable as e:
                _log.warning("dropping a namespace from disk failed: %s", e)
                return 0
            with self._lock:
                batch = self._cache.next_unwritten(max(1, _WRITE_BATCH_BYTES // self._block_bytes))
                victims = self._cache.make_disk_room(len(batch))
            if not batch:
                return 0
            self._owed_removals += [entry.key for entry in victims]
            writes: list[Write] = []
            try:
                writes = self._write(batch)
            except TierUnavailable as e:
                _log.warning("writing %d blocks to disk failed: %s", len(batch), e)
                return 0
            finally:
                if not writes:
                    self._write_later(batch)
            with self._lock:
                for entry, write in zip(batch, writes, strict=True):
                    self._cache.written(entry, stored=write is not Write.FULL)
        self._counters.add(metrics.CASCADED_BLOCKS, writes.count(Write.STORED))
        return len(batch) * self._block_bytes

    def _pay_drops(self) -> None:
        while self._owed_drops:
            self._disk.drop_namespace(self._owed_drops[0])  # others may append meanwhile
            self._owed_drops.pop(0)

    def _write_later(self, batch: Sequence[Entry]) -> None:
        with self._lock:
            for entry in batch:
                self._cache.write_later(entry)

    def _write(self, batch: Sequence[Entry]) -> list[Write]:
        if self._owed_removals:
            self._store.remove(self._owed_removals)
            self._owed_removals.clear()
        return self._transfer.write(
            [entry.key for entry in batch],
            [entry.parent.key if entry.parent else None for entry in batch],
            [self._cache.memory.view(entry.host_slot) for entry in batch],
        )
