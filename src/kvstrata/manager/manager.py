"""KVManager: the truth about which blocks exist, and the tasks that load and save them."""

import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvstrata.core.config import Config
from kvstrata.core.errors import InvariantViolated, TierUnavailable
from kvstrata.core.tiers import DiskTier
from kvstrata.core.types import EXACT, BlockFormat, BlockKey, NamespaceId, StoreKey
from kvstrata.index.prefix_index import NO_SLOT
from kvstrata.manager.cascade import Cascade
from kvstrata.manager.gets import Gets, Settled
from kvstrata.manager.report import CacheReport, OperationReport, TierReport
from kvstrata.manager.residency import LowerTier, Residency
from kvstrata.manager.sessions import LOCAL_OWNER, Sessions
from kvstrata.manager.tasks import (
    UNSETTLED,
    GetTask,
    PutTask,
    TaskEvent,
    TaskState,
    TaskStatus,
    step,
)
from kvstrata.observe import metrics
from kvstrata.storage.engine import StorageEngine
from kvstrata.storage.host import HostMemory
from kvstrata.storage.store import Store
from kvstrata.transfer.engine import TransferLimits

_log = logging.getLogger(__name__)

_LEASE_SECONDS = 60.0  # plus the time to load: then a get loses its leases
_KEPT_NAMESPACES = 256  # whose parts are shown; each reset of an engine names a new one
_KEPT_RESULTS = 4096  # ended tasks whose state can still be asked for

OnPrefault = Callable[[int, int], None]


