"""Stores that fail on purpose, around any store: what the code above a store has to bear."""

import enum
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvstrata.core.errors import TierUnavailable
from kvstrata.core.types import Read, StoreKey
from kvstrata.storage.store import Store
from kvstrata.storage.wrap import WrappedStore
from kvstrata.storage.wrap.forward import T


class Fault(enum.Enum):
    """What becomes of one call to a ``FlakyStore``."""

    NONE = "none"
    BEFORE = "before"  # the store is not reached: nothing is done
    AFTER = "after"  # all is done, and the answer is lost


class FlakyStore(WrappedStore):
    """Raises ``TierUnavailable`` by *plan*: one ``Fault`` for each call, in turn, then none.

    ``plan`` may be set anew at any time: ``itertools.repeat(Fault.BEFORE)`` is an outage.
    """

    def __init__(self, inner: Store, plan: Iterable[Fault] = ()) -> None:
        super().__init__(inner)
        self.plan: Iterator[Fault] = iter(plan)
        self.calls = 0
        self._lock = threading.Lock()  # guards both

    def _call(self, call: Callable[[], T]) -> T:
        with self._lock:
            self.calls += 1
            fault = next(self.plan, Fault.NONE)
        if fault is Fault.BEFORE:
            raise TierUnavailable("the plan says that the store is away")
        result = call()
        if fault is Fault.AFTER:
            raise TierUnavailable("the plan says that the answer is lost")
        return result


class SlowStore(WrappedStore):
    """Waits *delay_seconds* before each call. ``delay_seconds`` may be changed at any time."""

    def __init__(
        self, inner: Store, delay_seconds: float, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        super().__init__(inner)
        self.delay_seconds = delay_seconds
        self._sleep = sleep

    def _call(self, call: Callable[[], T]) -> T:
        self._sleep(self.delay_seconds)
        return call()


class LyingStore(WrappedStore):
    """Serves blocks with one bit flipped and calls them ``HIT``: a store without a checksum.

    Lies about the blocks of ``lies_about``, always in the byte at ``position``.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.lies_about: set[StoreKey] = set()
        self.position = 0

    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        fates = super().read_into(keys, buffers)
        for key, buffer, fate in zip(keys, buffers, fates, strict=True):
            if fate is Read.HIT and key in self.lies_about:
                buffer[self.position] ^= 0x10
        return fates
