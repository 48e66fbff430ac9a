"""Get tasks: leases on a prefix of blocks, and bringing up what is not in host memory."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from kvstrata.core.types import BlockKey, NamespaceId, Read, StoreKey
from kvstrata.index.prefix_index import NO_SLOT, Entry
from kvstrata.manager.cascade import Cascade
from kvstrata.manager.residency import LowerTier, Residency
from kvstrata.manager.tasks import UNSETTLED, GetTask, TaskEvent, TaskState, TaskStatus, step
from kvstrata.observe import metrics

_log = logging.getLogger(__name__)

Settled = Callable[[TaskStatus], None]


class _Promotion(NamedTuple):
    """A block on its way into a host slot."""

    entry: Entry
    slot: int
    source: LowerTier


class Gets:
    """The get tasks of one manager. *lock* guards them and *cache*, and is not held over I/O."""

    def __init__(
        self,
        cache: Residency,
        lower: Mapping[LowerTier, Cascade],
        lock: threading.Condition,
        ids: Iterator[int],
        ended: Callable[[int, TaskState], None],
        *,
        lease_seconds: float,
    ) -> None:
        self.tasks: dict[int, GetTask] = {}  # needs the lock
        self._cache = cache
        self._lower = lower
        self._lock = lock
        self._counters = cache.counters
        self._ids = ids
        self._ended = ended
        self._lease_seconds = lease_seconds
        self._settled: dict[int, Settled] = {}
        self._promotions: dict[StoreKey, _Promotion] = {}

    def match(
        self,
        namespace: NamespaceId,
        keys: Sequence[BlockKey],
        owner: int,
        settled: Settled | None,
    ) -> tuple[TaskStatus, Callable[[], None]]:
        """``KVManager.get_match``, and what is to be called next, without the lock. Needs it."""
        store_keys = [namespace + key for key in keys]
        known = len(self._cache.index.longest_prefix(store_keys))
        deadline = time.monotonic() + self._lease_seconds
        task = GetTask(next(self._ids), owner, namespace, deadline)
        promotions = self._extend(task, store_keys[:known])
        unknown = store_keys[known:] if len(task.entries) == known else []
        searched = self._searched_tier(namespace) if unknown else None
        self._count_lookup(task, len(keys) - (len(unknown) if searched else 0))
        if not task.entries and searched is None:
            return TaskStatus(0, TaskState.DONE), lambda: None
        if searched is not None:
            task.state = TaskState.SEARCHING
        elif self._is_waiting(task):
            task.state = TaskState.PROMOTING
        self.tasks[task.task_id] = task
        if settled is not None and task.state in UNSETTLED:
            self._settled[task.task_id] = settled

        def begin() -> None:
            self._promote(promotions)
            if searched is not None:
                searched.find(unknown, partial(self._found, task, unknown))

        return self.status(task), begin

    def launch(self, task: GetTask) -> None:
        """The copies of *task* begin, and have as long as the lease is. Needs the lock."""
        task.deadline = time.monotonic() + self._lease_seconds

    def forget(self, namespace: NamespaceId) -> None:
        """What a running search finds of *namespace* does not count. Needs the lock."""
        for task in self.tasks.values():
            if task.state is TaskState.SEARCHING and task.namespace == namespace:
                task.state = step(task.state, TaskEvent.FOUND)

    def arriving_slots(self) -> list[int]:
        """Host slots that blocks are being read into. Needs the lock."""
        return [promotion.slot for promotion in self._promotions.values()]

    def _promote(self, promotions: Sequence[_Promotion]) -> None:
        for tier, lower in self._lower.items():
            wanted = [promotion for promotion in promotions if promotion.source == tier]
            if wanted:
                keys = [promotion.entry.key for promotion in wanted]
                slots = [promotion.slot for promotion in wanted]
                lower.promote(keys, slots, partial(self._promoted, wanted))

    def expire(self) -> None:
        """Take the leases of gets whose owner has forgotten them."""
        now = time.monotonic()
        with self._lock:
            for task in [t for t in self.tasks.values() if t.deadline < now]:
                _log.warning("task %d was given up: not ended in time", task.task_id)
                self.end(task, TaskState.CANCELLED)

    def _extend(self, task: GetTask, keys: Sequence[StoreKey]) -> list[_Promotion]:
        """Lease *keys*, which follow the blocks of *task*, as far as host memory has room.

        A key that the index does not know is one that the remote tier has. Returns what must be
        read into host memory.
        """
        known = [self._cache.index.get(key) for key in keys]
        for entry in known:  # before slots are taken: none of them may be the victim
            if entry is not None:
                self._cache.lease(entry)
        promotions: list[_Promotion] = []
        held = 0
        for key, entry in zip(keys, known, strict=True):
            if entry is None or (entry.host_slot == NO_SLOT and key not in self._promotions):
                # A read for a block of this key that was reset meanwhile must end first.
                slot = None if key in self._promotions else self._cache.take_slot()
                if slot is None:
                    break
                source: LowerTier = "disk"
                if entry is None:
                    above = task.entries[-1].key if task.entries else None
                    entry = self._cache.expect(key, above)  # noqa: PLW2901 - the block's own now
                    self._cache.lease(entry)
                    source = "remote"
                promotions.append(_Promotion(entry, slot, source))
                self._promotions[key] = promotions[-1]
            task.disk_blocks += entry.host_slot == NO_SLOT and entry.on_disk
            task.remote_blocks += entry.arriving
            task.entries.append(entry)
            held += 1
        for entry in known[held:]:
            if entry is not None:
                self._cache.unlease(entry)
        self._cache.touch(task.entries)
        return promotions

    def _found(self, task: GetTask, keys: Sequence[StoreKey], count: int) -> None:
        """The remote tier has the first *count* of *keys*, which follow the blocks of *task*."""
        with self.settling() as told:
            self._counters.add(metrics.LOOKUP_BLOCKS, count, "remote")
            self._counters.add(metrics.LOOKUP_BLOCKS, len(keys) - count, "none")
            if task.state is not TaskState.SEARCHING:
                return
            task.state = step(task.state, TaskEvent.FOUND)
            promotions = self._extend(task, keys[:count])
            if promotions and task.task_id in self._settled:
                told.append((self._settled[task.task_id], self.status(task)))
        self._promote(promotions)

    def _promoted(
        self, promotions: Sequence[_Promotion], start: int, reads: Sequence[Read | None]
    ) -> None:
        """Some reads of ``_promote`` have ended."""
        with self.settling():
            for promotion, read in zip(promotions[start:], reads, strict=False):
                self._arrived(promotion, read)

    def _arrived(self, promotion: _Promotion, read: Read | None) -> None:
        entry, slot, source = promotion
        del self._promotions[entry.key]
        if entry.forgotten or entry.host_slot != NO_SLOT:  # reset, or saved meanwhile
            self._cache.release_slot(slot)
        elif read is Read.HIT:
            self._counters.add(metrics.PROMOTED_BLOCKS, 1, source)
            self._cache.put_in_host(entry, slot)
        else:
            self._cache.release_slot(slot)
            self._counters.add(metrics.CORRUPT_BLOCKS, read is Read.CORRUPT)
            if entry.arriving:
                self._cache.give_up(entry)
            elif source == "disk" and read is not None:
                self._cache.drop_from_disk(entry)

    @contextmanager
    def settling(self) -> Iterator[list[tuple[Settled, TaskStatus]]]:
        """Holds the lock, then tells those whose promotions have all ended meanwhile, and others."""
        told: list[tuple[Settled, TaskStatus]] = []
        with self._lock:
            yield told
            for task in self.tasks.values():
                if task.state is not TaskState.PROMOTING or self._is_waiting(task):
                    continue
                task.state = step(task.state, TaskEvent.PROMOTE)
                ready = len(self.ready_slots(task))
                for entry in task.entries[ready:]:
                    self._cache.unlease(entry)
                del task.entries[ready:]
                settled = self._settled.pop(task.task_id, None)
                if settled is not None:
                    told.append((settled, self.status(task)))
            self._lock.notify_all()
        for settled, status in told:
            settled(status)

    def _is_waiting(self, task: GetTask) -> bool:
        promotions = (self._promotions.get(entry.key) for entry in task.entries)
        return any(
            promotion is not None and promotion.entry is entry
            for promotion, entry in zip(promotions, task.entries, strict=True)
        )

    def end(self, task: GetTask, state: TaskState) -> None:
        """Return the leases of *task*. Needs the lock."""
        for entry in task.entries:
            self._cache.unlease(entry)
        task.state = state
        del self.tasks[task.task_id]
        self._settled.pop(task.task_id, None)
        self._ended(task.task_id, state)

    def ready_slots(self, task: GetTask) -> list[int]:
        """Of the leading blocks of *task* that are in host memory. Needs the lock."""
        slots = []
        for entry in task.entries:
            if entry.host_slot == NO_SLOT:
                break
            slots.append(entry.host_slot)
        return slots

    def status(self, task: GetTask) -> TaskStatus:
        """What a client sees of *task*. Needs the lock."""
        slots = self.ready_slots(task)
        return TaskStatus(
            task.task_id,
            task.state,
            slots,
            [self._cache.memory.generation(slot) for slot in slots],
            matched_blocks=len(task.entries),
            disk_blocks=task.disk_blocks,
            remote_blocks=task.remote_blocks,
        )

    def _count_lookup(self, task: GetTask, blocks: int) -> None:
        """*task* is what this node knows of a lookup of *blocks*."""
        found, disk, remote = len(task.entries), task.disk_blocks, task.remote_blocks
        self._counters.add(metrics.LOOKUPS, 1)
        self._counters.add(metrics.LOOKUP_BLOCKS, found - disk - remote, "host")
        self._counters.add(metrics.LOOKUP_BLOCKS, disk, "disk")
        self._counters.add(metrics.LOOKUP_BLOCKS, remote, "remote")
        self._counters.add(metrics.LOOKUP_BLOCKS, blocks - found, "none")

    def _searched_tier(self, namespace: NamespaceId) -> Cascade | None:
        """The tier to be asked for blocks that the index does not know."""
        remote = self._lower.get("remote")
        return None if remote is None or remote.owes_drop(namespace) else remote
