"""The circuit breaker: a store that keeps failing is left alone."""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstrata.core.errors import TierUnavailable
from kvstrata.core.types import StoreKey
from kvstrata.storage.store import Store
from kvstrata.storage.wrap.forward import T, WrappedStore

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Call:
    """A call that is under way."""

    due: float  # when it counts as a failure, and then again
    is_probe: bool
    is_question: bool  # of what is there; else it moves blocks
    counted: bool = False  # as a failure already, since it takes too long


class BreakerStore(WrappedStore):
    """Stops asking a store that keeps failing, and lets one call probe it every while.

    A call fails if it raises ``TierUnavailable`` or takes longer than *slow_seconds*, which is
    noticed while it still runs, and again each *slow_seconds*: a disk that hangs and reports
    nothing is switched off too, however few calls it has got.

    A call that fails for want of room (``full``) counts for nothing: the store answers, and what it
    holds can be read without room. Most stores do not even raise then: ``write`` returns ``FULL``.

    Open after *failures* failures in a row. Questions of what is there are counted apart: over a
    link that is nearly dead they still succeed, and no block ever comes. While open every call raises ``TierUnavailable`` at
    once, except one probe: never before *retry_seconds* have passed since the last failure, and
    never two at a time. Only a probe that succeeds closes it, and where blocks did not move, one
    that moves blocks; how calls end that began before it
    opened does not matter any more. That it opens, and that it closes, is logged, once each.
    """

    def __init__(
        self,
        inner: Store,
        *,
        name: str = "store",
        failures: int = 3,
        retry_seconds: float = 5.0,
        slow_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*name* is that of the tier, for the log."""
        super().__init__(inner)
        self._name = name
        self._failures = failures
        self._retry_seconds = retry_seconds
        self._slow_seconds = slow_seconds
        self._clock = clock
        self._lock = threading.Lock()  # guards everything below
        self._running: set[_Call] = set()
        self._failed_questions = 0  # in a row
        self._failed_moves = 0  # likewise
        self._is_open = False
        self._next_probe = 0.0

    @property
    def is_open(self) -> bool:
        with self._lock:
            self._count_overdue(self._clock())
            return self._is_open

    @property
    def refuses(self) -> bool:
        """Whether a call would be refused now: it is open, and no probe is due."""
        with self._lock:
            now = self._clock()
            self._count_overdue(now)
            return self._is_open and (self._is_probed() or now < self._next_probe)

    def exists(self, keys: Sequence[StoreKey]) -> Sequence[bool | None]:
        return self._guard(lambda: self._inner.exists(keys), is_question=True)

    def _call(self, call: Callable[[], T]) -> T:
        return self._guard(call, is_question=False)

    def _guard(self, call: Callable[[], T], *, is_question: bool) -> T:
        running = self._admit(is_question=is_question)
        try:
            result = call()
        except TierUnavailable as e:
            if e.cause == "full":
                self._forget(running)
            else:
                self._end(running, failed=True)
            raise
        except BaseException:
            self._forget(running)
            raise
        self._end(running, failed=False)
        return result

    def _admit(self, *, is_question: bool) -> _Call:
        with self._lock:
            now = self._clock()
            self._count_overdue(now)
            if self._is_open:
                self._refuse_unless_probe(now)
            running = _Call(now + self._slow_seconds, self._is_open, is_question)
            self._running.add(running)
            return running

    def _refuse_unless_probe(self, now: float) -> None:
        if self._is_probed():
            hint = "a call that tries it again is under way"
        elif now < self._next_probe:
            hint = f"tried again in {self._next_probe - now:.1f} s"
        else:
            return
        raise TierUnavailable(
            f"switched off after {self._most_failed} failures in a row", hint=hint
        )

    def _is_probed(self) -> bool:
        return any(call.is_probe for call in self._running)

    def _end(self, running: _Call, *, failed: bool) -> None:
        with self._lock:
            now = self._clock()
            self._count_overdue(now)
            self._running.remove(running)
            if running.counted or running.is_probe is not self._is_open:
                return
            if failed:
                self._count_failure(running, now)
            else:
                self._count_success(running)

    def _forget(self, running: _Call) -> None:
        """A bug, or that there is no room: it says nothing about whether the store answers."""
        with self._lock:
            self._running.remove(running)

    def _count_overdue(self, now: float) -> None:
        for call in self._running:
            if now > call.due:
                call.counted, call.due = True, now + self._slow_seconds
                self._count_failure(call, now)

    @property
    def _most_failed(self) -> int:
        return max(self._failed_questions, self._failed_moves)

    def _count_success(self, call: _Call) -> None:
        self._failed_questions = 0
        if not call.is_question:
            self._failed_moves = 0
        was_open, self._is_open = self._is_open, self._most_failed >= self._failures
        if was_open and not self._is_open:
            _log.info("the %s tier answers again: switched on", self._name)

    def _count_failure(self, call: _Call, now: float) -> None:
        if call.is_question:
            self._failed_questions += 1
        else:
            self._failed_moves += 1
        was_open, self._is_open = self._is_open, self._most_failed >= self._failures
        if self._is_open and not was_open:
            for running in self._running:
                running.due = math.inf
            _log.warning(
                "the %s tier is switched off after %d failures in a row: tried again every %g s",
                self._name,
                self._most_failed,
                self._retry_seconds,
            )
        self._next_probe = now + self._retry_seconds
