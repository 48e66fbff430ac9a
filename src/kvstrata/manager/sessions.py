"""Who uses the cache: connections, and the engines that they belong to. Not thread-safe."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

LOCAL_OWNER: Final = 0
"""The owner of tasks that are made in this process, not over a connection."""


class WorkerOf(NamedTuple):
    session: str
    rank: int


@dataclass(slots=True)
class _Engine:
    """A scheduler connection."""

    session: str
    world_size: int
    life: str  # of the process; empty if it has not told, and then it is like no other
    blocks_per_second: float | None = None  # that it computes; None: not measured yet


@dataclass(slots=True)
class _Orphan:
    """Slots of a put that workers of a dead scheduler connection may still be writing to."""

    task_id: int
    life: str
    slots: list[int]
    writers: set[int]
    free_at: float | None = None  # monotonic seconds; None while a writer is connected


@dataclass(slots=True)
class Sessions:
    """Connections by owner number.

    A session is one engine: one scheduler connection and one connection of each worker. Nothing
    is matched or reserved for an engine before each of its workers has mapped the host tier.

    A scheduler whose connection breaks while its workers stay comes back under the same *life*,
    and knows for which tasks of before they may still be writing.

    A worker whose connection is gone may be in the middle of a copy. Slots that it writes to are
    kept for *grace_seconds* more: longer than any piece of a copy takes.
    """

    grace_seconds: float = 0.0
    _next_owner: int = LOCAL_OWNER + 1
    _engines: dict[int, _Engine] = field(default_factory=dict)
    _workers: dict[int, WorkerOf] = field(default_factory=dict)
    _operators: set[int] = field(default_factory=set)
    _orphans: list[_Orphan] = field(default_factory=list)
    _attached: set[int] = field(default_factory=set)  # engines all of whose workers are connected

    def add_engine(self, session: str, world_size: int, life: str = "") -> int:
        owner = self._new_owner()
        self._engines[owner] = _Engine(session, world_size, life)
        self._count_workers()
        return owner

    def earlier(self, life: str) -> list[int]:
        """Connections of that life which seem to be there still."""
        return [
            owner for owner, engine in self._engines.items() if _is_same_life(engine.life, life)
        ]

    def succeed(self, life: str, running: Collection[int]) -> list[int]:
        """Slots of that life's earlier tasks to which nobody writes: all but those of *running*."""
        kept = set(running)
        return self._free(
            lambda orphan: _is_same_life(orphan.life, life) and orphan.task_id not in kept
        )

    def ended(self, owner: int, task_ids: Collection[int]) -> list[int]:
        """Slots of *task_ids*, of earlier connections of this engine: nobody writes to them now."""
        engine = self._engines.get(owner)
        if engine is None or not self._orphans:
            return []
        ended = set(task_ids)
        return self._free(
            lambda orphan: _is_same_life(orphan.life, engine.life) and orphan.task_id in ended
        )

    def add_worker(self, session: str, rank: int) -> int:
        owner = self._new_owner()
        self._workers[owner] = WorkerOf(session, rank)
        self._count_workers()
        return owner

    def add_operator(self) -> int:
        """Somebody who moves blocks between tiers and copies none himself."""
        owner = self._new_owner()
        self._operators.add(owner)
        return owner

    def can_transfer(self, owner: int) -> bool:
        """Whether all workers that would copy for *owner* have mapped the host tier."""
        return owner == LOCAL_OWNER or owner in self._attached or owner in self._operators

    def workers(self, owner: int) -> int:
        """Workers of the engine *owner*, each rank once."""
        session = self._engines[owner].session if owner in self._engines else None
        return len({worker.rank for worker in self._workers.values() if worker.session == session})

    def measured(self, owner: int, blocks_per_second: float) -> None:
        if owner in self._engines:
            self._engines[owner].blocks_per_second = blocks_per_second

    def blocks_per_second(self, owner: int) -> float | None:
        """What the engine *owner* computes, if it has told."""
        return self._engines[owner].blocks_per_second if owner in self._engines else None

    def orphan(self, owner: int, slots: Mapping[int, list[int]]) -> list[int]:
        """*owner* is gone, with *slots* by task: those that nobody can be writing to.

        The others are returned by ``remove`` and ``expire`` once the last worker of the engine
        that may be writing has gone, or before by ``succeed`` and ``ended``.
        """
        engine = self._engines.get(owner)
        writers = {
            worker
            for worker, of in self._workers.items()
            if engine and of.session == engine.session
        }
        if engine is None:
            return [slot for of_task in slots.values() for slot in of_task]
        self._orphans += [
            _Orphan(task_id, engine.life, of_task, set(writers))
            for task_id, of_task in slots.items()
        ]
        return self.expire()

    def remove(self, owner: int) -> list[int]:
        """Forget a closed connection; the orphaned slots that are safe to use again."""
        self._engines.pop(owner, None)
        self._workers.pop(owner, None)
        self._operators.discard(owner)
        self._count_workers()
        for orphan in self._orphans:
            orphan.writers.discard(owner)
        return self.expire()

    def expire(self) -> list[int]:
        """Slots whose last writer has been gone for long enough."""
        if not self._orphans:
            return []
        now = time.monotonic()
        for orphan in self._orphans:
            if not orphan.writers and orphan.free_at is None:
                orphan.free_at = now + self.grace_seconds
        return self._free(lambda orphan: orphan.free_at is not None and orphan.free_at <= now)

    def orphaned_slots(self) -> list[int]:
        return [slot for orphan in self._orphans for slot in orphan.slots]

    def describe(self) -> list[dict[str, object]]:
        """One row an engine, for ``inspect``."""
        return [
            {
                "session": engine.session,
                "workers": sorted(
                    w.rank for w in self._workers.values() if w.session == engine.session
                ),
                "world_size": engine.world_size,
                "blocks_per_second": engine.blocks_per_second,
            }
            for engine in self._engines.values()
        ]

    def _count_workers(self) -> None:
        self._attached = {
            owner
            for owner, engine in self._engines.items()
            if self.workers(owner) >= engine.world_size
        }

    def _free(self, is_free: Callable[[_Orphan], bool]) -> list[int]:
        freed = [slot for orphan in self._orphans if is_free(orphan) for slot in orphan.slots]
        self._orphans = [orphan for orphan in self._orphans if not is_free(orphan)]
        return freed

    def _new_owner(self) -> int:
        owner = self._next_owner
        self._next_owner += 1
        return owner


def _is_same_life(one: str, other: str) -> bool:
    """Whether it is the same process. Those that have not told are different ones."""
    return one != "" and one == other
