"""The tasks that one client has not ended, so that their number can have a bound."""

from collections.abc import Callable, Sequence
from itertools import islice

from kvstrata.core.errors import LimitExceeded
from kvstrata.manager.tasks import FINAL, TaskState, TaskStatus
from kvstrata.server.limits import Limits

_LOOKED_AT = 8  # tasks, each time that there are too many


class HeldTasks:
    """Counts what this client says of its tasks.

    Tasks that end otherwise (a prefetch, a lease that has run out) count until there seem to be
    too many: then some of them are looked up.
    """

    def __init__(
        self, limits: Limits, look_up: Callable[[Sequence[int]], dict[int, TaskStatus]]
    ) -> None:
        self._limits = limits
        self._look_up = look_up
        self._blocks: dict[int, int] = {}  # of each task, oldest first
        self._running: set[int] = set()
        self._sum = 0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def blocks(self) -> int:
        return self._sum

    def check(self) -> None:
        """Raises ``LimitExceeded`` if this client must end some before it gets another."""
        if self._is_full():
            self._forget_ended()
        if self._is_full():
            raise LimitExceeded(
                f"this client has {len(self._blocks)} tasks of {self._sum} blocks that have not "
                "ended",
                hint="complete, fail or cancel them",
            )

    def add(self, task_id: int, blocks: int) -> None:
        """A task of *blocks*; 0 is none."""
        if task_id:
            self._blocks[task_id] = blocks
            self._sum += blocks

    def launched(self, task_ids: Sequence[int]) -> None:
        self._running.update(t for t in task_ids if t in self._blocks)

    def completed(self, task_ids: Sequence[int]) -> None:
        for task_id in task_ids:
            if task_id in self._running:
                self._remove(task_id)

    def failed(self, task_ids: Sequence[int]) -> None:
        for task_id in task_ids:
            self._remove(task_id)

    def cancelled(self, task_ids: Sequence[int]) -> None:
        for task_id in task_ids:
            if task_id not in self._running:
                self._remove(task_id)

    def _is_full(self) -> bool:
        return len(self._blocks) >= self._limits.tasks or self._sum >= self._limits.task_blocks

    def _forget_ended(self) -> None:
        """Forget the ended ones among the oldest; the others are looked at again after all."""
        for task_id in list(islice(self._blocks, _LOOKED_AT)):
            found = self._look_up([task_id]).get(task_id)
            blocks = self._blocks[task_id]
            running = task_id in self._running
            self._remove(task_id)
            if found is not None and found.state not in FINAL:
                self.add(task_id, blocks)
                if running:
                    self._running.add(task_id)

    def _remove(self, task_id: int) -> None:
        self._running.discard(task_id)
        self._sum -= self._blocks.pop(task_id, 0)


def blocks_of(status: TaskStatus, asked_blocks: int) -> int:
    """The most blocks that the task of *status* may come to hold of *asked_blocks*."""
    if status.state is TaskState.SEARCHING:
        return asked_blocks
    return max(status.matched_blocks, len(status.slots))
