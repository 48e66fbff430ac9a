"""Timing: how long each call to a store took, and how many bytes it moved."""

import time
from collections.abc import Callable, Sequence
from typing import Literal

from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage.store import Store
from kvstrata.storage.wrap.forward import WrappedStore

Operation = Literal["exists", "read", "write", "remove"]


class TimedStore(WrappedStore):
    """Reports each call to *observe* as operation, seconds and bytes, also one that raises.

    Bytes are those of blocks that were read or newly stored: none for a miss, a block that was
    there already, or a call that raised. *observe* is called on the thread of the call.
    """

    def __init__(
        self,
        inner: Store,
        observe: Callable[[Operation, float, int], None],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(inner)
        self._observe = observe
        self._clock = clock

    def exists(self, keys: Sequence[StoreKey]) -> Sequence[bool | None]:
        start = self._clock()
        try:
            return self._inner.exists(keys)
        finally:
            self._observe("exists", self._clock() - start, 0)

    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        start = self._clock()
        moved_bytes = 0
        try:
            fates = self._inner.read_into(keys, buffers)
            moved_bytes = _bytes_of(buffers, [fate is Read.HIT for fate in fates])
            return fates
        finally:
            self._observe("read", self._clock() - start, moved_bytes)

    def write(
        self,
        keys: Sequence[StoreKey],
        parents: Sequence[StoreKey | None],
        buffers: Sequence[memoryview],
    ) -> list[Write]:
        start = self._clock()
        moved_bytes = 0
        try:
            fates = self._inner.write(keys, parents, buffers)
            moved_bytes = _bytes_of(buffers, [fate is Write.STORED for fate in fates])
            return fates
        finally:
            self._observe("write", self._clock() - start, moved_bytes)

    def remove(self, keys: Sequence[StoreKey]) -> list[bool]:
        start = self._clock()
        try:
            return self._inner.remove(keys)
        finally:
            self._observe("remove", self._clock() - start, 0)


def _bytes_of(buffers: Sequence[memoryview], moved: Sequence[bool]) -> int:
    return sum(buffer.nbytes for buffer, was_moved in zip(buffers, moved, strict=True) if was_moved)