class KVManager:
    """Host memory and the tiers below it, behind get and put tasks.

    Thread-safe; no method but ``wait``, ``reset`` and ``close`` waits for I/O. The bytes are
    moved by others: a caller of ``put_match`` writes the reserved ``view``\\ s and completes the
    task, a caller of ``get_match`` reads the leased ones and completes it.
    """

    def __init__(
        self,
        config: Config,
        *,
        block_bytes: int,
        block_format: BlockFormat = EXACT,
        remote: Store | None = None,
        on_prefault: OnPrefault | None = None,
    ) -> None:
        """Open the tiers of *config*; *remote* is a store to use as remote tier instead of its.

        Tiers below host memory keep blocks in *block_format*.

        Host memory is backed in the background; *on_prefault* hears of it, on that thread: bytes
        done, bytes in all. Raises ``ConfigError`` if a tier cannot be opened, and has then opened
        none.
        """
        self.block_bytes = block_bytes
        self.block_format = block_format
        self.counters = metrics.Counters()
        self._lock = threading.Condition()
        self._drain_timeout_seconds = config.drain_timeout_seconds
        self._storage = StorageEngine(
            block_bytes, config.tiers, remote=remote, block_format=block_format
        )
        self._memory = self._storage.host.data
        self.server_id = self._memory.mapping.server_id
        disk, below = self._storage.disk, self._storage.remote
        self._cache = Residency(
            self._memory,
            self.counters,
            disk_capacity_blocks=disk.capacity_blocks if disk else 0,
            remote=below is not None,
        )
        self._lower = self._open_lower(config)
        self._sessions = Sessions()
        self._namespaces: dict[NamespaceId, Mapping[str, str]] = {}
        self._puts: dict[int, PutTask] = {}
        self._ended: dict[int, TaskState] = {}
        self._reserved: set[StoreKey] = set()  # keys of running puts
        # An engine outlives its server, with tasks of the old one in flight: ids do not come again.
        self._ids = itertools.count((1 + secrets.randbits(20)) << 32)
        self._gets = Gets(
            self._cache,
            self._lower,
            self._lock,
            self._ids,
            self._remember,
            lease_seconds=_LEASE_SECONDS + config.load_timeout_seconds,
        )
        if config.prefault:
            threading.Thread(
                target=self._prefault, args=[on_prefault], name="kvstrata-prefault", daemon=True
            ).start()

    def _open_lower(self, config: Config) -> dict[LowerTier, Cascade]:
        lower: dict[LowerTier, Cascade] = {}
        disk, remote = self._storage.disk, self._storage.remote
        if disk is not None:
            self._cache.restore(disk.data.blocks())
            store = self._storage.as_blocks(disk.data)
            limits = _limits_of(config.disk_tier)
            lower["disk"] = Cascade("disk", store, self._cache, self._lock, limits=limits)
        if remote is not None:
            store = self._storage.as_blocks(remote.data)
            upkeep = self._storage.upkeep
            lower["remote"] = Cascade("remote", store, self._cache, self._lock, upkeep=upkeep)
        return lower

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
            for get in [g for g in self._gets.tasks.values() if g.owner == owner]:
                self._gets.end(get, TaskState.CANCELLED)
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

        The status is ``READY`` if all of it is in host memory. Else its slots are the part that
        is, and *settled* is called, on another thread, when the rest has arrived or failed:
        ``PROMOTING`` while known blocks are on their way up, before it ``SEARCHING`` while the
        remote tier is asked for blocks unknown here (then *settled* tells the end of the search
        too). With nothing found there is no task: ``task_id`` is 0, ``DONE``, or ``FAILED`` while
        not all workers of *owner* are attached.
        """
        self._gets.expire()
        with self._lock:
            if not self._sessions.can_transfer(owner):
                return TaskStatus(0, TaskState.FAILED)
            status, begin = self._gets.match(namespace, keys, owner, settled)
        begin()
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
            task = PutTask(next(self._ids), owner, namespace, [], [], [], [])
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
            self._puts[task.task_id] = task
            return self._status_of_put(task)

    def launch(self, task_ids: Sequence[int], *, owner: int = LOCAL_OWNER) -> None:
        """The copies of these tasks begin. Unknown tasks, and those of others, are passed over."""
        with self._lock:
            for task, state in self._moved(task_ids, owner, TaskEvent.LAUNCH):
                task.state = state
                if isinstance(task, GetTask):
                    self._gets.launch(task)

    def complete(self, task_ids: Sequence[int], *, owner: int = LOCAL_OWNER) -> None:
        """The copies of these running tasks have succeeded: saved blocks can be found from now."""
        with self._lock:
            for task, state in self._moved(task_ids, owner, TaskEvent.COMPLETE):
                if isinstance(task, GetTask):
                    self.counters.add(metrics.LOADED_BLOCKS, len(self._gets.ready_slots(task)))
                    self._gets.end(task, state)
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
                self._gets.end(task, state)
                for entry in reversed(task.entries):
                    if not entry.leases and not entry.forgotten and entry.host_slot != NO_SLOT:
                        self._cache.drop_from_host(entry)

    def cancel(self, task_ids: Sequence[int], *, owner: int = LOCAL_OWNER) -> None:
        """Give up tasks that are not running. The caller vouches that nobody will copy for them."""
        with self._lock:
            for task, state in self._moved(task_ids, owner, TaskEvent.CANCEL):
                if isinstance(task, GetTask):
                    self._gets.end(task, state)
                else:
                    for slot in self._end_put(task, state):
                        self._cache.release_slot(slot)

    def try_wait(self, task_ids: Sequence[int]) -> dict[int, TaskStatus]:
        """What is known of these tasks now. Tasks ended long ago are absent."""
        with self._lock:
            found = {}
            for task_id in task_ids:
                if task_id in self._gets.tasks:
                    found[task_id] = self._gets.status(self._gets.tasks[task_id])
                elif task_id in self._puts:
                    found[task_id] = self._status_of_put(self._puts[task_id])
                elif task_id in self._ended:
                    found[task_id] = TaskStatus(task_id, self._ended[task_id])
            return found

    def wait(self, task_ids: Sequence[int], timeout_seconds: float) -> dict[int, TaskStatus]:
        """``try_wait`` once all tasks have settled, or after *timeout_seconds*."""
        with self._lock:
            self._lock.wait_for(
                lambda: (
                    not any(
                        task_id in self._gets.tasks and self._gets.tasks[task_id].state in UNSETTLED
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
            if status.state not in UNSETTLED:
                self.cancel([status.task_id], owner=owner)

        status = self.get_match(namespace, keys, owner=owner, settled=release)
        if status.state is TaskState.READY:
            release(status)
            return 0
        return status.task_id

    def reset(self, namespace: NamespaceId) -> int:
        """Forget every block of *namespace*, below host memory durably so; how many were known.

        Blocks that are being saved at this moment will not become visible. On ``TierUnavailable``
        none is found either, but it could be after a restart; the drop is tried until it succeeds.
        """
        with self._gets.settling():
            for put in self._puts.values():
                put.stale = put.stale or put.namespace == namespace
            self._gets.forget(namespace)
            dropped = self._cache.forget(namespace)
            for lower in self._lower.values():
                lower.owe_drop(namespace)
        refused: TierUnavailable | None = None
        for lower in self._lower.values():
            try:
                lower.pay_drops()
            except TierUnavailable as e:
                refused = e
        if refused is not None:
            raise refused
        return dropped

    # -- what it looks like ------------------------------------------------------------------

    def stats(self) -> CacheReport:
        """Usage of each tier, counters, and what is known of namespaces and engines."""
        with self._lock:
            cache, memory = self._cache, self._memory
            usage = memory.usage()
            tiers = [
                TierReport(
                    "host",
                    memory.slots,
                    cache.host_used,
                    self.block_bytes,
                    backed_bytes=usage.backed_bytes,
                    padding_bytes=usage.padding_bytes,
                    longest_free_run=cache.longest_free_run(),
                )
            ]
            tiers += [lower.report() for lower in self._lower.values()]
            return CacheReport(
                server_id=self.server_id.hex(),
                tiers=tiers,
                counters=self.counters.snapshot(),
                running_gets=len(self._gets.tasks),
                running_puts=len(self._puts),
                namespaces=self._cache.describe(self._namespaces),
                engines=self._sessions.describe(),
                operations=[OperationReport(*c) for c in self.counters.operations.snapshot()],
            )

    def check(self) -> None:
        """Raises ``InvariantViolated`` unless every slot is accounted for exactly once."""
        with self._lock:
            reserved = [slot for put in self._puts.values() for slot in put.slots]
            reserved += self._gets.arriving_slots()
            reserved += self._sessions.orphaned_slots()
            self._cache.check(reserved)

    def close(self) -> None:
        """Write what no tier below has yet, at most ``drain_timeout_seconds`` each; release all."""
        for lower in self._lower.values():
            lower.close(self._drain_timeout_seconds)
        self._storage.close()

    # -- inside, with the lock held ----------------------------------------------------------

    def _publish(self, task: PutTask) -> None:
        """The bytes of *task* are in its slots: insert its blocks, unless a reset forbids it."""
        for key, parent, slot in zip(task.keys, task.parents, task.slots, strict=True):
            self._reserved.discard(key)
            entry = None if task.stale else self._cache.index.insert(key, parent)
            if entry is None or entry.host_slot != NO_SLOT:  # reset, or come from the remote tier
                self._cache.release_slot(slot)
            else:
                self._cache.put_in_host(entry, slot)
        self._cache.touch(self._cache.index.longest_prefix(task.keys))
        self.counters.add(metrics.SAVED_BLOCKS, 0 if task.stale else len(task.keys))
        del self._puts[task.task_id]
        self._remember(task.task_id, TaskState.DONE)
        for lower in self._lower.values():
            lower.wake()

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
            task = self._gets.tasks.get(task_id) or self._puts.get(task_id)
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

    def _status_of_put(self, task: PutTask) -> TaskStatus:
        generations = [self._memory.generation(slot) for slot in task.slots]
        return TaskStatus(task.task_id, task.state, task.slots, generations, task.missing)

    # -- inside, without the lock ------------------------------------------------------------

    def _prefault(self, progress: OnPrefault | None) -> None:
        try:
            self._memory.prefault(progress)
        except (OSError, ValueError) as e:
            _log.warning("host memory could not be prefaulted: %s", e)


def _limits_of(tier: DiskTier | None) -> TransferLimits:
    if tier is None:
        return TransferLimits()
    return TransferLimits(
        read_threads=tier.read_threads,
        write_threads=tier.write_threads,
        write_bytes_per_second=tier.write_bytes_per_second,
    )
