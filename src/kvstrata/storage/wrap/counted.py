"""Counting: why a store could not do what it was asked, and what it found to be wrong."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from kvstrata.core.errors import FaultCause, TierUnavailable
from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage.store import Store
from kvstrata.storage.wrap.forward import T, WrappedStore

_FAULTS: Final = {Read.CORRUPT: "corrupt", Read.FOREIGN: "foreign"}


class CountedStore(WrappedStore):
    """Tells *count* of each fault: its cause, and how many blocks or calls it met.

    Causes are those of ``TierUnavailable``, one for each call that raised it, and for each block
    ``full``, ``corrupt`` and ``foreign``, and for each block that could not be asked for while
    others could (``StoreStatistics.failed_blocks``) why that was. *count* is called on the thread of the call.
    """

    def __init__(self, inner: Store, count: Callable[[str, int], None]) -> None:
        super().__init__(inner)
        self._count = count
        self._lock = threading.Lock()  # guards what follows
        self._failed_blocks: Mapping[FaultCause, int] = {}  # as counted so far

    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        fates = super().read_into(keys, buffers)
        for fate, cause in _FAULTS.items():
            self._count(cause, fates.count(fate))
        return fates

    def write(
        self,
        keys: Sequence[StoreKey],
        parents: Sequence[StoreKey | None],
        buffers: Sequence[memoryview],
    ) -> list[Write]:
        fates = super().write(keys, parents, buffers)
        self._count("full", fates.count(Write.FULL))
        return fates

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except TierUnavailable as e:
            self._count(e.cause, 1)
            raise
        finally:
            self._count_failed_blocks()

    def _count_failed_blocks(self) -> None:
        with self._lock, suppress(TierUnavailable):  # closed meanwhile
            failed = self._inner.statistics().failed_blocks
            for cause, blocks in failed.items():
                self._count(cause, blocks - self._failed_blocks.get(cause, 0))
            self._failed_blocks = failed
