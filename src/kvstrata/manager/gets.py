"""Get tasks: leases on a prefix of blocks, and bringing up what is not in host memory."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from kvstrata.core.keys import ABSENT, BlockIds, KeyArray, StoreKeys, as_index
from kvstrata.core.types import BlockKey, NamespaceId, Read
from kvstrata.index.places import ARRIVING, DISK, HOST, REMOTE, WRITING
from kvstrata.manager.aims import Aims
from kvstrata.manager.desk import Desk
from kvstrata.manager.explaining import explain
from kvstrata.manager.planner import Plan, Planner, Reason, all_of
from kvstrata.manager.puts import distinct
from kvstrata.manager.reads import FINDABLE, TIERS, Arrival, Lower, Reads
from kvstrata.manager.residency import Residency, leading
from kvstrata.manager.states import Question, question_of
from kvstrata.manager.tasks import (
    FINAL,
    UNSETTLED,
    Aim,
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
from kvstrata.transfer.finder import Found

_log = logging.getLogger(__name__)

Settled = Callable[[TaskStatus], None]
OnFound = Callable[[NamespaceId, KeyArray, BlockKey | None], None]

_ABSENT: Final = frozenset({Read.MISS, Read.CORRUPT, Read.FOREIGN})
_EXPIRY_SECONDS: Final = 1.0  # between two looks for leases that nobody returned


class _Search(NamedTuple):
    """Of the remote tier, for what follows the first *known_blocks* of a lookup."""

    known_blocks: int
    seconds: float  # that a request waits for it
    began_at: float


class Settling(NamedTuple):
    """Who is to be told, and what is to be read, once the lock is free."""

    tasks: set[GetTask]  # may have settled
    told: list[tuple[Settled, TaskStatus]]
    reads: list[Arrival]


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
        on_found: OnFound = lambda _namespace, _keys, _parent: None,
    ) -> None:
        """*on_found* hears, with the lock, what the remote tier is found to have, behind which block."""
        self.tasks: dict[int, GetTask] = {}  # needs the lock
        self._cache = cache
        self._lower = lower
        self._lock = desk.lock
        self._counters = cache.counters
        self._desk = desk
        self._planner = planner
        self._lease_seconds = lease_seconds
        self._on_found = on_found
        self._next_expiry = 0.0
        self._settled: dict[int, Settled] = {}
        self._explain = partial(explain, desk, cache.counters)
        self._reads = Reads(cache, lower)
        self._aims = Aims(cache, self._reads, planner, self._explain)
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
        arrivals, found = self._take_known(task, lookup, known)
        searched = self._searched_tier(lookup.namespace) if found < len(lookup.keys) else None
        if searched is not None:  # what it has is leased, and no block twice
            lookup = replace(lookup, keys=distinct(lookup.keys))
            searched = searched if found < len(lookup.keys) else None
        self._count_lookup(task, found if searched is not None else len(lookup.keys))
        if task.aim is not None and searched is None:
            self._aims.trim(task, task.aim)
        if not len(task.ids) and searched is None:
            self._time_lookup(task)
            nothing = TaskStatus(
                0,
                TaskState.DONE,
                declined_blocks=task.declined_blocks,
                untold_blocks=task.untold_blocks,
            )
            return nothing, lambda: None
        if searched is not None:
            task.state = TaskState.SEARCHING
        elif self._reads.is_waiting(task):
            task.state = TaskState.PROMOTING
        else:
            self._time_lookup(task)
        self.tasks[task.task_id] = task
        if settled is not None and task.state in UNSETTLED:
            self._settled[task.task_id] = settled

        def begin() -> None:
            self._read(arrivals)
            if searched is None:
                return
            search = _Search(len(known), searched.search_seconds, time.monotonic())
            if task.aim is not None:
                self._search_ends(task, task.aim, searched, lookup, search)
            else:
                keys = StoreKeys(lookup.namespace, lookup.keys[found:])
                searched.find(keys, partial(self._found, task, lookup, search), lookup.request)

        return self.status(task), begin

    def launch(self, task: GetTask) -> None:
        """The copies of *task* begin, and have as long as the lease is. Needs the lock."""
        ready = self.ready(task)
        states = task.aim.lookup.states if task.aim is not None else task.states
        task.launched_blocks = max(0, len(ready) - states)
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
        self._unlease(task)
        task.state = state
        del self.tasks[task.task_id]
        self._settled.pop(task.task_id, None)
        self._desk.remember(task.task_id, state)

    @property
    def leased_blocks(self) -> int:
        """Leases of all tasks together. Needs the lock."""
        return sum(len(task.held) for task in self.tasks.values())

    def ready(self, task: GetTask) -> BlockIds:
        """The leading blocks of *task* that are in host memory. Needs the lock.

        With states, as far as the last of its ends where they are there, too, and these behind.
        """
        if task.aim is not None:
            return self._aims.reached(task, task.aim)
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
            matched_blocks=task.blocks,
            disk_blocks=task.disk_blocks,
            remote_blocks=task.remote_blocks,
            declined_blocks=task.declined_blocks,
            untold_blocks=task.untold_blocks,
        )

    @contextmanager
    def settling(self) -> Iterator[Settling]:
        """Holds the lock, then tells those of the tasks added meanwhile that have settled."""
        settling = Settling(set(), [], [])
        with self._lock:
            yield settling
            for task in settling.tasks:
                if task.state is not TaskState.PROMOTING or self._reads.is_waiting(task):
                    continue
                if task.aim is not None:
                    settling.reads.extend(self._aims.fall_back(task, task.aim))
                    if self._reads.is_waiting(task):
                        continue
                    self._aims.land(task, task.aim)
                ready = self.ready(task)
                task.state = step(task.state, TaskEvent.PROMOTE)
                self._end_at(task, len(ready))
                self._time_lookup(task)
                settled = self._settled.pop(task.task_id, None)
                if settled is not None:
                    settling.told.append((settled, self.status(task)))
            self._lock.notify_all()
        for settled, status in settling.told:
            settled(status)
        self._read(settling.reads)

    # -- inside --------------------------------------------------------------------------------

    def _known_prefix(self, lookup: Lookup) -> BlockIds:
        """The leading blocks that are in host memory, on disk or on their way up."""
        ids = self._cache.index.longest_prefix(lookup.namespace, lookup.keys)
        if isinstance(as_index(ids), slice):  # no key comes twice
            everywhere, somewhere = self._cache.places(ids)
            if everywhere & (HOST | ARRIVING) and not somewhere & WRITING:
                return ids
        elif not (ids[1:] > ids[:-1]).all():
            _, first = np.unique(ids, return_index=True)
            ids = ids[: leading(np.isin(np.arange(len(ids)), first))]
        return ids[: leading(self._reads.findable().take(self._cache.index.where.take(ids)))]

    def _take_known(
        self, task: GetTask, lookup: Lookup, known: BlockIds
    ) -> tuple[list[Arrival], int]:
        """Lease what pays of *known*. What must be read, and how many keys need not be searched for.

        If not all that is known is taken, what lies behind is of no use.
        """
        if lookup.states:
            arrivals, is_open = self._aims.begin(task, lookup, known)
            return arrivals, task.blocks if is_open else len(lookup.keys)
        arrivals = self._extend(task, lookup, known)
        if len(task.ids) == len(known):
            return arrivals, len(known)
        if self._searched_tier(lookup.namespace) is not None:
            task.untold_blocks = len(lookup.keys) - len(known)
        return arrivals, len(lookup.keys)

    def _extend(self, task: GetTask, lookup: Lookup, ids: BlockIds) -> list[Arrival]:
        """Lease *ids*, which follow the blocks of *task*, as far as that pays and there is room.

        Those that are nowhere here are in the remote tier. Returns what must be read.
        """
        self._cache.lease(ids)  # before slots are taken: none of them may be the victim
        everywhere, _ = self._cache.places(ids)
        if everywhere & HOST:  # mostly: nothing is to be read
            plan = all_of(len(ids), lookup.blocks_per_second)
            arrivals: list[Arrival] = []
        else:
            plan, arrivals = self._fetch(task, lookup, ids)
        taken = ids[: plan.blocks]
        task.ids = np.concatenate([task.ids, taken]) if len(task.ids) else taken
        task.declined_blocks += len(ids) - plan.blocks
        self._cache.touch(task.ids)
        self._explain(task, lookup, len(ids), plan)
        return arrivals

    def _fetch(self, task: GetTask, lookup: Lookup, ids: BlockIds) -> tuple[Plan, list[Arrival]]:
        """How many of the leased *ids* *task* takes, and what must be read for them.

        The others are not leased any more.
        """
        cache = self._cache
        sources = self._reads.sources(ids)
        usable = self._reads.usable(sources)
        plan = self._planner.plan(sources[:usable], TIERS, lookup.blocks_per_second)
        if plan.blocks == usable < len(ids):
            plan = plan._replace(reason=Reason.OFF)
        lacking = np.flatnonzero(sources[: plan.blocks])
        slots = cache.take_slots(task.namespace, len(lacking))
        if len(slots) < len(lacking):
            plan = plan._replace(blocks=int(lacking[len(slots)]), reason=Reason.NO_ROOM)
        cache.unlease(ids[plan.blocks :])
        taken, sources = ids[: plan.blocks], sources[: plan.blocks]
        self._reads.count(task, taken, sources)
        before = self._reads.awaited(taken)
        arrivals = self._reads.reserve(
            taken[lacking[: len(slots)]], sources[lacking[: len(slots)]], slots
        )
        for arrival in before | set(arrivals):
            arrival.tasks.add(task)
        return plan, arrivals

    def _read(self, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            done, begin = partial(self._arrived, arrival), partial(self._begin, arrival)
            self._lower[arrival.source].promote(arrival.keys, arrival.slots, done, begin)

    def _found(self, task: GetTask, lookup: Lookup, search: _Search, found: Found) -> None:
        """The remote tier tells what it has of the blocks of *lookup* behind the known ones."""
        known, count = search.known_blocks, found.there
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
            self._reads.told(ids[:free])
            self._note_found(task, lookup, known, known + free)
            arrivals = self._extend(task, lookup, ids[:free])
            beyond = self._cache.index.longest_prefix(
                lookup.namespace, lookup.keys[known + count :]
            )
            here = leading(self._cache.has(beyond, FINDABLE | WRITING))  # on a disk that is off
            task.untold_blocks = count - free + max(found.untold, here)
            if arrivals and task.task_id in self._settled:
                settling.told.append((self._settled[task.task_id], self.status(task)))
        self._read(arrivals)

    def _note_found(self, task: GetTask, lookup: Lookup, known: int, end: int) -> None:
        """The remote tier has blocks *known* to *end* of *lookup*."""
        if task.is_traffic and known < end:
            above = lookup.keys[known - 1].tobytes() if known else None
            self._on_found(lookup.namespace, lookup.keys[known:end], above)

    def _found_late(self, task: GetTask, lookup: Lookup, search: _Search, count: int) -> None:
        """*task* has not waited for the *count* blocks that were found; it may have ended early."""
        seconds = time.monotonic() - search.began_at
        if seconds <= search.seconds or not task.is_traffic:
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

    def _begin(self, arrival: Arrival, start: int, count: int) -> bool:
        """Whether *count* blocks of *arrival* are to be read: not if nobody has a use for them."""
        with self._lock:
            ids = arrival.ids[start : start + count]
            if any(_wants(task, ids) for task in arrival.tasks):
                return True
            for block in ids.tolist():
                del self._reads.arrivals[block]
            self._cache.disappoint(ids, np.zeros(len(ids), np.bool_), arrival.source)
            return False

    def _arrived(self, arrival: Arrival, start: int, reads: Sequence[Read | None]) -> None:
        """Some blocks of *arrival* have been read, or could not be."""
        ids = arrival.ids[start : start + len(reads)]
        hit = np.array([read is Read.HIT for read in reads], np.bool_)
        absent = np.array([read in _ABSENT for read in reads], np.bool_)
        with self.settling() as settling:
            settling.tasks.update(arrival.tasks)
            for block in ids.tolist():
                del self._reads.arrivals[block]
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
        self._end_at(task, leading(self._cache.has(task.ids, HOST | ARRIVING)))

    def _end_at(self, task: GetTask, blocks: int) -> None:
        """No more than *blocks* of *task* come. Needs the lock."""
        if blocks == len(task.ids):
            return
        behind = task.ids[blocks:]
        if self._cache.has(behind[:1], DISK | REMOTE).any():  # it could not be read
            task.untold_blocks += len(behind)
        self._cache.unlease(behind)
        task.ids = task.ids[:blocks]

    def _unlease(self, task: GetTask) -> None:
        """Return all that *task* has leased."""
        self._cache.unlease(task.ids)
        if task.aim is not None:
            for end in task.aim.ends:
                self._cache.unlease(end.ids)

    def _search_ends(
        self, task: GetTask, aim: Aim, searched: Lower, lookup: Lookup, search: _Search
    ) -> None:
        """Look for ends behind the one that *task* has: first for blocks, then for states."""
        aim.lookup = lookup
        keys = StoreKeys(lookup.namespace, lookup.keys[search.known_blocks :])
        ask = partial(self._ask_for_states, task, aim, searched, search)
        if keys:
            searched.find(keys, ask, lookup.request)
        else:
            ask(Found(0))

    def _ask_for_states(
        self, task: GetTask, aim: Aim, searched: Lower, search: _Search, found: Found
    ) -> None:
        """The remote tier tells what it has of the blocks behind the known ones."""
        with self._lock:
            question = question_of(aim.lookup, task.blocks, search.known_blocks + found.there)
        told = partial(self._found_ends, task, aim, search, question)
        if question.keys:
            searched.ask(question.keys, told, aim.lookup.request)
        else:
            told([])

    def _found_ends(
        self, task: GetTask, aim: Aim, search: _Search, question: Question, there: Sequence[bool]
    ) -> None:
        """The remote tier has told which of the states of *question* are *there*."""
        with self.settling() as settling:
            settling.tasks.add(task)
            known, counted = search.known_blocks, aim.counted
            if task.state is not TaskState.SEARCHING:
                self._count_found(task, aim, counted, counted)
                late = question.blocks[0] - known if any(there) else 0
                self._found_late(task, aim.lookup, search, late)
                return
            task.state = step(task.state, TaskEvent.FOUND)
            arrivals = self._aims.found(task, aim, known, question, there)
            self._note_found(task, aim.lookup, known, task.blocks)
            self._count_found(task, aim, counted, task.blocks)
            if arrivals and task.task_id in self._settled:
                settling.told.append((self._settled[task.task_id], self.status(task)))
            settling.reads.extend(arrivals)

    def _count_found(self, task: GetTask, aim: Aim, counted: int, blocks: int) -> None:
        """A search has ended: *task* has *blocks*, of which *counted* were known before it.

        Fewer if some could not be read meanwhile.
        """
        if not task.is_traffic:
            return
        found = max(blocks, counted)
        self._counters.add(metrics.LOOKUP_BLOCKS, found - counted, "remote")
        self._counters.add(metrics.LOOKUP_BLOCKS, len(aim.lookup.keys) - found, "none")

    def _count_lookup(self, task: GetTask, blocks: int) -> None:
        """*task* is what this node knows of a lookup of *blocks*."""
        if not task.is_traffic:
            return
        found, disk, remote = task.blocks, task.disk_blocks, task.remote_blocks
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

    def _searched_tier(self, namespace: NamespaceId) -> Lower | None:
        """The tier to be asked for blocks that the index does not know."""
        remote = self._lower.get("remote")
        return None if remote is None or remote.owes_drop(namespace) else remote


def _wants(task: GetTask, ids: BlockIds) -> bool:
    """Whether *task* still waits for some of *ids*."""
    return task.state not in FINAL and bool(np.isin(ids, task.held).any())
