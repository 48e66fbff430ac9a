"""How long calls to the stores take, and how many bytes they move: the sink of ``TimedStore``."""

import threading
from typing import Final, NamedTuple

from kvstrata.observe.histogram import Histogram

OPERATION_SECONDS: Final = "kvstrata_store_operation_seconds"
OPERATION_BYTES: Final = "kvstrata_store_operation_bytes_total"


class OperationCounts(NamedTuple):
    """Calls of one operation of one tier's store."""

    tier: str
    operation: str
    calls: int
    seconds: float  # of all calls together
    moved_bytes: int
    within: list[int]  # calls that took at most each of ``SECONDS_BUCKETS``


class OperationMetrics:
    """By tier and operation, for any number of tiers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what is below
        self._seconds: dict[tuple[str, str], Histogram] = {}
        self._bytes: dict[tuple[str, str], int] = {}

    def observe(self, tier: str, operation: str, seconds: float, moved_bytes: int) -> None:
        """Count one call. Bind *tier* with ``functools.partial`` to make the sink of one store."""
        key = tier, operation
        with self._lock:
            if key not in self._seconds:
                self._seconds[key], self._bytes[key] = Histogram(), 0
            self._seconds[key].observe(seconds)
            self._bytes[key] += moved_bytes

    def snapshot(self) -> list[OperationCounts]:
        """What has been counted, for each tier and operation that was called."""
        found = []
        with self._lock:
            for key in sorted(self._seconds):
                within, calls = self._seconds[key].cumulative()
                seconds = self._seconds[key].seconds
                found.append(OperationCounts(*key, calls, seconds, self._bytes[key], within))
        return found
