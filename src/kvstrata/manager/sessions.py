"""Who uses the cache: connections, and the engines that they belong to. Not thread-safe."""

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
    blocks_per_second: float | None = None  # that it computes; None: not measured yet


@dataclass(slots=True)
class _Orphan:
    """Slots that workers of a dead scheduler connection may still be writing to."""

    slots: list[int]
    writers: set[int]


@dataclass(slots=True)
class Sessions:
    """Connections by owner number.

    A session is one engine: one scheduler connection and one connection of each worker. Nothing
    is matched or reserved for an engine before each of its workers has mapped the host tier.
    """

    _next_owner: int = LOCAL_OWNER + 1
    _engines: dict[int, _Engine] = field(default_factory=dict)
    _workers: dict[int, WorkerOf] = field(default_factory=dict)
    _orphans: list[_Orphan] = field(default_factory=list)

    def add_engine(self, session: str, world_size: int) -> int:
        owner = self._new_owner()
        self._engines[owner] = _Engine(session, world_size)
        return owner

    def add_worker(self, session: str, rank: int) -> int:
        owner = self._new_owner()
        self._workers[owner] = WorkerOf(session, rank)
        return owner

    def add_observer(self) -> int:
        return self._new_owner()

    def can_transfer(self, owner: int) -> bool:
        """Whether all workers that would copy for *owner* have mapped the host tier."""
        engine = self._engines.get(owner)
        if engine is None:
            return owner == LOCAL_OWNER
        return self.workers(owner) >= engine.world_size

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

    def orphan(self, owner: int, slots: list[int]) -> list[int]:
        """*owner* is gone and had reserved *slots*: those that nobody can be writing to.

        The others are returned by ``remove`` once the last worker of the engine that may be
        writing has gone.
        """
        engine = self._engines.get(owner)
        writers = {
            worker
            for worker, of in self._workers.items()
            if engine and of.session == engine.session
        }
        if not writers or not slots:
            return slots
        self._orphans.append(_Orphan(slots, writers))
        return []

    def remove(self, owner: int) -> list[int]:
        """Forget a closed connection; the orphaned slots that are safe to use again."""
        self._engines.pop(owner, None)
        self._workers.pop(owner, None)
        freed = []
        for orphan in self._orphans:
            orphan.writers.discard(owner)
            if not orphan.writers:
                freed.extend(orphan.slots)
        self._orphans = [orphan for orphan in self._orphans if orphan.writers]
        return freed

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

    def _new_owner(self) -> int:
        owner = self._next_owner
        self._next_owner += 1
        return owner
