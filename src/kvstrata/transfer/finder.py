"""Asks a store on threads of its own what it holds, so that no lookup waits behind a read."""

import bisect
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple, TypeVar

from kvstrata.core.errors import KVStrataError
from kvstrata.core.types import StoreKey
from kvstrata.transfer.jobs import give
from kvstrata.transfer.presence import Presence

__all__ = ["Finder", "Found"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_THREADS: Final = 8  # started as they are needed
_STALE_SECONDS: Final = 1.0
_MOST_WAITING: Final = 64  # searches; on top of these the last one in line finds nothing


class Found(NamedTuple):
    """Of the keys of a search: so many leading ones are there, and of the next *untold* who knows?

    What follows these is of no use, since the next key is not there.
    """

    there: int
    untold: int = 0


class _Waiting(NamedTuple):
    """A search in line."""

    turn: int  # how many of the same asker waited when it came
    number: int
    asker: str
    begin: Callable[[], None]
    give_up: Callable[[], None]


class Finder:
    """Searches for prefixes in one store, with few questions.

    A store drops the end of a prompt before its beginning, mostly. So of many keys some are asked
    for that lie evenly apart, then some of those between the last one that is there and the first
    one that is not. Where a block in the middle is gone all the same the prefix is found too long:
    the read tells.

    In line the first search of an asker is before the second one of any other, and so on: who asks
    for much at a time keeps no other waiting.
    """

    def __init__(
        self,
        presence: Presence,
        *,
        width: int,
        search_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*width* is how many keys are asked for at once. After *search_seconds* a search asks no
        more, and answers with what it knows; one that has waited for its turn far longer asks nothing.
        """
        self._presence = presence
        self._width = max(2, width)
        self.search_seconds = search_seconds
        self._clock = clock
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvstrata-find")
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []  # in line, a job of a thread for each; needs the lock
        self._numbers = itertools.count()

    def find(self, keys: Sequence[StoreKey], done: Callable[[Found], None], asker: str) -> None:
        """Call *done* once with how many leading *keys* the store holds, as far as it can tell.

        On another thread, of the finder or, if too many searches wait, of who asks meanwhile.
        """
        self._submit(len(keys), partial(self._search, keys), done, Found(0, len(keys)), asker)

    def ask(self, keys: Sequence[StoreKey], done: Callable[[list[bool]], None], asker: str) -> None:
        """Call *done* once with which of *keys* the store holds, none if it cannot tell.

        All are asked for at once, in their turn with what ``find`` looks for.
        """
        nothing = [False] * len(keys)

        def look(_: float) -> list[bool]:
            return [is_there is True for is_there in self._presence.ask(keys)]

        self._submit(len(keys), look, done, nothing, asker)

    def close(self) -> None:
        """Take no more searches; those that wait are not begun and not answered."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _submit(
        self,
        keys: int,
        look: Callable[[float], T],
        done: Callable[[T], None],
        nothing: T,
        asker: str,
    ) -> None:
        """Call *done* with what *look*, given its deadline, finds, or with *nothing*."""
        deadline = self._clock() + self.search_seconds
        begin = partial(self._find, keys, look, done, nothing, deadline)
        last: _Waiting | None = None
        with self._lock:
            turn = sum(each.asker == asker for each in self._waiting)
            new = _Waiting(turn, next(self._numbers), asker, begin, partial(done, nothing))
            bisect.insort(self._waiting, new)
            if len(self._waiting) > _MOST_WAITING:
                last = self._waiting.pop()
        if last is not None:
            last.give_up()  # the job that was for it does another
            return
        try:
            give(self._threads, self._begin_next)
        except RuntimeError:  # closed meanwhile
            with self._lock:
                is_in_line = new in self._waiting
                if is_in_line:
                    self._waiting.remove(new)
            if is_in_line:
                new.give_up()

    def _begin_next(self) -> None:
        with self._lock:
            first = self._waiting.pop(0)
        first.begin()

    def _find(
        self,
        keys: int,
        look: Callable[[float], T],
        done: Callable[[T], None],
        nothing: T,
        deadline: float,
    ) -> None:
        found = nothing
        if self._clock() > deadline + _STALE_SECONDS:  # whoever asked has left
            done(found)
            return
        try:
            found = look(deadline)
        except KVStrataError as e:
            _log.warning("a search for %d blocks failed: %s", keys, e)
        except Exception:  # noqa: BLE001 - thread top: whoever waits must hear of the failure
            _log.exception("a search for %d blocks failed", keys)
        done(found)

    def _search(self, keys: Sequence[StoreKey], deadline: float) -> Found:
        """How many leading *keys* are there, or are known to be when *deadline* comes.

        Asks once at least.
        """
        there, end = 0, len(keys)  # so many are there, and what is looked for ends here
        missing = end  # the first that is known not to be there
        while there < end and (end == len(keys) or self._clock() < deadline):
            asked = _spread(there, end, self._width)
            for position, is_there in zip(
                asked, self._presence.ask([keys[position] for position in asked]), strict=True
            ):
                if not is_there:
                    end = position
                    missing = position if is_there is False else missing
                    break
                there = position + 1
        return Found(there, missing - there)


def _spread(first: int, end: int, count: int) -> list[int]:
    """At most *count* of the positions from *first* on, the first and the last among them."""
    length = end - first
    if length <= count:
        return list(range(first, end))
    return [first + number * (length - 1) // (count - 1) for number in range(count)]
