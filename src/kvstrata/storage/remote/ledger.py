"""What every remote store keeps account of: whether it is open, and what it has seen."""

import threading
from collections import Counter

from kvstrata.core.errors import FaultCause, TierUnavailable
from kvstrata.storage.store import StoreStatistics


class Ledger:
    """Counts of one store on a remote engine. Thread-safe.

    How many blocks the engine holds only the engine knows, and to ask it is dear: ``blocks`` is
    what this store has written less what it has removed.
    """

    def __init__(self, name: str, *, block_bytes: int, search_width: int = 1024) -> None:
        """*name*, of the store, must hold no secret: errors show it."""
        self.name = name
        self.block_bytes = block_bytes
        self._search_width = search_width
        self._lock = threading.Lock()  # guards everything below
        self._blocks = 0
        self._corrupt_blocks = 0
        self._failed_blocks: Counter[FaultCause] = Counter()
        self._closed = False

    def check_open(self) -> None:
        if self._closed:
            raise TierUnavailable(f"{self.name} is closed", cause="closed")

    @property
    def is_closed(self) -> bool:
        return self._closed

    def wrote(self, blocks: int) -> None:
        with self._lock:
            self._blocks += blocks

    def removed(self, blocks: int) -> None:
        with self._lock:
            self._blocks = max(0, self._blocks - blocks)

    def found_corrupt(self, blocks: int) -> None:
        with self._lock:
            self._corrupt_blocks += blocks

    def failed(self, cause: FaultCause) -> None:
        """A block could not be asked for, because of *cause*, in a call that did not fail."""
        with self._lock:
            self._failed_blocks[cause] += 1

    def close(self) -> bool:
        """Whether it was open until now."""
        with self._lock:
            was_open, self._closed = not self._closed, True
            return was_open

    def statistics(self) -> StoreStatistics:
        self.check_open()
        with self._lock:
            return StoreStatistics(
                self._blocks,
                0,
                self.block_bytes,
                self._corrupt_blocks,
                variable=True,
                search_width=self._search_width,
                failed_blocks=dict(self._failed_blocks),
            )
