"""A tier below host memory: blocks go down in the background and come up on demand."""

import logging
import math
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
from kvstrata.manager.gate import Gate
from kvstrata.manager.report import TierReport
from kvstrata.manager.residency import Residency
from kvstrata.manager.writes import LowerTier
from kvstrata.observe import metrics
from kvstrata.observe.seldom import SeldomWarning
from kvstrata.storage.store import Store
from kvstrata.storage.wrap import (
    BreakerStore,
    CountedStore,
    LeadingStore,
    LimitedStore,
    RetryStore,
    TimedStore,
)
from kvstrata.transfer.engine import (
    WRITE_BATCH_BYTES,
    Begin,
    Done,
    TransferEngine,
    TransferLimits,
)
from kvstrata.transfer.finder import Finder, Found
from kvstrata.transfer.presence import Presence
from kvstrata.transfer.read_meter import ReadMeter

_log = logging.getLogger(__name__)

_DRAIN_POLL_SECONDS: Final = 0.005
_UPKEEP_SECONDS: Final = 5.0  # between two sweeps of a store that needs them
_KEPT: Final = frozenset({Write.STORED, Write.EXISTS})
_FORGET_SECONDS: Final = 5.0  # for the batch that is on its way to the store
_REMOVED_BLOCKS: Final = 4096  # by one call, which is not to look like one that hangs
_NO_ROOM_SECONDS: Final = 1.0  # a store that had no room is tried again after this


class SearchLimits(NamedTuple):
    """Of searches for blocks that other nodes may have written."""

    seconds: float = 0.05  # a search asks no further question after them
    missing_seconds: float = 0.0  # a block that is not there is not asked for again so long


class CascadeSettings(NamedTuple):
    """How one tier is used. *upkeep* is called every few seconds, by one writer at a time."""

    limits: TransferLimits = TransferLimits()
    search: SearchLimits = SearchLimits()
    hung_seconds: float = 10.0  # a call that takes longer counts as a failure
    retry_seconds: float = 2.0  # within which a call that fails is repeated
    call_seconds: float = math.inf  # for a call with all its repetitions
    upkeep: Callable[[], None] | None = None


class _Batch(NamedTuple):
    """Blocks on their way down, leased."""

    ids: BlockIds
    keys: list[StoreKey]
    parents: list[StoreKey | None]
    slots: list[int]


