"""How long calls to the stores take, and how many bytes they move: the sink of ``TimedStore``."""

import threading
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from kvstrata.observe.histogram import Histogram


class OperationCounts(NamedTuple):
    """Calls of one operation of one tier's store."""

    tier: str
    operation: str
    calls: int
    seconds: float  # of all calls together
    moved_bytes: int
    within: list[int]  # calls that took at most each of ``SECONDS_BUCKETS``


@dataclass(slots=True)
class _Calls:
    durations: Histogram = field(default_factory=Histogram)
    moved_bytes: int = 0


class OperationMetrics:
    """By tier and operation, for any number of tiers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the calls
        self._calls: dict[tuple[str, str], _Calls] = {}

    def observe(self, tier: str, operation: str, seconds: float, moved_bytes: int) -> None:
        """Count one call. Bind *tier* with ``functools.partial`` to make the sink of one store."""
        with self._lock:
            calls = self._calls.get((tier, operation))
            if calls is None:
                calls = self._calls[tier, operation] = _Calls()
            calls.durations.observe(seconds)
            calls.moved_bytes += moved_bytes

    def snapshot(self) -> list[OperationCounts]:
        """What has been counted, for each tier and operation that was called."""
        found = []
        with self._lock:
            for key, calls in sorted(self._calls.items(), key=itemgetter(0)):
                within, number = calls.durations.cumulative()
                seconds = calls.durations.seconds
                found.append(OperationCounts(*key, number, seconds, calls.moved_bytes, within))
        return found
