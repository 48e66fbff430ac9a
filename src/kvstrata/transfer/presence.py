"""What a tier below is known to lack, and what it is being asked at this moment."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from kvstrata.core.types import StoreKey

__all__ = ["Presence"]

_MOST_MISSING: Final = 1 << 16  # keys; the oldest answers are forgotten first


class _Question:
    """Keys that one thread asks for, and others wait for."""

    __slots__ = ("answered", "answers", "outdated")

    def __init__(self) -> None:
        self.outdated: set[StoreKey] = set()  # written by this node since it was asked
        self.answered = threading.Event()
        self.answers: dict[StoreKey, bool | None] = {}  # empty if the store could not tell


class Presence:
    """Asks a store which keys it has, each key once at a time. Thread-safe.

    A key that is asked for already is waited for, not asked for again. One that was not there
    counts as missing for *missing_seconds*, unless this node writes it before.
    """

    def __init__(
        self,
        exists: Callable[[Sequence[StoreKey]], Sequence[bool | None]],
        *,
        missing_seconds: float,
        wait_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._exists = exists
        self._missing_seconds = missing_seconds
        self._wait_seconds = wait_seconds
        self._clock = clock
        self._lock = threading.Lock()  # guards the two below
        self._missing: OrderedDict[StoreKey, float] = OrderedDict()  # until when
        self._asked: dict[StoreKey, _Question] = {}

    def ask(self, keys: Sequence[StoreKey]) -> list[bool | None]:
        """Whether the store has each of *keys*; what it raises is passed on.

        None where it cannot tell, or where somebody else waits for the answer in vain.
        """
        mine = _Question()
        others: dict[StoreKey, _Question] = {}
        with self._lock:
            now = self._clock()
            for key in dict.fromkeys(keys):
                if self._missing.get(key, now) > now:
                    mine.answers[key] = False
                elif key in self._asked:
                    others[key] = self._asked[key]
                else:
                    self._asked[key] = mine
            asked = [key for key, question in self._asked.items() if question is mine]
        if asked:
            self._ask(mine, asked)
        give_up = time.monotonic() + self._wait_seconds
        for question in set(others.values()):
            question.answered.wait(max(0.0, give_up - time.monotonic()))
        found = mine.answers | {key: question.answers.get(key) for key, question in others.items()}
        return [found[key] for key in keys]

    def written(self, keys: Sequence[StoreKey]) -> None:
        """This node has just written *keys*."""
        with self._lock:
            for key in keys:
                self._missing.pop(key, None)
                if key in self._asked:
                    self._asked[key].outdated.add(key)

    def _ask(self, mine: _Question, asked: Sequence[StoreKey]) -> None:
        there: Sequence[bool | None] = []
        try:
            there = self._exists(asked)
        finally:
            with self._lock:
                until = self._clock() + self._missing_seconds
                for key in asked:
                    del self._asked[key]
                for key, is_there in zip(asked, there, strict=bool(there)):
                    mine.answers[key] = is_there
                    is_missing = is_there is False and key not in mine.outdated
                    if is_missing and self._missing_seconds:
                        self._missing[key] = until
                        self._missing.move_to_end(key)
                while len(self._missing) > _MOST_MISSING:
                    self._missing.popitem(last=False)
            mine.answered.set()
