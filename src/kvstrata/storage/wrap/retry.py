"""Bounded retry: a store that is away for a moment is asked again."""

import random
import time
from collections.abc import Callable

from kvstrata.core.errors import TierUnavailable
from kvstrata.storage.store import Store
from kvstrata.storage.wrap.forward import T, WrappedStore


class RetryStore(WrappedStore):
    """Repeats a call that raised ``TierUnavailable``, *attempts* times in all at most.

    Before the n-th repetition it waits a random part of ``backoff_seconds * 2**n``, so that many
    clients of one server do not come back together. An attempt is begun only if it can end within
    *deadline_seconds* of the call, should it take as long as the longest before it: a call that
    was slow to fail is not repeated. No attempt is cut short; stores have time limits of their own.
    Wrong credentials are not tried again: servers lock who tries them often.

    A repeated write reports ``EXISTS`` for a block that the attempt before it has stored, and a
    repeated removal that a block was not there.
    """

    def __init__(
        self,
        inner: Store,
        *,
        attempts: int = 3,
        deadline_seconds: float = 2.0,
        backoff_seconds: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._attempts = attempts
        self._deadline_seconds = deadline_seconds
        self._backoff_seconds = backoff_seconds
        self._clock = clock
        self._sleep = sleep
        self._closed = False

    def close(self) -> None:
        self._closed = True
        super().close()

    def _call(self, call: Callable[[], T]) -> T:
        began = self._clock()
        deadline = began + self._deadline_seconds
        longest = 0.0
        for repetition in range(self._attempts - 1):
            try:
                return call()
            except TierUnavailable as e:
                now = self._clock()
                longest = max(longest, now - began)
                pause = random.uniform(0, self._backoff_seconds * 2**repetition)
                is_late = now + pause + longest > deadline
                if self._closed or is_late or e.cause == "credentials":
                    raise
            self._sleep(pause)
            began = self._clock()
        return call()
