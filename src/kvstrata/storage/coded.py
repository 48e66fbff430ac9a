"""A store that keeps its blocks in another form: what compressed and quantised stores share."""

import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from kvstrata.core.types import NamespaceId, Read, StoreKey, Write
from kvstrata.storage.batch import check_lengths
from kvstrata.storage.store import Store, StoreStatistics

_SCRATCH_BYTES: Final = 8 << 20  # what one call holds of frames at a time


class CodedStore(ABC):
    """Keeps a *frame* for each block in *inner*; a subclass says how to make and read one.

    A frame that ``_decode`` refuses is ``Read.CORRUPT``: it is removed and counted. (A frame that
    another thread has put in its place in that moment goes with it: a block is computed again.)

    Batches go to *inner* in parts whose frames fit 8 MiB. Coding runs on the thread of the call.
    """

    def __init__(self, inner: Store, *, block_bytes: int, variable: bool) -> None:
        self._inner = inner
        self._block_bytes = block_bytes
        self._variable = variable
        self._frame_bytes = inner.statistics().block_bytes
        self._part = max(1, _SCRATCH_BYTES // self._frame_bytes)
        self._lock = threading.Lock()  # guards the two below
        self._idle_frames: list[memoryview] = []  # as many as were ever used at once
        self._corrupt_blocks = 0

    @abstractmethod
    def _encode(self, block: memoryview, frame: memoryview) -> int:
        """Put the frame of *block* into the first bytes of *frame* and return its length.

        *frame* is as long as the blocks of *inner*.
        """

    @abstractmethod
    def _decode(self, frame: memoryview, block: memoryview) -> bool:
        """Fill *block* from *frame*, which may be longer; false if the frame is damaged.

        Raises ``InvariantViolated`` if *block* is shorter than the value.
        """

    def drop_namespace(self, namespace_id: NamespaceId) -> int:
        return self._inner.drop_namespace(namespace_id)

    def exists(self, keys: Sequence[StoreKey]) -> Sequence[bool | None]:
        return self._inner.exists(keys)

    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        check_lengths(buffers, self._block_bytes, variable=self._variable)
        fates: list[Read] = []
        for first in range(0, len(keys), self._part):
            part = slice(first, first + self._part)
            fates += self._read_part(keys[part], buffers[part])
        return fates

    def write(
        self,
        keys: Sequence[StoreKey],
        parents: Sequence[StoreKey | None],
        buffers: Sequence[memoryview],
    ) -> list[Write]:
        check_lengths(buffers, self._block_bytes, variable=self._variable)
        fates: list[Write] = []
        for first in range(0, len(keys), self._part):
            part = slice(first, first + self._part)
            with self._frames(len(keys[part])) as frames:
                coded = [
                    frame[: self._encode(buffer, frame)]
                    for buffer, frame in zip(buffers[part], frames, strict=True)
                ]
                fates += self._inner.write(keys[part], parents[part], coded)
        return fates

    def remove(self, keys: Sequence[StoreKey]) -> list[bool]:
        return self._inner.remove(keys)

    def statistics(self) -> StoreStatistics:
        inner = self._inner.statistics()
        return inner._replace(
            block_bytes=self._block_bytes,
            corrupt_blocks=inner.corrupt_blocks + self._corrupt_blocks,
            variable=self._variable,
        )

    def close(self) -> None:
        self._inner.close()

    def _read_part(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        with self._frames(len(keys)) as frames:
            fates = self._inner.read_into(keys, frames)
            for position, (frame, buffer) in enumerate(zip(frames, buffers, strict=True)):
                if fates[position] is Read.HIT and not self._decode(frame, buffer):
                    fates[position] = Read.CORRUPT
                    self._drop(keys[position])
        return fates

    def _drop(self, key: StoreKey) -> None:
        if self._inner.remove([key]) == [True]:
            with self._lock:
                self._corrupt_blocks += 1

    @contextmanager
    def _frames(self, count: int) -> Iterator[list[memoryview]]:
        """*count* frames of scratch memory, page-aligned, that nobody else uses meanwhile."""
        with self._lock:
            frames, self._idle_frames = self._idle_frames[:count], self._idle_frames[count:]
        while len(frames) < count:
            frames.append(memoryview(mmap.mmap(-1, self._frame_bytes)))
        try:
            yield frames
        finally:
            with self._lock:
                self._idle_frames += frames
