"""Who is served next: the one that has had least."""

import heapq
import itertools
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items that wait to be served, ordered by the time that serving them has taken so far.

    However much some ask for, one that asks for little is served next, but for others that have
    had as little. Time is not saved up: one that comes, or comes again, starts level with the one
    served last.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._order = itertools.count()  # first come, first served among equals
        self._waiting: set[T] = set()  # who is in the heap
        self._spent: dict[T, float] = {}  # seconds
        self._level = 0.0  # what the one served last had had

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, item: T) -> bool:
        return item in self._waiting

    def add(self, item: T) -> None:
        """*item* waits from now on, if it does not already."""
        if item in self._waiting:
            return
        spent = self._spent[item] = max(self._spent.get(item, 0.0), self._level)
        self._waiting.add(item)
        heapq.heappush(self._heap, (spent, next(self._order), item))

    def pop(self) -> T:
        """Take out the one to be served; there must be one."""
        self._level, _, item = heapq.heappop(self._heap)
        self._waiting.remove(item)
        return item

    def charge(self, item: T, seconds: float) -> None:
        """Serving *item* has taken *seconds*."""
        self._spent[item] = self._spent.get(item, self._level) + seconds

    def forget(self, item: T) -> None:
        self._spent.pop(item, None)
        if item in self._waiting:
            self._waiting.remove(item)
            self._heap = [entry for entry in self._heap if entry[2] != item]
            heapq.heapify(self._heap)
