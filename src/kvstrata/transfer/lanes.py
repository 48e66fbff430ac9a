"""Runs copy jobs on its own threads, loads before saves, and long ones in turns.

The only module of the worker half that starts threads. Everything below blocks, everything above
holds a ``Handle``.
"""

import contextlib
import enum
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Final, Generic, TypeVar

__all__ = ["Handle", "Job", "Lane", "Lanes", "Outcome"]

T = TypeVar("T")


class Lane(enum.IntEnum):
    """What waits in the lower lane starts first."""

    LOAD = 0
    SAVE = 1


class Outcome(enum.Enum):
    """How a job ended."""

    DONE = "done"
    FAILED = "failed"  # it raised; ``Handle.error`` says what
    CANCELLED = "cancelled"  # it was waiting for its first turn, or for another
    REFUSED = "refused"  # its lane was full or closed; it never started


class Handle(Generic[T]):
    """One submitted job. ``outcome`` is None until the job has certainly stopped."""

    __slots__ = ("error", "others", "outcome", "result", "stopping")

    def __init__(self, others: Collection[object] = ()) -> None:
        """*others*: what waits in its lane at any time."""
        self.others: Final = others  # while there are some, a long job makes way for them
        self.outcome: Outcome | None = None
        self.result: T | None = None  # what the job returned, once ``DONE``
        self.error: Exception | None = None
        self.stopping = False  # a running job looks at this and returns early


Job = Callable[[Handle[T]], T | None]
"""What is called with its own handle. None: it makes way, and is called again after the others."""


