"""What clients say of their tasks, and what it moves."""

from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from kvstrata.core.errors import InvariantViolated
from kvstrata.manager.gains import Gains
from kvstrata.manager.gets import Gets
from kvstrata.manager.pins import Pins
from kvstrata.manager.puts import Puts
from kvstrata.manager.residency import Residency
from kvstrata.manager.sessions import Sessions
from kvstrata.manager.tasks import GetTask, PutTask, TaskEvent, TaskState, step
from kvstrata.observe import metrics


class Moves:
    """Moves the tasks of one manager as its owners say. Needs its lock.

    Late news, of ended tasks or of others', and news that come twice mean nothing. News of what
    cannot have happened yet raise ``InvariantViolated``, but only once the other tasks are done.
    """

    def __init__(
        self,
        cache: Residency,
        gets: Gets,
        puts: Puts,
        sessions: Sessions,
        pins: Pins,
        gains: Gains,
    ) -> None:
        self._cache = cache
        self._gains = gains
        self._gets = gets
        self._puts = puts
        self._sessions = sessions
        self._pins = pins

    def launch(self, task_ids: Sequence[int], owner: int) -> None:
        for task, state in self._moved(task_ids, owner, TaskEvent.LAUNCH):
            task.state = state
            if isinstance(task, GetTask):
                self._gets.launch(task)

    def complete(self, task_ids: Sequence[int], owner: int) -> None:
        """The copies have ended, and all bytes are where they belong."""
        self._release(self._sessions.ended(owner, task_ids))
        for task, state in self._moved(task_ids, owner, TaskEvent.COMPLETE):
            self._ended(task, state, len(task.held))

    def complete_part(self, task_id: int, blocks: int, owner: int) -> None:
        """The copies have ended, and the bytes of the first *blocks* are where they belong."""
        self._release(self._sessions.ended(owner, [task_id]))
        event = TaskEvent.COMPLETE if blocks > 0 else TaskEvent.FAIL
        for task, state in self._moved([task_id], owner, event):
            self._ended(task, state, min(max(blocks, 0), len(task.held)))

    def fail(self, task_ids: Sequence[int], owner: int) -> None:
        """The copies have ended, and nothing is known of the bytes."""
        self._release(self._sessions.ended(owner, task_ids))
        for task, state in self._moved(task_ids, owner, TaskEvent.FAIL):
            self._ended(task, state, 0)

    def cancel(self, task_ids: Sequence[int], owner: int) -> None:
        """Nobody will copy for these; for those that are running it has to end first."""
        for task, state in self._moved(task_ids, owner, TaskEvent.CANCEL):
            if state is TaskState.STOPPING:
                task.state = state
            elif isinstance(task, GetTask):
                self._gets.end(task, state)
            else:
                self._release(self._puts.abandon(task, state))

    def release(self, task_id: int, owner: int) -> None:
        """A prefetch has what it could get."""
        for task, state in self._moved([task_id], owner, TaskEvent.RELEASE):
            if isinstance(task, GetTask):
                self._gets.end(task, state)

    def succeed(self, life: str, running: Collection[int]) -> None:
        """The scheduler of that *life* connects again: earlier connections of it are gone.

        Its workers may still be writing for the earlier tasks *running*, and for no others.
        """
        for owner in self._sessions.earlier(life):
            self.disconnect(owner)
        self._release(self._sessions.succeed(life, running))

    def disconnect(self, owner: int) -> None:
        """*owner* is gone: its leases are free at once, its slots once nobody can write to them."""
        for get in [g for g in self._gets.tasks.values() if g.owner == owner]:
            self._gets.end(get, TaskState.CANCELLED)
        slots = {}
        for put in [p for p in self._puts.tasks.values() if p.owner == owner]:
            slots[put.task_id] = self._puts.abandon(put, TaskState.CANCELLED)
        self._release(self._sessions.orphan(owner, slots) + self._sessions.remove(owner))

    def expire(self) -> None:
        """Take back the slots that workers without a connection cannot be writing to any more."""
        slots = self._sessions.expire()
        if slots:
            self._release(slots)

    def _ended(self, task: GetTask | PutTask, state: TaskState, blocks: int) -> None:
        """The copies of *task* have ended, *blocks* of them as they should."""
        counts = state is not TaskState.CANCELLED
        if isinstance(task, PutTask):
            if counts and blocks:
                self._release(self._puts.publish(task, state, blocks))
            else:
                self._release(self._puts.abandon(task, state))
            return
        if counts:
            loaded = min(blocks, task.launched_blocks)
            self._gains.loaded(task, loaded, self._sessions.blocks_per_second(task.owner))
        lost = task.held[blocks:]
        if len(lost) or not counts:
            self._cache.counters.add(metrics.FAILED_LOADS, 1)
        self._gets.end(task, state)
        self._pins.give_up(lost)
        self._cache.doubt(lost)

    def _release(self, slots: Iterable[int]) -> None:
        self._cache.release_slots(np.fromiter(slots, np.int32))

    def _moved(
        self, task_ids: Sequence[int], owner: int, event: TaskEvent
    ) -> Iterator[tuple[GetTask | PutTask, TaskState]]:
        """The tasks of *owner* among *task_ids* that *event* moves, and their states after it."""
        refused: InvariantViolated | None = None
        for task_id in task_ids:
            task = self._gets.tasks.get(task_id) or self._puts.tasks.get(task_id)
            if task is None or task.owner != owner:
                continue
            try:
                state = step(task.state, event)
            except InvariantViolated as e:
                refused = refused or e
                continue
            if state is not task.state:
                yield task, state
        if refused is not None:
            raise refused
