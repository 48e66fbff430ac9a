"""Get tasks: leases on a prefix of blocks, and bringing up what is not in host memory."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.keys import ABSENT, BlockIds, as_index
from kvstrata.core.types import NamespaceId, Read, StoreKey
from kvstrata.index.places import ARRIVING, DISK, HOST, REMOTE, WRITING
from kvstrata.manager.decisions import Decision
from kvstrata.manager.desk import Desk
from kvstrata.manager.planner import Plan, Planner, Reason, all_of
from kvstrata.manager.puts import distinct
from kvstrata.manager.residency import Residency, Slots, leading
from kvstrata.manager.tasks import (
    FINAL,
    UNSETTLED,
    GetTask,
    Lookup,
    TaskEvent,
    TaskState,
    TaskStatus,
    step,
)
from kvstrata.manager.writes import LowerTier
from kvstrata.observe import metrics
from kvstrata.observe.seldom import SeldomWarning

_log = logging.getLogger(__name__)

Settled = Callable[[TaskStatus], None]

_TIERS: Final[tuple[LowerTier, ...]] = ("disk", "remote")
_FINDABLE: Final = HOST | DISK | ARRIVING
_PLACES: Final = np.arange(256)  # every value of ``PrefixIndex.where``
# A block that is being saved again has a host slot, which nothing else may be read into.
_IS_FINDABLE: Final = ((_PLACES & _FINDABLE) != 0) & ((_PLACES & WRITING) == 0)
_ABSENT: Final = frozenset({Read.MISS, Read.CORRUPT, Read.FOREIGN})
_EXPIRY_SECONDS: Final = 1.0  # between two looks for leases that nobody returned


class Lower(Protocol):
    """A tier below host memory, as lookups see it: a ``Cascade``."""

    def promote(
        self,
        keys: Sequence[StoreKey],
        slots: Sequence[int],
        done: Callable[[int, Sequence[Read | None]], None],
        begin: Callable[[int, int], bool],
    ) -> None: ...

    @property
    def search_seconds(self) -> float: ...

    def is_off(self) -> bool: ...

    def relieve(self) -> None: ...

    def find(self, keys: Sequence[StoreKey], done: Callable[[int], None]) -> None: ...

    def owes_drop(self, namespace: NamespaceId) -> bool: ...


@dataclass(slots=True, eq=False)
class _Arrival:
    """Blocks of one tier that are being read into their host slots, for *tasks* to wait for."""

    source: LowerTier
    ids: BlockIds
    keys: list[StoreKey]
    slots: list[int]
    tasks: set[GetTask] = field(default_factory=set)
    began_at: float = field(default_factory=time.monotonic)


class _Search(NamedTuple):
    """Of the remote tier, for what follows the first *known_blocks* of a lookup."""

    known_blocks: int
    seconds: float  # that a request waits for it
    began_at: float


class Settling(NamedTuple):
    """Who is to be told, once the lock is free."""

    tasks: set[GetTask]  # may have settled
    told: list[tuple[Settled, TaskStatus]]


class Gets:
    """The get tasks of one manager. The lock of *desk* guards them, and is not held over I/O."""

    def __init__(
        self,
        cache: Residency,
        lower: Mapping[LowerTier, Lower],
        desk: Desk,
        *,
        planner: Planner,
        lease_seconds: float,
    ) -> None:
        self.tasks: dict[int, GetTask] = {}  # needs the lock
        self._cache = cache
        self._lower = lower
        self._lock = desk.lock
        self._counters = cache.counters
        self._desk = desk
        self._planner = planner
        self._lease_seconds = lease_seconds
        self._next_expiry = 0.0
        self._settled: dict[int, Settled] = {}
        self._arrivals: dict[int, _Arrival] = {}  # by block id, while it is being read
        self._warn_of_late = SeldomWarning(_log)

    def match(
        self, lookup: Lookup, owner: int, settled: Settled | None
    ) -> tuple[TaskStatus, Callable[[], None]]:
        """``KVManager.get_match``, and what is to be called next, without the lock. Needs it."""
        known = self._known_prefix(lookup)
        began_at = time.monotonic()
        task = GetTask(
            self._desk.new_id(),
            owner,
            lookup.namespace,
            began_at + self._lease_seconds,
            is_traffic=lookup.is_traffic,
            began_at=began_at,
        )
        arrivals = self._extend(task, lookup, known)
        unknown = lookup.keys[len(known) :] if len(task.ids) == len(known) else lookup.keys[:0]
        searched = self._searched_tier(lookup.namespace) if len(unknown) else None
        if searched is not None:  # what it has is leased, and no block twice
            lookup = replace(lookup, keys=distinct(lookup.keys))
            unknown = lookup.keys[len(known) :]
            searched = searched if len(unknown) else None
        self._count_lookup(task, len(lookup.keys) - (len(unknown) if searched else 0))
        if not len(task.ids) and searched is None:
            self._time_lookup(task)
            nothing = TaskStatus(0, TaskState.DONE, declined_blocks=task.declined_blocks)
            return nothing, lambda: None
        if searched is not None:
            task.state = TaskState.SEARCHING
        elif self._is_waiting(task):
            task.state = TaskState.PROMOTING
        else:
            self._time_lookup(task)
        self.tasks[task.task_id] = task
        if settled is not None and task.state in UNSETTLED:
            self._settled[task.task_id] = settled

        def begin() -> None:
            self._read(arrivals)
            if searched is not None:
                keys = [lookup.namespace + key.tobytes() for key in unknown]
                search = _Search(len(known), searched.search_seconds, time.monotonic())
                searched.find(keys, partial(self._found, task, lookup, search))

        return self.status(task), begin

    def launch(self, task: GetTask) -> None:
        """The copies of *task* begin, and have as long as the lease is. Needs the lock."""
        task.launched_blocks = len(self.ready(task))
        task.began_at = time.monotonic()
        task.deadline = task.began_at + self._lease_seconds

    def forget(self, namespace: NamespaceId) -> list[GetTask]:
        """What running searches find of *namespace* does not count; their tasks. Needs the lock."""
        stopped = [
            task
            for task in self.tasks.values()
            if task.state is TaskState.SEARCHING and task.namespace == namespace
        ]
        for task in stopped:
            task.state = step(task.state, TaskEvent.FOUND)
        return stopped

    def expire(self) -> None:
        """Take the leases of gets whose owner has forgotten them, and those of reads in vain."""
        now = time.monotonic()
        if now < self._next_expiry:
            return
        self._next_expiry = now + _EXPIRY_SECONDS
        with self._lock:
            for task in [t for t in self.tasks.values() if t.deadline < now]:
                _log.warning("task %d was given up: not ended in time", task.task_id)
                self.end(task, TaskState.CANCELLED)
        for lower in self._lower.values():
            lower.relieve()

    def end(self, task: GetTask, state: TaskState) -> None:
        """Return the leases of *task*. Needs the lock."""
        self._cache.unlease(task.ids)
        task.state = state
        del self.tasks[task.task_id]
        self._settled.pop(task.task_id, None)
        self._desk.remember(task.task_id, state)

    @property
    def leased_blocks(self) -> int:
        """Leases of all tasks together. Needs the lock."""
        return sum(len(task.ids) for task in self.tasks.values())

    def ready(self, task: GetTask) -> BlockIds:
        """The leading blocks of *task* that are in host memory. Needs the lock."""
        if task.state is TaskState.READY:
            return task.ids
        return task.ids[: leading(self._cache.has(task.ids, HOST))]

    def status(self, task: GetTask) -> TaskStatus:
        """What a client sees of *task*. Needs the lock."""
        slots = self._cache.index.host_slot[as_index(self.ready(task))]
        return TaskStatus(
            task.task_id,
            task.state,
            slots.tolist(),
            self._desk.memory.generations(slots).tolist(),
            matched_blocks=len(task.ids),
            disk_blocks=task.disk_blocks,
            remote_blocks=task.remote_blocks,
            declined_blocks=task.declined_blocks,
        )

    @contextmanager
    def settling(self) -> Iterator[Settling]:
        """Holds the lock, then tells those of the tasks added meanwhile that have settled."""
        settling = Settling(set(), [])
        with self._lock:
            yield settling
            for task in settling.tasks:
                if task.state is not TaskState.PROMOTING or self._is_waiting(task):
                    continue
                ready = self.ready(task)
                task.state = step(task.state, TaskEvent.PROMOTE)
                self._cache.unlease(task.ids[len(ready) :])
                task.ids = ready
                self._time_lookup(task)
                settled = self._settled.pop(task.task_id, None)
                if settled is not None:
                    settling.told.append((settled, self.status(task)))
            self._lock.notify_all()
        for settled, status in settling.told:
            settled(status)

    # -- inside --------------------------------------------------------------------------------

    def _known_prefix(self, lookup: Lookup) -> BlockIds:
        """The leading blocks that are in host memory, on disk or on their way up."""
        ids = self._cache.index.longest_prefix(lookup.namespace, lookup.keys)
        if isinstance(as_index(ids), slice):  # no key comes twice
            everywhere, somewhere = self._cache.places(ids)
            if everywhere & _FINDABLE and not somewhere & WRITING:
                return ids
        elif not (ids[1:] > ids[:-1]).all():
            _, first = np.unique(ids, return_index=True)
            ids = ids[: leading(np.isin(np.arange(len(ids)), first))]
        return ids[: leading(_IS_FINDABLE.take(self._cache.index.where.take(ids)))]

    def _extend(self, task: GetTask, lookup: Lookup, ids: BlockIds) -> list[_Arrival]:
        """Lease *ids*, which follow the blocks of *task*, as far as that pays and there is room.

        Those that are nowhere here are in the remote tier. Returns what must be read.
        """
        self._cache.lease(ids)  # before slots are taken: none of them may be the victim
        everywhere, _ = self._cache.places(ids)
        if everywhere & HOST:  # mostly: nothing is to be read
            plan = all_of(len(ids), lookup.blocks_per_second)
            arrivals: list[_Arrival] = []
        else:
            plan, arrivals = self._fetch(task, lookup, ids)
        taken = ids[: plan.blocks]
        task.ids = np.concatenate([task.ids, taken]) if len(task.ids) else taken
        task.declined_blocks += len(ids) - plan.blocks
        self._cache.touch(task.ids)
        if task.is_traffic:
            self._explain(task, lookup, len(ids), plan)
        return arrivals

    def _fetch(self, task: GetTask, lookup: Lookup, ids: BlockIds) -> tuple[Plan, list[_Arrival]]:
        """How many of the leased *ids* *task* takes, and what must be read for them.

        The others are not leased any more.
        """
        cache = self._cache
        sources = self._sources(ids)
        usable = self._usable(sources)
        plan = self._planner.plan(sources[:usable], _TIERS, lookup.blocks_per_second)
        if plan.blocks == usable < len(ids):
            plan = plan._replace(reason=Reason.OFF)
        lacking = np.flatnonzero(sources[: plan.blocks])
        slots = cache.take_slots(task.namespace, len(lacking))
        if len(slots) < len(lacking):
            plan = plan._replace(blocks=int(lacking[len(slots)]), reason=Reason.NO_ROOM)
        cache.unlease(ids[plan.blocks :])
        taken, sources = ids[: plan.blocks], sources[: plan.blocks]
        here = cache.has(taken, HOST)
        on_disk = ~here & cache.has(taken, DISK)
        task.disk_blocks += int(np.count_nonzero(on_disk))
        task.remote_blocks += int(np.count_nonzero(~here & ~on_disk))
        before = self._awaited(taken)
        arrivals = self._reserve(
            taken[lacking[: len(slots)]], sources[lacking[: len(slots)]], slots
        )
        for arrival in before | set(arrivals):
            arrival.tasks.add(task)
        return plan, arrivals

    def _sources(self, ids: BlockIds) -> NDArray[np.uint8]:
        """For each block 0 if it is in host memory or on the way there, else 1 + its tier's index."""
        here = self._cache.has(ids, HOST | ARRIVING)
        on_disk = self._cache.has(ids, DISK)
        return np.where(here, 0, np.where(on_disk, 1, 2)).astype(np.uint8)

    def _usable(self, sources: NDArray[np.uint8]) -> int:
        """How many of ``_sources`` come before the first of a tier that is switched off.

        Nobody leaves host memory for what could not be read anyway.
        """
        usable = len(sources)
        for number, tier in enumerate(_TIERS, 1):
            here = sources == number
            if here.any() and self._lower[tier].is_off():
                usable = min(usable, int(here.argmax()))
        return usable

    def _reserve(self, ids: BlockIds, sources: NDArray[np.uint8], slots: Slots) -> list[_Arrival]:
        """*ids* are about to be read into *slots*."""
        self._cache.reserve(ids, slots, ARRIVING)
        arrivals = []
        for number, tier in enumerate(_TIERS, 1):
            here = sources == number
            if not here.any():
                continue
            if tier == "remote":
                self._cache.index.set_where(ids[here], REMOTE)
            keys = self._cache.index.store_keys(ids[here])
            arrivals.append(_Arrival(tier, ids[here], keys, slots[here].tolist()))
            self._arrivals.update(dict.fromkeys(ids[here].tolist(), arrivals[-1]))
        return arrivals

    def _awaited(self, ids: BlockIds) -> set[_Arrival]:
        """The reads that some of *ids* come from."""
        arriving = ids[self._cache.has(ids, ARRIVING)]
        return {self._arrivals[block] for block in arriving.tolist()}

    def _read(self, arrivals: Sequence[_Arrival]) -> None:
        for arrival in arrivals:
            done, begin = partial(self._arrived, arrival), partial(self._begin, arrival)
            self._lower[arrival.source].promote(arrival.keys, arrival.slots, done, begin)

    def _found(self, task: GetTask, lookup: Lookup, search: _Search, count: int) -> None:
        """The remote tier has *count* blocks of what *lookup* asks for behind the known ones."""
        known = search.known_blocks
        with self.settling() as settling:
            settling.tasks.add(task)
            unknown = len(lookup.keys) - known
            if task.is_traffic:
                self._counters.add(metrics.LOOKUP_BLOCKS, count, "remote")
                self._counters.add(metrics.LOOKUP_BLOCKS, unknown - count, "none")
            if task.state is not TaskState.SEARCHING:
                self._found_late(task, lookup, search, count)
                return
            task.state = step(task.state, TaskEvent.FOUND)
            above = int(task.ids[-1]) if len(task.ids) else ABSENT
            keys = lookup.keys[known : known + count]
            ids = self._cache.index.insert(lookup.namespace, keys, above)
            free = leading(~self._cache.has(ids, WRITING))  # somebody is saving the next one
            self._cache.index.settle(ids[free:])  # first: some may be the victims of what follows
            arrivals = self._extend(task, lookup, ids[:free])
            if arrivals and task.task_id in self._settled:
                settling.told.append((self._settled[task.task_id], self.status(task)))
        self._read(arrivals)

    def _found_late(self, task: GetTask, lookup: Lookup, search: _Search, count: int) -> None:
        """*task* has not waited for the *count* blocks that were found; it may have ended early."""
        seconds = time.monotonic() - search.began_at
        if seconds <= search.seconds:
            return
        self._counters.add(metrics.UNANSWERED_LOOKUPS, 1)
        self._explain(task, lookup, count, Plan(0, Reason.UNANSWERED, 0.0, None))
        self._warn_of_late(
            "the tier that nodes share took %.0f ms to say what it has of a prompt, and requests wait "
            "%g ms: what it has is computed; raise remote_lookup_seconds, or share blocks through "
            "something nearer",
            seconds * 1e3,
            search.seconds * 1e3,
        )

    def _begin(self, arrival: _Arrival, start: int, count: int) -> bool:
        """Whether *count* blocks of *arrival* are to be read: not if nobody has a use for them."""
        with self._lock:
            ids = arrival.ids[start : start + count]
            if any(_wants(task, ids) for task in arrival.tasks):
                return True
            for block in ids.tolist():
                del self._arrivals[block]
            self._cache.disappoint(ids, np.zeros(len(ids), np.bool_), arrival.source)
            return False

    def _arrived(self, arrival: _Arrival, start: int, reads: Sequence[Read | None]) -> None:
        """Some blocks of *arrival* have been read, or could not be."""
        ids = arrival.ids[start : start + len(reads)]
        hit = np.array([read is Read.HIT for read in reads], np.bool_)
        absent = np.array([read in _ABSENT for read in reads], np.bool_)
        with self.settling() as settling:
            settling.tasks.update(arrival.tasks)
            for block in ids.tolist():
                del self._arrivals[block]
            if hit.any():
                seconds = time.monotonic() - arrival.began_at
                self._counters.durations.observe(metrics.PROMOTION_SECONDS, seconds, arrival.source)
            self._counters.add(metrics.PROMOTED_BLOCKS, int(hit.sum()), arrival.source)
            self._counters.add(metrics.CORRUPT_BLOCKS, sum(r is Read.CORRUPT for r in reads))
            self._cache.fill(ids[hit], ARRIVING)
            self._cache.disappoint(ids[~hit], absent[~hit], arrival.source)
            if not hit.all():
                for task in arrival.tasks:
                    self._cut(task)

    def _cut(self, task: GetTask) -> None:
        """What lies behind a block that does not come is of no use to *task*. Needs the lock."""
        if task.state is not TaskState.PROMOTING:
            return  # what a search finds has to follow on all that it began with
        coming = leading(self._cache.has(task.ids, HOST | ARRIVING))
        self._cache.unlease(task.ids[coming:])
        task.ids = task.ids[:coming]

    def _is_waiting(self, task: GetTask) -> bool:
        _, somewhere = self._cache.places(task.ids)
        return bool(somewhere & ARRIVING)

    def _count_lookup(self, task: GetTask, blocks: int) -> None:
        """*task* is what this node knows of a lookup of *blocks*."""
        if not task.is_traffic:
            return
        found, disk, remote = len(task.ids), task.disk_blocks, task.remote_blocks
        self._counters.add(metrics.LOOKUPS, 1)
        self._counters.add(metrics.LOOKUP_BLOCKS, found - disk - remote, "host")
        self._counters.add(metrics.LOOKUP_BLOCKS, disk, "disk")
        self._counters.add(metrics.LOOKUP_BLOCKS, remote, "remote")
        self._counters.add(metrics.LOOKUP_BLOCKS, blocks - found, "none")

    def _time_lookup(self, task: GetTask) -> None:
        """*task* waits for nothing any more."""
        if not task.is_traffic:
            return
        seconds = time.monotonic() - task.began_at
        self._counters.durations.observe(metrics.LOOKUP_SECONDS, seconds, task.lowest_tier)

    def _explain(self, task: GetTask, lookup: Lookup, found: int, plan: Plan) -> None:
        self._counters.add(metrics.DECLINED_BLOCKS, found - plan.blocks, plan.reason.value)
        host = len(task.ids) - task.disk_blocks - task.remote_blocks
        end = len(task.ids) - plan.blocks + found
        self._desk.decisions.add(
            Decision(
                time.time(),
                "get",
                lookup.request,
                lookup.namespace.hex(),
                task.task_id,
                len(lookup.keys),
                host_blocks=host,
                disk_blocks=task.disk_blocks,
                remote_blocks=task.remote_blocks,
                taken_blocks=len(task.ids),
                reason=plan.reason.value,
                load_seconds=plan.load_seconds,
                recompute_seconds=plan.recompute_seconds,
                last_block=lookup.keys[end - 1].tobytes().hex() if end else "",
            )
        )

    def _searched_tier(self, namespace: NamespaceId) -> Lower | None:
        """The tier to be asked for blocks that the index does not know."""
        remote = self._lower.get("remote")
        return None if remote is None or remote.owes_drop(namespace) else remote


def _wants(task: GetTask, ids: BlockIds) -> bool:
    """Whether *task* still waits for some of *ids*."""
    return task.state not in FINAL and bool(np.isin(ids, task.ids).any())
