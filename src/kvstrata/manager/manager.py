"""KVManager: the truth about which blocks exist, and the tasks that load and save them."""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvstrata.core.config import Config
from kvstrata.core.errors import InvariantViolated
from kvstrata.core.types import BlockKey, NamespaceId, Read, StoreKey
from kvstrata.index.prefix_index import NO_SLOT, Entry
from kvstrata.manager.cascade import Cascade
from kvstrata.manager.report import CacheReport, TierReport
from kvstrata.manager.residency import Residency
from kvstrata.manager.sessions import LOCAL_OWNER, Sessions
from kvstrata.manager.tasks import GetTask, PutTask, TaskEvent, TaskState, TaskStatus, step
from kvstrata.observe import metrics
from kvstrata.storage.engine import StorageEngine
from kvstrata.storage.host import HostMemory

_log = logging.getLogger(__name__)

_LEASE_SECONDS = 60.0  # plus the time to load: then a get loses its leases
_KEPT_NAMESPACES = 256  # whose parts are shown; each reset of an engine names a new one
_KEPT_RESULTS = 4096  # ended tasks whose state can still be asked for

Settled = Callable[[TaskStatus], None]


class KVManager:
    """Host memory and an optional disk below it, behind get and put tasks.

    Thread-safe; no method but ``wait``, ``reset`` and ``close`` waits for I/O. The bytes are
    moved by others: a caller of ``put_match`` writes the reserved ``view``\\ s and completes the
    task, a caller of ``get_match`` reads the leased ones and completes it.
    """

    def __init__(self, config: Config, *, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.counters = metrics.Counters()
        self._lock = threading.Condition()
        self._drain_timeout_seconds = config.drain_timeout_seconds
        self._lease_seconds = _LEASE_SECONDS + config.load_timeout_seconds
        self._storage = StorageEngine(block_bytes, config.tiers)
        self._memory = self._storage.host.data
        self.server_id = self._memory.mapping.server_id
        disk = self._storage.disk
        self._cache = Residency(
            self._memory,
            self.counters,
            disk_capacity_blocks=disk.capacity_blocks if disk else 0,
        )
        self._cascade = Cascade(disk.data, self._cache, self._lock, self.counters) if disk else None
        self._sessions = Sessions()
        self._namespaces: dict[NamespaceId, Mapping[str, str]] = {}
        self._gets: dict[int, GetTask] = {}
        self._puts: dict[int, PutTask] = {}
        self._ended: dict[int, TaskState] = {}
        self._settled: dict[int, Settled] = {}
        self._reserved: set[StoreKey] = set()  # keys of running puts
        self._promotions: dict[StoreKey, tuple[Entry, int]] = {}  # with the slots that they fill
        # An engine outlives its server, with tasks of the old one in flight: ids do not come again.
        self._next_task = (1 + secrets.randbits(20)) << 32
        if config.prefault:
            threading.Thread(target=self._prefault, name="kvstrata-prefault", daemon=True).start()

    # -- who is there ------------------------------------------------------------------------

    @property
    def memory(self) -> HostMemory:
        return self._memory

    def view(self, slot: int) -> memoryview:
        """The ``block_bytes`` bytes of host slot *slot*."""
        return self._memory.view(slot)

    def register_namespace(self, namespace: NamespaceId, parts: Mapping[str, str]) -> None:
        """Remember what *namespace* stands for, for ``inspect``."""
        with self._lock:
            self._namespaces.pop(namespace, None)
            self._namespaces[namespace] = dict(parts)
            if len(self._namespaces) > _KEPT_NAMESPACES:
                del self._namespaces[next(iter(self._namespaces))]

    def connect_engine(self, session: str, world_size: int) -> int:
        with self._lock:
            return self._sessions.add_engine(session, world_size)

    def connect_worker(self, session: str, rank: int) -> int:
        with self._lock:
            return self._sessions.add_worker(session, rank)

    def connect_observer(self) -> int:
        with self._lock:
            return self._sessions.add_observer()

    def workers(self, owner: int) -> int:
        """How many workers of the engine *owner* have mapped the host tier."""
        with self._lock:
            return self._sessions.workers(owner)

    def disconnect(self, owner: int) -> None:
        """Release what *owner* held: leases at once, reserved slots when nobody can write to them."""
        with self._lock:
            for get in [g for g in self._gets.values() if g.owner == owner]:
                self._end_get(get, TaskState.CANCELLED)
            slots = []
            for put in [p for p in self._puts.values() if p.owner == owner]:
                slots += self._end_put(put, TaskState.CANCELLED)
            for slot in self._sessions.orphan(owner, slots) + self._sessions.remove(owner):
                self._cache.release_slot(slot)

    # -- tasks -------------------------------------------------------------------------------

    def get_match(
        self,
        namespace: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        owner: int = LOCAL_OWNER,
        settled: Settled | None = None,
    ) -> TaskStatus:
        """Lease the longest prefix of *keys* that is in some tier.

        The status is ``READY`` if all of it is in host memory. Else it is ``PROMOTING``, its slots
        are the part that is, and *settled* is called, on another thread, when the rest has
        arrived or failed. With nothing found there is no task: ``task_id`` is 0, ``DONE``, or
        ``FAILED`` while not all workers of *owner* are attached.
        """
        self._expire()
        with self._lock:
            if not self._sessions.can_transfer(owner):
                return TaskStatus(0, TaskState.FAILED)
            entries = self._cache.index.longest_prefix([namespace + key for key in keys])
            task, promotions = self._lease_prefix(entries, owner)
            self._count_lookup(len(keys), task)
            if task is None:
                return TaskStatus(0, TaskState.DONE)
            if settled is not None and task.state is TaskState.PROMOTING:
                self._settled[task.task_id] = settled
            status = self._status_of_get(task)
        self._promote(promotions)
        return status

    def put_match(
        self,
        namespace: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        parent: BlockKey | None = None,
        owner: int = LOCAL_OWNER,
    ) -> TaskStatus:
        """Reserve host slots for those of *keys* that are nowhere and that nobody is saving.

        *keys* follow each other in a prompt, *parent* is the block before them. When host memory
        has no room for all, the leading ones get it. Without a task ``task_id`` is 0: ``DONE`` if
        all is there, ``FAILED`` if others are still saving it, if there is no room, or if not all
        workers are attached.
        """
        with self._lock:
            if not self._sessions.can_transfer(owner):
                return TaskStatus(0, TaskState.FAILED)
            store_keys = [namespace + key for key in keys]
            above = [namespace + parent if parent is not None else None, *store_keys[:-1]]
            task = PutTask(self._next_task, owner, namespace, [], [], [], [])
            known = []
            shed = 0
            for i, key in enumerate(store_keys):
                entry = self._cache.index.get(key)
                if entry is not None:
                    self._cache.lease(entry)
                    known.append(entry)
                elif key not in self._reserved:
                    slot = self._cache.take_slot()
                    if slot is None:
                        shed = len(store_keys) - i
                        break
                    self._reserved.add(key)
                    task.keys.append(key)
                    task.parents.append(above[i])
                    task.slots.append(slot)
                    task.missing.append(i)
            for entry in known:
                self._cache.unlease(entry)
            self._cache.touch(known)
            self.counters.add(metrics.SHED_BLOCKS, shed)
            if not task.keys:
                found = len(known) == len(store_keys)
                return TaskStatus(0, TaskState.DONE if found else TaskState.FAILED)
            self._next_task += 1
            self._puts[task.task_id] = task
            return self._status_of_put(task)

    def launch(self, task_ids: Sequence[int], *, owner: int = LOCAL_OWNER) -> None:
        """The copies of these tasks begin. Unknown tasks, and those of others, are passed over."""
        with self._lock:
            for task, state in self._moved(task_ids, owner, TaskEvent.LAUNCH):
                task.state = state
                if isinstance(task, GetTask):
                    task.deadline = time.monotonic() + self._lease_seconds

    def complete(self, task_ids: Sequence[int], *, owner: int = LOCAL_OWNER) -> None:
        """The copies of these running tasks have succeeded: saved blocks can be found from now."""
        with self._lock:
            for task, state in self._moved(task_ids, owner, TaskEvent.COMPLETE):
                if isinstance(task, GetTask):
                    self.counters.add(metrics.LOADED_BLOCKS, len(self._ready_slots(task)))
                    self._end_get(task, state)
                else:
                    self._publish(task)

    def fail(self, task_ids: Sequence[int], *, owner: int = LOCAL_OWNER) -> None:
        """The copies of these tasks have failed and have ended.

        A block whose load failed is dropped from host memory: there is a doubt about it.
        """
        with self._lock:
            for task, state in self._moved(task_ids, owner, TaskEvent.FAIL):
                if isinstance(task, PutTask):
                    for slot in self._end_put(task, state):
                        self._cache.release_slot(slot)
                    continue
                self.counters.add(metrics.FAILED_LOADS, 1)
                self._end_get(task, state)
                for entry in reversed(task.entries):
                    if not entry.leases and not entry.forgotten and entry.host_slot != NO_SLOT:
                        self._cache.drop_from_host(entry)

    def cancel(self, task_ids: Sequence[int], *, owner: int = LOCAL_OWNER) -> None:
        """Give up tasks that are not running. The caller vouches that nobody will copy for them."""
        with self._lock:
            for task, state in self._moved(task_ids, owner, TaskEvent.CANCEL):
                if isinstance(task, GetTask):
                    self._end_get(task, state)
                else:
                    for slot in self._end_put(task, state):
                        self._cache.release_slot(slot)

    def try_wait(self, task_ids: Sequence[int]) -> dict[int, TaskStatus]:
        """What is known of these tasks now. Tasks ended long ago are absent."""
        with self._lock:
            found = {}
            for task_id in task_ids:
                if task_id in self._gets:
                    found[task_id] = self._status_of_get(self._gets[task_id])
                elif task_id in self._puts:
                    found[task_id] = self._status_of_put(self._puts[task_id])
                elif task_id in self._ended:
                    found[task_id] = TaskStatus(task_id, self._ended[task_id])
            return found

    def wait(self, task_ids: Sequence[int], timeout_seconds: float) -> dict[int, TaskStatus]:
        """``try_wait`` once no task is promoting any more, or after *timeout_seconds*."""
        with self._lock:
            self._lock.wait_for(
                lambda: (
                    not any(
                        task_id in self._gets and self._gets[task_id].state is TaskState.PROMOTING
                        for task_id in task_ids
                    )
                ),
                timeout_seconds,
            )
            return self.try_wait(task_ids)

    def prefetch(
        self, namespace: NamespaceId, keys: Sequence[BlockKey], *, owner: int = LOCAL_OWNER
    ) -> int:
        """Bring the longest prefix of *keys* into host memory; the task, 0 if it is there already.

        The task ends by itself: its leases are returned as soon as the blocks have arrived.
        """

        def release(status: TaskStatus) -> None:
            self.cancel([status.task_id], owner=owner)

        status = self.get_match(namespace, keys, owner=owner, settled=release)
        if status.state is TaskState.READY:
            release(status)
            return 0
        return status.task_id

    def reset(self, namespace: NamespaceId) -> int:
        """Forget every block of *namespace*, on disk durably so; how many there were.

        Blocks that are being saved at this moment will not become visible. On ``TierUnavailable``
        none is found either, but it could be after a restart; the drop is tried until it succeeds.
        """
        with self._lock:
            for put in self._puts.values():
                put.stale = put.stale or put.namespace == namespace
            dropped = self._cache.forget(namespace)
        if self._cascade:
            self._cascade.forget(namespace)
        return dropped

    # -- what it looks like ------------------------------------------------------------------

    def stats(self) -> CacheReport:
        """Usage of each tier, counters, and what is known of namespaces and engines."""
        with self._lock:
            cache, memory = self._cache, self._memory
            tiers = [TierReport("host", memory.slots, cache.host_used, self.block_bytes)]
            if self._cascade:
                tiers.append(self._cascade.report())
            return CacheReport(
                server_id=self.server_id.hex(),
                tiers=tiers,
                counters=self.counters.snapshot(),
                running_gets=len(self._gets),
                running_puts=len(self._puts),
                namespaces=self._cache.describe(self._namespaces),
                engines=self._sessions.describe(),
            )

    def check(self) -> None:
        """Raises ``InvariantViolated`` unless every slot is accounted for exactly once."""
        with self._lock:
            reserved = [slot for put in self._puts.values() for slot in put.slots]
            reserved += [slot for _, slot in self._promotions.values()]
            reserved += self._sessions.orphaned_slots()
            self._cache.check(reserved)

    def close(self) -> None:
        """Write what is not on disk yet, at most ``drain_timeout_seconds`` long, and release all."""
        if self._cascade:
            self._cascade.close(self._drain_timeout_seconds)
        self._storage.close()

    # -- inside, with the lock held ----------------------------------------------------------

    def _lease_prefix(
        self, entries: list[Entry], owner: int
    ) -> tuple[GetTask | None, list[tuple[Entry, int]]]:
        """A task on as much of *entries* as host memory can hold, and what must be promoted."""
        for entry in entries:
            self._cache.lease(entry)
        self._cache.touch(entries)
        promotions: list[tuple[Entry, int]] = []
        held = len(entries)
        waiting = 0
        for i, entry in enumerate(entries):
            if entry.host_slot != NO_SLOT:
                continue
            if entry.key not in self._promotions:
                slot = self._cache.take_slot()
                if slot is None:
                    held = i
                    break
                promotions.append((entry, slot))
                self._promotions[entry.key] = (entry, slot)
            waiting += 1
        for entry in entries[held:]:
            self._cache.unlease(entry)
        if not held:
            return None, []
        task = GetTask(
            self._next_task,
            owner,
            entries[:held],
            time.monotonic() + self._lease_seconds,
            TaskState.PROMOTING if waiting else TaskState.READY,
            waiting,
        )
        self._next_task += 1
        self._gets[task.task_id] = task
        return task, promotions

    def _promoted(
        self, promotions: Sequence[tuple[Entry, int]], start: int, reads: Sequence[Read | None]
    ) -> None:
        """Some reads of ``_promote`` have ended."""
        with self._settling():
            for (entry, slot), read in zip(promotions[start:], reads, strict=False):
                self._arrived(entry, slot, read)

    def _arrived(self, entry: Entry, slot: int, read: Read | None) -> None:
        if self._promotions.get(entry.key, (None,))[0] is entry:
            del self._promotions[entry.key]
        if read is Read.HIT and not entry.forgotten:
            self._cache.put_in_host(entry, slot)
            self.counters.add(metrics.PROMOTED_BLOCKS, 1)
            return
        self._cache.release_slot(slot)
        if read in {Read.MISS, Read.CORRUPT} and not entry.forgotten:
            self.counters.add(metrics.CORRUPT_BLOCKS, 1)
            self._cache.drop_from_disk(entry)

    @contextmanager
    def _settling(self) -> Iterator[None]:
        """Holds the lock, then tells those whose promotions have all ended meanwhile."""
        told: list[tuple[Settled, TaskStatus]] = []
        with self._lock:
            yield
            for task in self._gets.values():
                if task.state is not TaskState.PROMOTING or self._is_waiting(task):
                    continue
                task.state = step(task.state, TaskEvent.PROMOTE)
                ready = len(self._ready_slots(task))
                for entry in task.entries[ready:]:
                    self._cache.unlease(entry)
                del task.entries[ready:]
                settled = self._settled.pop(task.task_id, None)
                if settled is not None:
                    told.append((settled, self._status_of_get(task)))
            self._lock.notify_all()
        for settled, status in told:
            settled(status)

    def _is_waiting(self, task: GetTask) -> bool:
        return any(self._promotions.get(entry.key, (None,))[0] is entry for entry in task.entries)

    def _publish(self, task: PutTask) -> None:
        """The bytes of *task* are in its slots: insert its blocks, unless a reset forbids it."""
        for key, parent, slot in zip(task.keys, task.parents, task.slots, strict=True):
            self._reserved.discard(key)
            if task.stale:
                self._cache.release_slot(slot)
            else:
                self._cache.put_in_host(self._cache.index.insert(key, parent), slot)
        self._cache.touch(self._cache.index.longest_prefix(task.keys))
        self.counters.add(metrics.SAVED_BLOCKS, 0 if task.stale else len(task.keys))
        del self._puts[task.task_id]
        self._remember(task.task_id, TaskState.DONE)
        if self._cascade:
            self._cascade.wake()

    def _end_get(self, task: GetTask, state: TaskState) -> None:
        for entry in task.entries:
            self._cache.unlease(entry)
        del self._gets[task.task_id]
        self._settled.pop(task.task_id, None)
        self._remember(task.task_id, state)

    def _end_put(self, task: PutTask, state: TaskState) -> list[int]:
        """End *task* without publishing; its slots, still taken."""
        self._reserved.difference_update(task.keys)
        del self._puts[task.task_id]
        self._remember(task.task_id, state)
        return task.slots

    def _remember(self, task_id: int, state: TaskState) -> None:
        self._ended[task_id] = state
        if len(self._ended) > _KEPT_RESULTS:
            del self._ended[next(iter(self._ended))]
        self._lock.notify_all()

    def _moved(
        self, task_ids: Sequence[int], owner: int, event: TaskEvent
    ) -> Iterator[tuple[GetTask | PutTask, TaskState]]:
        """The tasks of *owner* among *task_ids* and their states after *event*.

        Late news, of ended tasks or of others', mean nothing. News that a task cannot take raise
        ``InvariantViolated``, but only once the others are done.
        """
        refused: InvariantViolated | None = None
        for task_id in task_ids:
            task = self._gets.get(task_id) or self._puts.get(task_id)
            if task is None or task.owner != owner:
                continue
            try:
                state = step(task.state, event)
            except InvariantViolated as e:
                refused = refused or e
                continue
            yield task, state
        if refused is not None:
            raise refused

    def _ready_slots(self, task: GetTask) -> list[int]:
        slots = []
        for entry in task.entries:
            if entry.host_slot == NO_SLOT:
                break
            slots.append(entry.host_slot)
        return slots

    def _status_of_get(self, task: GetTask) -> TaskStatus:
        slots = self._ready_slots(task)
        return TaskStatus(
            task.task_id,
            task.state,
            slots,
            [self._memory.generation(slot) for slot in slots],
            matched_blocks=len(task.entries),
            disk_blocks=task.disk_blocks,
        )

    def _status_of_put(self, task: PutTask) -> TaskStatus:
        generations = [self._memory.generation(slot) for slot in task.slots]
        return TaskStatus(task.task_id, task.state, task.slots, generations, task.missing)

    def _count_lookup(self, asked_blocks: int, task: GetTask | None) -> None:
        found = len(task.entries) if task else 0
        from_disk = task.disk_blocks if task else 0
        self.counters.add(metrics.LOOKUPS, 1)
        self.counters.add(metrics.LOOKUP_BLOCKS, found - from_disk, "host")
        self.counters.add(metrics.LOOKUP_BLOCKS, from_disk, "disk")
        self.counters.add(metrics.LOOKUP_BLOCKS, asked_blocks - found, "none")

    # -- inside, without the lock ------------------------------------------------------------

    def _promote(self, promotions: list[tuple[Entry, int]]) -> None:
        if promotions and self._cascade:
            self._cascade.promote(
                promotions, lambda start, reads: self._promoted(promotions, start, reads)
            )

    def _expire(self) -> None:
        """Take the leases of gets whose owner has forgotten them."""
        now = time.monotonic()
        with self._lock:
            for task in [t for t in self._gets.values() if t.deadline < now]:
                _log.warning("task %d was given up: not ended in time", task.task_id)
                self._end_get(task, TaskState.CANCELLED)

    def _prefault(self) -> None:
        try:
            self._memory.prefault()
        except (OSError, ValueError) as e:
            _log.warning("host memory could not be prefaulted: %s", e)
