"""How long the steps of requests take, as histograms."""

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from kvstrata.observe.operations import SECONDS_BUCKETS

if TYPE_CHECKING:
    from kvstrata.observe.metrics import Metric


class DurationCounts(NamedTuple):
    """One histogram of the catalogue, for one value of its label (empty if it has none)."""

    metric: str
    value: str
    calls: int
    seconds: float  # of all together
    within: list[int]  # those that took at most each of ``SECONDS_BUCKETS``


@dataclass(slots=True)
class _Histogram:
    seconds: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS_BUCKETS) + 1))


class Durations:
    """Observed durations by metric and value of its label. Not thread-safe."""

    def __init__(self) -> None:
        self._histograms: dict[tuple[Metric, str], _Histogram] = {}

    def observe(self, metric: "Metric", seconds: float, value: str = "") -> None:
        histogram = self._histograms.get((metric, value))
        if histogram is None:
            histogram = self._histograms[metric, value] = _Histogram()
        histogram.seconds += seconds
        histogram.counts[bisect_left(SECONDS_BUCKETS, seconds)] += 1

    def snapshot(self) -> list[DurationCounts]:
        """What has been observed; a histogram without observations is left out."""
        found = []
        for (metric, value), histogram in self._histograms.items():
            *within, calls = accumulate(histogram.counts)
            found.append(DurationCounts(metric.name, value, calls, histogram.seconds, within))
        return found
