"""What the parts of one manager share: its lock and memory, task ids, ended tasks, decisions."""

import itertools
import secrets
import threading
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstrata.manager.decisions import Decisions
from kvstrata.manager.tasks import TaskState

_KEPT_RESULTS: Final = 4096  # ended tasks whose state can still be asked for


class Memory(Protocol):
    """The slots of the host tier: ``HostMemory``, or what stands in for it without bytes."""

    def generations(self, slots: NDArray[np.int32]) -> NDArray[np.uint64]: ...

    def view(self, slot: int) -> memoryview: ...


class Desk:
    """*lock* guards all else, and is notified when a task ends."""

    def __init__(self, lock: threading.Condition, memory: Memory) -> None:
        self.lock = lock
        self.memory = memory
        self.decisions = Decisions()
        self._ended: dict[int, TaskState] = {}
        # An engine outlives its server, with tasks of the old one in flight: ids do not come again.
        self._ids = itertools.count((1 + secrets.randbits(20)) << 32)

    def new_id(self) -> int:
        return next(self._ids)

    def ended(self, task_id: int) -> TaskState | None:
        """How *task_id* ended, if that is not long ago."""
        return self._ended.get(task_id)

    def remember(self, task_id: int, state: TaskState) -> None:
        self._ended[task_id] = state
        if len(self._ended) > _KEPT_RESULTS:
            del self._ended[next(iter(self._ended))]
        self.lock.notify_all()