class Cascade:
    """Writes blocks of host memory to one tier below, and reads blocks back.

    Which, and when, the tier's ``write`` says: all as soon as they are saved, those that have to
    leave, or those that were found often enough.

    A store that raised ``full`` is offered one block every while until it has room; what it holds is
    read meanwhile.

    The lock of *desk* guards *cache* and is not held over I/O.
    """

    def __init__(
        self,
        tier: LowerTier,
        store: Store,
        cache: Residency,
        desk: Desk,
        settings: CascadeSettings,
    ) -> None:
        self._tier = tier
        self._inner = store
        self._cache = cache
        self._memory = desk.memory
        self._lock = desk.lock
        self._counters = cache.counters
        self._upkeep = settings.upkeep
        self._next_upkeep = 0.0
        self._keeping_up = threading.Lock()  # held during upkeep
        size = store.statistics()
        self._block_bytes = size.block_bytes
        self._capacity_blocks = size.capacity_blocks
        self._batch_blocks = max(1, WRITE_BATCH_BYTES // size.block_bytes)
        timed = TimedStore(store, partial(cache.counters.operations.observe, tier))
        retry_seconds = settings.retry_seconds
        asked = (
            timed
            if tier == "disk"
            else RetryStore(CountedStore(timed, self._count_fault), deadline_seconds=retry_seconds)
        )
        leading = LeadingStore(asked, deadline_seconds=retry_seconds / 2)
        self._store = BreakerStore(
            LimitedStore(leading, settings.call_seconds),
            name=tier,
            slow_seconds=settings.hung_seconds,
        )
        self._hung_seconds = settings.hung_seconds
        self._moved_at = 0.0  # monotonic seconds: a batch has begun or ended, last
        self._batches = Gate()  # a batch is inside while it is on its way to the store
        self._paying = threading.Lock()  # held by whoever makes owed drops
        self._under_way: list[BlockIds] = []  # those batches; guarded by the lock of *desk*
        self._taking = threading.Lock()  # held while a batch is taken and room is made for it
        self._owed_removals: list[StoreKey] = []  # left the index, and the store refused to hear it
        self._owed_drops: dict[NamespaceId, int] = {}  # with the resets since; guarded likewise
        self._is_full = False  # no write has succeeded since there was no room; guarded likewise
        self._next_try = 0.0  # monotonic seconds: of a store that is full; guarded likewise
        self._warn = SeldomWarning(_log)
        cache.writes.stopped_if(tier, self.is_stopped)
        self.meter = ReadMeter()
        self._presence = Presence(
            self._store.exists, missing_seconds=settings.search.missing_seconds
        )
        self._finder = Finder(
            self._presence, width=size.search_width, search_seconds=settings.search.seconds
        )
        self._transfer = TransferEngine(
            self._store, self._write_some, block_bytes=self._block_bytes, limits=settings.limits
        )

    def wake(self) -> None:
        """There are new blocks in host memory."""
        self._transfer.wake()

    def promote(
        self,
        keys: Sequence[StoreKey],
        slots: Sequence[int],
        done: Done,
        begin: Begin,
    ) -> None:
        """Read each block into its host slot; *done* and *begin* as of ``TransferEngine.read``."""

        def measured(start: int, reads: Sequence[Read | None]) -> None:
            self.meter.ended(len(reads), reads.count(Read.HIT))
            done(start, reads)

        def wanted(start: int, count: int) -> bool:
            is_wanted = begin(start, count)
            if not is_wanted:
                self.meter.ended(count, 0)
            return is_wanted

        self.meter.asked(len(keys))
        self._transfer.read(keys, [self._memory.view(slot) for slot in slots], measured, wanted)

    def is_off(self) -> bool:
        """Whether there is no use in asking for blocks: the store is switched off.

        While a read still runs that it did not answer, not even a probe would be begun.
        """
        return self._store.refuses or (self._store.is_open and self._transfer.is_reading)

    def is_stopped(self) -> bool:
        """Whether nothing is written for now. Needs the lock.

        The store is switched off, or owes a drop, or is full, or every writer hangs: reads may
        succeed meanwhile.
        """
        is_waiting = bool(self._owed_drops) or self._is_full
        return is_waiting or self._store.is_open or self._is_stuck()

    def _is_stuck(self) -> bool:
        return bool(self._under_way) and time.monotonic() - self._moved_at > self._hung_seconds

    def relieve(self) -> None:
        """If the store is switched off, what waits for it ends, and holds no slots any more."""
        if self._store.is_open:
            self._transfer.give_up()

    def find(self, keys: Sequence[StoreKey], done: Callable[[Found], None], asker: str) -> None:
        """Ask how many leading *keys* the tier has; *done* as ``Finder.find`` calls it."""
        if self._store.refuses:
            done(Found(0, len(keys)))
        else:
            self._finder.find(keys, done, asker)

    @property
    def search_seconds(self) -> float:
        """What takes longer to find has come too late."""
        return self._finder.search_seconds

    def ask(self, keys: Sequence[StoreKey], done: Callable[[list[bool]], None], asker: str) -> None:
        """Ask which of *keys* the tier has; *done* as ``Finder.ask`` calls it."""
        if self._store.refuses:
            done([False] * len(keys))
        else:
            self._finder.ask(keys, done, asker)

    def owe_drop(self, namespace: NamespaceId) -> None:
        """What the tier holds of *namespace* counts no longer; ``pay_drops`` makes it forget.

        Needs the lock. One drop serves all resets before it begins: it forgets whatever the tier
        holds then, and nothing is written from here until it has succeeded. It does not serve one
        that comes while it is made: other servers write to a remote tier too, maybe behind it.
        Then another drop is owed.
        """
        self._owed_drops[namespace] = self._owed_drops.get(namespace, 0) + 1

    def owes_drop(self, namespace: NamespaceId) -> bool:
        return namespace in self._owed_drops

    @property
    def owed_drops(self) -> list[NamespaceId]:
        """Needs the lock."""
        return list(self._owed_drops)

    def pay_drops(self) -> None:
        """Drop what is owed, durably, after any batch that may still hold some of it.

        On ``TierUnavailable`` it is done later, before anything else is written.
        """
        if not self._pay_drops(_FORGET_SECONDS):
            raise TierUnavailable(
                f"another drop of the {self._tier} tier is not made within {_FORGET_SECONDS} s"
            )
        self._transfer.wake()  # writers that came meanwhile have not waited

    def remove_all(self, leave: Callable[[], list[StoreKey] | None]) -> None:
        """Remove from the store what *leave* gives up, called with the lock until it says None.

        On ``TierUnavailable`` it is removed later, before anything else is written; until then a
        restart finds it again.
        """
        refused: TierUnavailable | None = None
        while True:
            with self._taking:
                with self._lock:
                    keys = leave()
                if keys is None:
                    break
                self._owed_removals += keys
                if refused is None:
                    refused = self._refused_removals()
        if refused is not None:
            raise refused

    def is_done(self) -> bool:
        """Whether nothing waits for the tier or is on its way there. Needs the lock."""
        return not (self._unwritten_blocks() or self._owed_drops or self._owed_removals)

    @property
    def owes_removals(self) -> bool:
        """Whether blocks have left the index that a restart would find in the store."""
        return bool(self._owed_removals)

    def report(self) -> TierReport:
        size = self._inner.statistics()
        return TierReport(
            self._tier,
            size.capacity_blocks,
            self._cache.disk_used if self._tier == "disk" else size.blocks,
            self._block_bytes,
            waiting_blocks=self._unwritten_blocks(),
            reading_blocks=self.meter.queued_blocks,
            switched_off=self._store.is_open,
            uncleared_namespaces=len(self._owed_drops),
            unremoved_blocks=len(self._owed_removals),
        )

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until all of host memory is in the tier too; whether that was so in time."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            with self._lock:
                if self.is_done():
                    return True
            if time.monotonic() > deadline:
                return False
            self._transfer.wake()
            time.sleep(_DRAIN_POLL_SECONDS)  # writing takes a while

    def close(self, timeout_seconds: float) -> None:
        """Write what is not there yet, *timeout_seconds* long at most, and let the store go."""
        with self._lock:
            self._cache.write_late_blocks()
        if not self.drain(timeout_seconds):
            self._warn_of_what_is_left()
        self._finder.close()
        self._transfer.close(timeout_seconds)
        self._inner.close()

    def _warn_of_what_is_left(self) -> None:
        with self._lock:
            left = self.report()
        if left.waiting_blocks:
            _log.warning(
                "%d blocks could not be written to %s in time", left.waiting_blocks, self._tier
            )
        if left.uncleared:
            _log.warning(
                "%s could not be cleared of %s in time: the next start can find them again",
                self._tier,
                left.uncleared,
            )

    def _pay_drops(self, patience_seconds: float) -> bool:
        """``pay_drops``; false if somebody else is at it, and still so after *patience_seconds*."""
        if not self._paying.acquire(timeout=patience_seconds):
            return False
        try:
            self._drop_owed()
        finally:
            self._paying.release()
        return True

    def _drop_owed(self) -> None:
        with self._batches.shut(_FORGET_SECONDS) as is_alone:
            if not is_alone:
                raise TierUnavailable(
                    f"the {self._tier} tier does not end a write within {_FORGET_SECONDS} s"
                )
            while (owed := self._next_drop()) is not None:
                namespace, resets = owed
                self._inner.drop_namespace(namespace)
                with self._lock:
                    if self._owed_drops[namespace] == resets:
                        del self._owed_drops[namespace]

    def _next_drop(self) -> tuple[NamespaceId, int] | None:
        with self._lock:
            return next(iter(self._owed_drops.items()), None)

    def _write_some(self) -> int:
        """Write a batch of blocks; its bytes, 0 without one. On a writer's thread."""
        self._keep_up()
        if self._is_full and not self._is_to_try():
            return 0
        try:
            if self._owed_drops and not self._pay_drops(0.0):
                return 0
            while self._owed_removals:
                with self._taking:  # not for all of them: others want to write, too
                    self._remove_some()
            with self._batches.passing():
                batch = self._take()
                if batch is None:
                    return 0
                self._write(batch)
        except TierUnavailable as e:
            self._note_failure(e)
            return 0
        return len(batch.keys) * self._block_bytes

    def _is_to_try(self) -> bool:
        """Whether it is time to try a full store again; then it is for the caller to do so."""
        with self._lock:
            now = time.monotonic()
            is_time = now >= self._next_try
            if is_time:
                self._next_try = now + _NO_ROOM_SECONDS
            return is_time

    def _note_failure(self, failure: TierUnavailable) -> None:
        if failure.cause == "full":
            with self._lock:
                self._is_full = True
                self._next_try = time.monotonic() + _NO_ROOM_SECONDS
        if not self._store.is_open:  # else the breaker has said so
            self._warn("writing blocks to %s failed: %s", self._tier, failure)

    def _take(self) -> _Batch | None:
        """The next batch, if there is one; what had to leave for it is gone from the store.

        While others are written, a batch that is not full waits: it may grow.
        """
        with self._taking:
            with self._lock:
                waiting = self._cache.writes.waiting(self._tier)
                most = 1 if self._is_full else self._batch_blocks
                count = min(most, waiting, self._room_blocks())
                if count < (self._batch_blocks if self._under_way else 1) or self._owed_drops:
                    return None
                ids = self._cache.next_unwritten(self._tier, count)
                if not len(ids):
                    return None
                batch, victims = self._begin_batch(ids)
            if waiting - count >= self._batch_blocks and not self._store.is_open:
                self._transfer.wake()  # another writer
            self._owed_removals += victims
            self._remove_owed(batch)
        return batch

    def _room_blocks(self) -> int:
        """How many blocks more than those on their way fit at most."""
        if self._tier == "disk":
            return self._capacity_blocks - self._blocks_under_way()
        return self._batch_blocks

    def _blocks_under_way(self) -> int:
        return sum(map(len, self._under_way))

    def _unwritten_blocks(self) -> int:
        """Those that wait and those on their way. Needs the lock."""
        return self._cache.writes.waiting(self._tier) + self._blocks_under_way()

    def _begin_batch(self, ids: BlockIds) -> tuple[_Batch, list[StoreKey]]:
        """*ids* are written next; with them what the disk gives up for it. Needs the lock."""
        self._under_way.append(ids)
        self._moved_at = time.monotonic()
        victims = []
        if self._tier == "disk":
            victims = self._cache.make_disk_room(np.concatenate(self._under_way))
        index = self._cache.index
        slots: list[int] = index.host_slot[ids].tolist()
        return _Batch(ids, index.store_keys(ids), index.parent_keys(ids), slots), victims

    def _remove_owed(self, batch: _Batch) -> None:
        """Remove what has left the index; where that fails *batch* waits."""
        removed = False
        try:
            self._pay_removals()
            removed = True
        finally:
            if not removed:
                self._write_later(batch)

    def _refused_removals(self) -> TierUnavailable | None:
        try:
            self._pay_removals()
        except TierUnavailable as e:
            return e
        return None

    def _pay_removals(self) -> None:
        while self._owed_removals:
            self._remove_some()

    def _remove_some(self) -> None:
        if some := self._owed_removals[:_REMOVED_BLOCKS]:
            self._store.remove(some)
            del self._owed_removals[: len(some)]

    def _write(self, batch: _Batch) -> None:
        writes: list[Write] = []
        try:
            views = [self._memory.view(slot) for slot in batch.slots]
            writes = self._store.write(batch.keys, batch.parents, views)
        finally:
            if not writes:
                self._write_later(batch)
        self._presence.written(batch.keys)
        with self._lock:
            self._forget_batch(batch)
            self._is_full = False
            stored = np.array([write in _KEPT for write in writes], np.bool_)
            self._cache.written(self._tier, batch.ids, stored)
        self._counters.add(metrics.CASCADED_BLOCKS, writes.count(Write.STORED), self._tier)

    def _write_later(self, batch: _Batch) -> None:
        with self._lock:
            self._forget_batch(batch)
            self._cache.write_later(self._tier, batch.ids)

    def _forget_batch(self, batch: _Batch) -> None:
        self._moved_at = time.monotonic()
        self._under_way = [ids for ids in self._under_way if ids is not batch.ids]

    def _count_fault(self, cause: str, count: int) -> None:
        self._counters.add(metrics.REMOTE_FAULTS, count, cause)

    def _keep_up(self) -> None:
        """What the store needs done now and then, by the writer that finds it due."""
        if self._upkeep is None or not self._keeping_up.acquire(blocking=False):
            return
        try:
            if time.monotonic() >= self._next_upkeep:
                self._next_upkeep = time.monotonic() + _UPKEEP_SECONDS
                self._upkeep()
        except TierUnavailable as e:
            _log.warning("upkeep of %s failed: %s", self._tier, e)
        finally:
            self._keeping_up.release()
