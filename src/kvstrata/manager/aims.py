"""Where lookups with states end, and what is leased and read for that. See ``states``."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.keys import ABSENT, BlockIds
from kvstrata.index.places import HOST, REMOTE, WRITING
from kvstrata.manager.planner import Plan, Planner, Reason
from kvstrata.manager.reads import FINDABLE, TIERS, Arrival, Reads
from kvstrata.manager.residency import Residency, Slots, leading
from kvstrata.manager.states import MOST_ENDS, Question, ends_known, ends_told
from kvstrata.manager.tasks import Aim, End, GetTask, Lookup

__all__ = ["Aims"]


class Aims:
    """Moves the ends of get tasks. Needs the manager's lock.

    A task leases the blocks up to its end, the states there, and those of a few nearer ends, which it
    falls back on. While a search runs it leases all blocks that it began with.
    """

    def __init__(
        self,
        cache: Residency,
        reads: Reads,
        planner: Planner,
        explain: Callable[[GetTask, Lookup, int, Plan], None],
    ) -> None:
        self._cache = cache
        self._reads = reads
        self._planner = planner
        self._explain = explain

    def begin(self, task: GetTask, lookup: Lookup, known: BlockIds) -> tuple[list[Arrival], bool]:
        """Lease all that is known, aim at an end of it, and say whether a better one may be elsewhere."""
        ends = ends_known(self._cache, lookup, len(known), self._reads.findable())
        self._cache.lease(known)
        task.ids, task.aim = known, Aim(lookup)
        arrivals = self._aim(task, task.aim, ends)
        return arrivals, not ends or task.blocks == ends[-1].blocks

    def _aim(self, task: GetTask, aim: Aim, ends: Sequence[End]) -> list[Arrival]:
        """Have *task* end at the best of *ends*, ascending; what must be read for it.

        Their blocks are leased. Leases the states of that end, and of a few to fall back on.
        """
        cache = self._cache
        if not _are_distinct(task, ends):  # as no engine's keys are: no state is what it seems
            states = np.concatenate([end.ids for end in ends])
            cache.index.settle(np.unique(states))  # a search may have made them known
            ends = []
        for end in ends:
            cache.lease(end.ids)  # before slots are taken, and before they are returned below
        for end in aim.ends:
            cache.unlease(end.ids)
        ways = self._ways(task, ends)
        plan = Plan(0, Reason.OFF if ends else Reason.ALL, 0.0, None)
        if ways:
            plan = self._planner.choose(
                [(end.blocks, sources) for end, sources in ways],
                TIERS,
                aim.lookup.blocks_per_second,
            )
        ways = [way for way in ways if way[0].blocks <= plan.blocks]
        slots, ways = self._slots_for(task, ways)
        aim.ends = [end for end, _ in ways[-MOST_ENDS:]]
        plan = plan if task.blocks == plan.blocks else plan._replace(reason=Reason.NO_ROOM)
        for end in ends:
            if not any(end is kept for kept in aim.ends):
                cache.unlease(end.ids)
        arrivals: list[Arrival] = []
        if ways:
            arrivals = self._go(task, aim, ways[-1][1], slots)
        found = ends[-1].blocks if ends else 0
        task.declined_blocks = found - task.blocks
        self._explain(task, aim.lookup, found, plan._replace(blocks=task.blocks))
        return arrivals

    def _ways(self, task: GetTask, ends: Sequence[End]) -> list[tuple[End, NDArray[np.uint8]]]:
        """The *ends* that can be reached, ascending, and the sources of what each takes.

        None that is nearer than one that is all in host memory.
        """
        ways: list[tuple[End, NDArray[np.uint8]]] = []
        for end in reversed(ends):
            ids = np.concatenate([task.ids[: end.blocks], end.ids])
            _, somewhere = self._cache.places(ids)
            there = self._cache.has(ids, FINDABLE | REMOTE)
            if somewhere & WRITING or not there.all():
                continue
            sources = self._reads.sources(ids)
            if self._reads.usable(sources) == len(sources):
                ways.insert(0, (end, sources))
                if not sources.any():
                    break
        return ways

    def _slots_for(
        self, task: GetTask, ways: list[tuple[End, NDArray[np.uint8]]]
    ) -> tuple[Slots, list[tuple[End, NDArray[np.uint8]]]]:
        """Host slots for what the last of *ways* lacks; *ways* without those for which there is no room."""
        while ways:
            lacking = int(np.count_nonzero(ways[-1][1]))
            slots = self._cache.take_slots(task.namespace, lacking)
            if len(slots) == lacking:
                return slots, ways
            self._cache.release_slots(slots)
            ways = ways[:-1]
        return np.empty(0, np.int32), ways

    def _go(
        self, task: GetTask, aim: Aim, sources: NDArray[np.uint8], slots: Slots
    ) -> list[Arrival]:
        """*task* goes for its last end, and *slots* are for what that lacks."""
        cache, end = self._cache, aim.ends[-1]
        ids = np.concatenate([task.ids[: end.blocks], end.ids])
        new = slice(aim.counted, end.blocks)
        self._reads.count(task, ids[new], sources[new])
        aim.tried, aim.counted = end.blocks, max(aim.counted, end.blocks)
        lacking = np.flatnonzero(sources)
        before = self._reads.awaited(ids)
        arrivals = self._reads.reserve(ids[lacking], sources[lacking], slots)
        for arrival in before | set(arrivals):
            arrival.tasks.add(task)
        cache.touch(ids)
        return arrivals

    def found(
        self, task: GetTask, aim: Aim, known: int, question: Question, there: Sequence[bool]
    ) -> list[Arrival]:
        """A search has ended, that had begun with *known* blocks; what must be read for its best end.

        The remote tier has the blocks up to where *question* begins, and of its states those *there*.
        """
        ends = list(aim.ends)
        if question.blocks:
            self._take_found(task, aim.lookup, known, question.blocks[0])
            findable = self._reads.findable()
            ends += ends_told(self._cache, aim.lookup, question, there, findable, task.ids)
        arrivals = self._aim(task, aim, ends)
        self.trim(task, aim)
        return arrivals

    def _take_found(self, task: GetTask, lookup: Lookup, known: int, end: int) -> None:
        """Lease the blocks from *known* to *end* of *lookup*, which the remote tier has."""
        index = self._cache.index
        if known == end:
            return
        above = int(task.ids[-1]) if len(task.ids) else ABSENT
        ids = index.insert(lookup.namespace, lookup.keys[known:end], above)
        free = leading(~self._cache.has(ids, WRITING))  # somebody is saving the next one
        index.settle(ids[free:])
        ids = ids[:free]
        self._cache.lease(ids)
        self._reads.told(ids)
        task.ids = np.concatenate([task.ids, ids])

    def fall_back(self, task: GetTask, aim: Aim) -> list[Arrival]:
        """Aim nearer if *task* has not reached its end; what must be read for it."""
        reached = self._end_reached(task, aim)
        if reached is not None and reached.blocks == aim.tried:
            return []
        most = min(leading(self._cache.has(task.ids, HOST)), aim.tried - 1)
        known = ends_known(self._cache, aim.lookup, max(0, most), self._reads.findable())
        ends = {end.blocks: end for end in [*known, *aim.ends] if end.blocks <= most}
        return self._aim(task, aim, [ends[blocks] for blocks in sorted(ends)])

    def trim(self, task: GetTask, aim: Aim) -> None:
        """Give back what lies behind the end, and if nothing is awaited be there."""
        self._cache.unlease(task.ids[task.blocks :])
        task.ids = task.ids[: task.blocks]
        if not self._reads.is_waiting(task):
            self.land(task, aim)

    def land(self, task: GetTask, aim: Aim) -> None:
        """Nothing is awaited: *task* ends where it has come to."""
        end = self._end_reached(task, aim)
        blocks = end.blocks if end is not None else 0
        ids = self.reached(task, aim)
        self._cache.unlease(task.ids[blocks:])
        for each in aim.ends:
            if each is not end:
                self._cache.unlease(each.ids)
        task.ids, task.states, task.aim = ids, len(ids) - blocks, None
        task.disk_blocks = min(task.disk_blocks, blocks)
        task.remote_blocks = min(task.remote_blocks, blocks - task.disk_blocks)

    def _end_reached(self, task: GetTask, aim: Aim) -> End | None:
        """The last end that is in host memory, with all before it."""
        here = leading(self._cache.has(task.ids, HOST))
        for end in reversed(aim.ends):
            if end.blocks <= here and self._cache.has(end.ids, HOST).all():
                return end
        return None

    def reached(self, task: GetTask, aim: Aim) -> BlockIds:
        """The blocks up to that end, and its states; none if there is no such end."""
        end = self._end_reached(task, aim)
        return task.ids[:0] if end is None else np.concatenate([task.ids[: end.blocks], end.ids])


def _are_distinct(task: GetTask, ends: Sequence[End]) -> bool:
    """Whether no state of *ends* is a block of *task*, or that of another of them."""
    ids = np.sort(np.concatenate([task.ids, *(end.ids for end in ends)]))
    return not (ids[1:] == ids[:-1]).any()