class Lanes(Generic[T]):
    """A bounded executor with two priorities. All methods may be called from any thread.

    * Every job that was not refused leaves through ``poll`` exactly once.
    * A lane holds at most *limit* jobs that have not been polled; more are refused.
    * At most *saves* of the threads are in a save: the others are there for loads.
    * Jobs of a lane take turns: one that makes way goes on behind those that wait in it by then,
      but of the places of those that have had a turn the oldest of them takes the first: each is
      done as early as it can be without keeping others from their first turn.
    """

    def __init__(
        self,
        *,
        threads: int = 1,
        saves: int = 1,
        limit: int = 4096,
        cpus: frozenset[int] | None = None,
    ) -> None:
        """*cpus*: processors that the threads run on, where that can be had."""
        self._cpus: Final = cpus
        self._limit: Final = limit
        self._saves: Final = saves
        self._lock = threading.Lock()  # guards everything below
        self._work = threading.Condition(self._lock)
        self._ended_some = threading.Condition(self._lock)
        self._queues: dict[Lane, deque[tuple[Handle[T], Job[T]]]] = {lane: deque() for lane in Lane}
        self._running: set[Handle[T]] = set()
        self._ended: list[Handle[T]] = []
        self._lane_of: dict[Handle[T], Lane] = {}  # every job that has not been polled
        self._held = dict.fromkeys(Lane, 0)
        self._begun: dict[Handle[T], None] = {}  # have made way and not ended, the oldest first
        self._open = True
        self._threads = [
            threading.Thread(target=self._serve, name=f"kvstrata-copy-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job[T], lane: Lane) -> Handle[T]:
        """Queue *job*; never blocks.

        A full or closed lane gives a handle whose outcome is ``REFUSED`` already.
        """
        handle = Handle[T](self._queues[lane])
        with self._lock:
            if self._admit(handle, lane):
                self._queues[lane].append((handle, job))
                self._work.notify()
        return handle

    def run(self, job: Job[T], lane: Lane) -> Handle[T]:
        """Like ``submit``, but *job* is done here, makes way for nobody and has ended on return.

        For a short job whose caller has nothing better to do than to wait for it: two threads
        need not wake each other, which on busy cores takes longer than the job.
        """
        handle = Handle[T]()
        with self._lock:
            if not self._admit(handle, lane):
                return handle
            self._running.add(handle)
        self._do(handle, job)
        return handle

    def cancel(self, handle: Handle[T]) -> None:
        """End *handle* now if it is queued; ask it to stop if it runs."""
        with self._lock:
            handle.stopping = True
            if handle.outcome is not None or handle in self._running:
                return
            queue = self._queues[self._lane_of[handle]]
            queue.remove(next(entry for entry in queue if entry[0] is handle))
            self._end(handle, Outcome.CANCELLED)

    def poll(self) -> list[Handle[T]]:
        """Jobs that ended since the last call, in the order in which they ended."""
        with self._lock:
            ended, self._ended = self._ended, []
            for handle in ended:
                self._held[self._lane_of.pop(handle)] -= 1
            return ended

    def wait(self, timeout_seconds: float) -> bool:
        """Block until ``poll`` would return something; False if the time ran out first."""
        with self._lock:
            return self._ended_some.wait_for(lambda: bool(self._ended), timeout_seconds)

    def wait_for(self, handle: Handle[T], timeout_seconds: float | None = None) -> bool:
        """Block until *handle* has ended; False if the time ran out first."""
        with self._lock:
            return self._ended_some.wait_for(lambda: handle.outcome is not None, timeout_seconds)

    def close(self, deadline_seconds: float) -> bool:
        """Cancel what is queued, stop what runs, refuse what comes.

        Returns whether every thread has ended by the deadline; if not, a copy may still run.
        """
        with self._lock:
            self._open = False
            for queue in self._queues.values():
                while queue:
                    self._end(queue.popleft()[0], Outcome.CANCELLED)
            for handle in self._running:
                handle.stopping = True
            self._work.notify_all()
        give_up = time.monotonic() + deadline_seconds
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self) -> None:
        if self._cpus is not None:
            # Of processors that are not there, or not ours, there is nothing to be had.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self._cpus)
        while (entry := self._take()) is not None:
            self._do(*entry)
            del entry  # a job holds on to the memory it copies

    def _do(self, handle: Handle[T], job: Job[T]) -> None:
        """A turn of *job*."""
        outcome = Outcome.DONE
        try:
            handle.result = job(handle)
        except Exception as e:  # noqa: BLE001  # thread top: reported through the handle
            handle.error = e
            outcome = Outcome.FAILED
        with self._lock:
            self._running.discard(handle)
            if outcome is Outcome.FAILED or handle.result is not None:
                self._end(handle, outcome)
            elif handle.stopping:
                self._end(handle, Outcome.CANCELLED)
            else:
                self._make_way(handle, job)
            self._work.notify()  # a save may be what this one was in the way of

    def _make_way(self, handle: Handle[T], job: Job[T]) -> None:
        queue = self._queues[self._lane_of[handle]]
        queue.append((handle, job))
        self._begun.setdefault(handle)
        waiting = dict(queue)
        oldest = (other for other in self._begun if other in waiting)
        for place, other in enumerate(waiting):
            if other in self._begun:
                queue[place] = (first := next(oldest)), waiting[first]

    def _admit(self, handle: Handle[T], lane: Lane) -> bool:
        if not self._open or self._held[lane] >= self._limit:
            handle.outcome = Outcome.REFUSED
            return False
        self._held[lane] += 1
        self._lane_of[handle] = lane
        return True

    def _take(self) -> tuple[Handle[T], Job[T]] | None:
        """The next job, marked as running; None once closed."""
        with self._lock:
            self._work.wait_for(lambda: not self._open or self._next_lane() is not None)
            if not self._open or (lane := self._next_lane()) is None:
                return None
            entry = self._queues[lane].popleft()
            self._running.add(entry[0])
            return entry

    def _next_lane(self) -> Lane | None:
        """The lane whose first job may start now."""
        if self._queues[Lane.LOAD]:
            return Lane.LOAD
        running = sum(self._lane_of[handle] is Lane.SAVE for handle in self._running)
        return Lane.SAVE if self._queues[Lane.SAVE] and running < self._saves else None

    def _end(self, handle: Handle[T], outcome: Outcome) -> None:
        handle.outcome = outcome
        self._begun.pop(handle, None)
        self._ended.append(handle)
        self._ended_some.notify_all()
