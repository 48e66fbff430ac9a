"""Stores around stores, one concern each."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstrata.core.errors import TierUnavailable
from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage.store import Store, StoreStatistics

_T = TypeVar("_T")


class BreakerStore:
    """Stops asking a store that keeps failing, and lets one call probe it every while.

    Open after *failures* calls in a row raised ``TierUnavailable``. While open every call raises
    ``TierUnavailable`` at once, except one each *retry_seconds*; the first success closes it.
    """

    def __init__(
        self,
        inner: Store,
        *,
        failures: int = 3,
        retry_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner = inner
        self._failures = failures
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._lock = threading.Lock()  # guards the two below
        self._failed_in_a_row = 0
        self._next_probe = 0.0

    @property
    def is_open(self) -> bool:
        return self._failed_in_a_row >= self._failures

    def exists(self, keys: Sequence[StoreKey]) -> list[bool]:
        return self._guard(lambda: self._inner.exists(keys))

    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        return self._guard(lambda: self._inner.read_into(keys, buffers))

    def write(
        self,
        keys: Sequence[StoreKey],
        parents: Sequence[StoreKey | None],
        buffers: Sequence[memoryview],
    ) -> list[Write]:
        return self._guard(lambda: self._inner.write(keys, parents, buffers))

    def remove(self, keys: Sequence[StoreKey]) -> list[bool]:
        return self._guard(lambda: self._inner.remove(keys))

    def statistics(self) -> StoreStatistics:
        return self._inner.statistics()

    def close(self) -> None:
        self._inner.close()

    def _guard(self, call: Callable[[], _T]) -> _T:
        self._admit()
        try:
            result = call()
        except TierUnavailable:
            with self._lock:
                self._failed_in_a_row += 1
                self._next_probe = self._clock() + self._retry_seconds
            raise
        with self._lock:
            self._failed_in_a_row = 0
        return result

    def _admit(self) -> None:
        with self._lock:
            if not self.is_open:
                return
            now = self._clock()
            if now < self._next_probe:
                raise TierUnavailable(
                    f"switched off after {self._failed_in_a_row} failures in a row",
                    hint=f"tried again in {self._next_probe - now:.1f} s",
                )
            self._next_probe = now + self._retry_seconds
