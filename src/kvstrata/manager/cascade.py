"""A tier below host memory: blocks go down in the background and come up on demand."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from kvstrata.core.errors import TierUnavailable
from kvstrata.core.keys import BlockIds
from kvstrata.core.types import NamespaceId, Read, StoreKey, Write
from kvstrata.manager.desk import Desk
from kvstrata.manager.report import TierReport
from kvstrata.manager.residency import LowerTier, Residency
from kvstrata.observe import metrics
from kvstrata.storage.store import Store
from kvstrata.storage.wrap import BreakerStore, RetryStore, TimedStore
from kvstrata.transfer.engine import TransferEngine, TransferLimits
from kvstrata.transfer.finder import Finder
from kvstrata.transfer.read_meter import ReadMeter

_log = logging.getLogger(__name__)

_WRITE_BATCH_BYTES: Final = 32 << 20  # some parts for each of the threads that write
_DRAIN_POLL_SECONDS: Final = 0.005
_HUNG_SECONDS: Final = 10.0  # a call that takes longer counts as a failure
_UPKEEP_SECONDS: Final = 5.0  # between two sweeps of a store that needs them
_FORGET_SECONDS: Final = 5.0  # for the batch that is on its way to the store


class _Batch(NamedTuple):
    """Blocks on their way down, leased."""

    ids: BlockIds
    keys: list[StoreKey]
    parents: list[StoreKey | None]
    slots: list[int]


class Cascade:
    """Writes every block of host memory through to one tier below, and reads blocks back.

    The lock of *desk* guards *cache* and is not held over I/O.
    """

    def __init__(
        self,
        tier: LowerTier,
        store: Store,
        cache: Residency,
        desk: Desk,
        *,
        limits: TransferLimits = TransferLimits(),  # noqa: B008 - immutable
        upkeep: Callable[[], None] | None = None,
    ) -> None:
        """*upkeep* is called every few seconds, on the writer's thread."""
        self._tier = tier
        self._inner = store
        self._cache = cache
        self._memory = desk.memory
        self._lock = desk.lock
        self._counters = cache.counters
        self._upkeep = upkeep
        self._next_upkeep = 0.0
        self._block_bytes = store.statistics().block_bytes
        timed = TimedStore(store, partial(cache.counters.operations.observe, tier))
        asked = timed if tier == "disk" else RetryStore(timed)
        self._store = BreakerStore(asked, slow_seconds=_HUNG_SECONDS)
        self._write_lock = threading.Lock()  # held while a batch is on its way to the store
        self._owed_removals: list[StoreKey] = []  # left the index, and the store refused to hear it
        self._owed_drops: list[NamespaceId] = []
        self.meter = ReadMeter()
        self._finder = Finder(self._store)
        self._transfer = TransferEngine(
            self._store, self._write_some, block_bytes=self._block_bytes, limits=limits
        )

    def wake(self) -> None:
        """There are new blocks in host memory."""
        self._transfer.wake()

    def promote(
        self,
        keys: Sequence[StoreKey],
        slots: Sequence[int],
        done: Callable[[int, Sequence[Read | None]], None],
    ) -> None:
        """Read each block into its host slot; *done* as ``TransferEngine.read`` calls it."""

        def measured(start: int, reads: Sequence[Read | None]) -> None:
            self.meter.ended(len(reads), reads.count(Read.HIT))
            done(start, reads)

        self.meter.asked(len(keys))
        self._transfer.read(keys, [self._memory.view(slot) for slot in slots], measured)

    def find(self, keys: Sequence[StoreKey], done: Callable[[int], None]) -> None:
        """Ask how many leading *keys* the tier has; *done* as ``Finder.find`` calls it."""
        self._finder.find(keys, done)

    def owe_drop(self, namespace: NamespaceId) -> None:
        """What the tier holds of *namespace* counts no longer; ``pay_drops`` makes it forget."""
        self._owed_drops.append(namespace)

    def owes_drop(self, namespace: NamespaceId) -> bool:
        return namespace in self._owed_drops

    def pay_drops(self) -> None:
        """Drop what is owed, durably, after any batch that may still hold some of it.

        On ``TierUnavailable`` it is done later, before anything else is written.
        """
        if not self._write_lock.acquire(timeout=_FORGET_SECONDS):
            raise TierUnavailable(
                f"the {self._tier} tier does not end a write within {_FORGET_SECONDS} s"
            )
        try:
            self._pay()
        finally:
            self._write_lock.release()

    def report(self) -> TierReport:
        size = self._inner.statistics()
        return TierReport(
            self._tier,
            size.capacity_blocks,
            self._cache.disk_used if self._tier == "disk" else size.blocks,
            self._block_bytes,
            waiting_blocks=self._cache.unwritten(self._tier),
            switched_off=self._store.is_open,
        )

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until all of host memory is in the tier too; whether that was so in time."""
        deadline = time.monotonic() + timeout_seconds
        while self._write_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            try:
                with self._lock:
                    if not self._cache.unwritten(self._tier) and not self._owed_drops:
                        return True
            finally:
                self._write_lock.release()
            if time.monotonic() > deadline:
                return False
            self._transfer.wake()
            time.sleep(_DRAIN_POLL_SECONDS)  # lets the writer have its lock
        return False

    def close(self, timeout_seconds: float) -> None:
        """Write what is not there yet, *timeout_seconds* long at most, and let the store go."""
        with self._lock:
            self._cache.write_late_blocks()
        if not self.drain(timeout_seconds):
            left = self._cache.unwritten(self._tier)
            _log.warning("%d blocks could not be written to %s in time", left, self._tier)
        self._finder.close()
        self._transfer.close(timeout_seconds)
        self._inner.close()

    def _write_some(self) -> int:
        """Write a batch of blocks; its bytes, 0 without one. On the writer thread."""
        self._keep_up()
        with self._write_lock:
            try:
                self._pay()
            except TierUnavailable as e:
                _log.warning("dropping a namespace from %s failed: %s", self._tier, e)
                return 0
            with self._lock:
                self._cache.stop_writing(self._tier, self._store.is_open)
                batch, victims = self._next_batch()
            if not batch.keys:
                return 0
            self._owed_removals += victims
            writes: list[Write] = []
            try:
                writes = self._write(batch)
            except TierUnavailable as e:
                _log.warning("writing %d blocks to %s failed: %s", len(batch.keys), self._tier, e)
                return 0
            finally:
                if not writes:
                    with self._lock:
                        self._cache.write_later(self._tier, batch.ids)
            with self._lock:
                stored = np.array([write is not Write.FULL for write in writes], np.bool_)
                self._cache.written(self._tier, batch.ids, stored)
        self._counters.add(metrics.CASCADED_BLOCKS, writes.count(Write.STORED), self._tier)
        return len(writes) * self._block_bytes

    def _next_batch(self) -> tuple[_Batch, list[StoreKey]]:
        """What is to be written next, and what the disk gives up for it. Needs the lock."""
        count = max(1, _WRITE_BATCH_BYTES // self._block_bytes)
        ids = self._cache.next_unwritten(self._tier, count)
        victims = self._cache.make_disk_room(ids) if self._tier == "disk" else []
        index = self._cache.index
        slots: list[int] = index.host_slot[ids].tolist()
        return _Batch(ids, index.store_keys(ids), index.parent_keys(ids), slots), victims

    def _keep_up(self) -> None:
        if self._upkeep is None or time.monotonic() < self._next_upkeep:
            return
        self._next_upkeep = time.monotonic() + _UPKEEP_SECONDS
        try:
            self._upkeep()
        except TierUnavailable as e:
            _log.warning("upkeep of %s failed: %s", self._tier, e)

    def _pay(self) -> None:
        while self._owed_drops:
            self._inner.drop_namespace(self._owed_drops[0])  # others may append meanwhile
            self._owed_drops.pop(0)

    def _write(self, batch: _Batch) -> list[Write]:
        if self._owed_removals:
            self._store.remove(self._owed_removals)
            self._owed_removals.clear()
        views = [self._memory.view(slot) for slot in batch.slots]
        return self._transfer.write(batch.keys, batch.parents, views)
