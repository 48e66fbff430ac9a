"""How long things take, as the cumulative counts that Prometheus wants."""

from bisect import bisect_left
from itertools import accumulate
from typing import Final

# From a lookup in memory to a store that hangs.
SECONDS_BUCKETS: Final = (
    1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0
)  # fmt: skip


class Histogram:
    """Durations by ``SECONDS_BUCKETS``. Not thread-safe."""

    __slots__ = ("_counts", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0  # of all together
        self._counts = [0] * (len(SECONDS_BUCKETS) + 1)

    def observe(self, seconds: float) -> None:
        self.seconds += seconds
        self._counts[bisect_left(SECONDS_BUCKETS, seconds)] += 1

    def cumulative(self) -> tuple[list[int], int]:
        """Those that took at most each of the buckets, and all."""
        *within, calls = accumulate(self._counts)
        return within, calls
