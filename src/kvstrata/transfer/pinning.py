"""Host memory that a device reaches by itself, once it is registered with its driver.

That takes a fraction of a second a GiB, so it goes on beside the first copies, which the driver
then makes by way of memory of its own. What cannot be pinned stays as it is: copies are right
either way, and slower without.
"""

import logging
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from kvstrata.core.units import human_bytes
from kvstrata.storage.mapping import HostMapping
from kvstrata.transfer.descriptors import Spans
from kvstrata.transfer.driver import DeviceFault

__all__ = ["HostPins"]

_log = logging.getLogger(__name__)

_CHUNK_BYTES: Final = 1 << 30  # about what is registered between two looks at whether to stop
_PROGRESS_SECONDS: Final = 5.0
_LET_GO_SECONDS: Final = 10.0  # that jobs have to end, before the memory stays pinned for good


class HostPins:
    """Pins one mapping at a time, whole or not at all. Thread-safe."""

    def __init__(
        self,
        register: Callable[[int, int], None],
        unregister: Callable[[int], None],
        *,
        chunk_bytes: int = _CHUNK_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Both are given an address, the first one a length, too, and raise ``DeviceFault``."""
        self._register = register
        self._unregister = unregister
        self._chunk_bytes = chunk_bytes
        self._clock = clock
        self._pinned: list[int] = []  # addresses; for the thread that pins and lets go
        self._mapping: HostMapping | None = None  # is not to be unmapped before
        self._stuck: list[HostMapping] = []  # were never unpinned: never to be unmapped
        self._range = (0, 0)  # addresses from, to
        self._users = 0
        self._is_going = False
        self._changed = threading.Condition()  # guards these three

    def pin(self, mapping: HostMapping, is_over: Callable[[], bool]) -> bool:
        """Pin *mapping*, unless *is_over* meanwhile; whether it is pinned now. Never raises."""
        self.let_go()
        self._mapping = mapping
        start = int(mapping.data.ctypes.data)
        whole = mapping.data.nbytes
        began = told = self._clock()
        for offset, length in mapping.registration_chunks(self._chunk_bytes):
            if is_over():
                self.let_go()
                return False
            try:
                self._register(start + offset, length)
            except DeviceFault as e:
                self._say_why(e, offset, whole)
                self.let_go()
                return False
            self._pinned.append(start + offset)
            if self._clock() - told > _PROGRESS_SECONDS:
                told = self._clock()
                _log.info("pinned %s of %s", human_bytes(offset + length), human_bytes(whole))
        with self._changed:
            self._range = start, start + whole
        seconds = self._clock() - began
        _log.info("the host tier is pinned: %s in %.1f s", human_bytes(whole), seconds)
        return True

    def reaches(self, spans: Spans) -> bool:
        """Whether the host side of all *spans* is pinned."""
        first, end = self._range
        return bool(
            len(spans.host)
            and first <= spans.host.min()
            and (spans.host + spans.lengths_bytes).max() <= end
        )

    @contextmanager
    def used(self) -> Iterator[None]:
        """Around copies: what is pinned when they begin stays so until they have ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_going)
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def let_go(self) -> None:
        """Unpin, once no copies run; if some still run after 10 s, the memory stays pinned."""
        with self._changed:
            self._is_going, self._range = True, (0, 0)
            is_quiet = self._changed.wait_for(lambda: not self._users, _LET_GO_SECONDS)
        try:
            if is_quiet:
                self._unpin()
            elif self._mapping is not None:
                _log.warning("copies still run: the host tier that they use stays pinned")
                self._stuck.append(self._mapping)
            self._pinned, self._mapping = [], None
        finally:
            with self._changed:
                self._is_going = False
                self._changed.notify_all()

    def _unpin(self) -> None:
        for address in self._pinned:
            try:
                self._unregister(address)
            except DeviceFault as e:
                _log.warning("host memory stays pinned: %s", e)

    def _say_why(self, fault: DeviceFault, done_bytes: int, whole_bytes: int) -> None:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        may_be = "not limited" if limit == resource.RLIM_INFINITY else f"{human_bytes(limit)}"
        _log.warning(
            "the host tier is not pinned, and copies are slower: after %s of %s, %s. Locked memory "
            "(ulimit -l) is %s: set it to unlimited (docker run --ulimit memlock=-1), or lower the "
            "capacity of the host tier",
            human_bytes(done_bytes),
            human_bytes(whole_bytes),
            fault,
            may_be,
        )
