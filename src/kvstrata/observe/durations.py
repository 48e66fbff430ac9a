"""How long the steps of requests take, as histograms."""

from typing import TYPE_CHECKING, NamedTuple

from kvstrata.observe.histogram import Histogram

if TYPE_CHECKING:
    from kvstrata.observe.metrics import Metric


class DurationCounts(NamedTuple):
    """One histogram of the catalogue, for one value of its label (empty if it has none)."""

    metric: str
    value: str
    calls: int
    seconds: float  # of all together
    within: list[int]  # those that took at most each of ``SECONDS_BUCKETS``


class Durations:
    """Observed durations by metric and value of its label. Not thread-safe."""

    def __init__(self) -> None:
        self._histograms: dict[tuple[str, str], Histogram] = {}

    def observe(self, metric: "Metric", seconds: float, value: str = "") -> None:
        histogram = self._histograms.get((metric.name, value))
        if histogram is None:
            histogram = self._histograms[metric.name, value] = Histogram()
        histogram.observe(seconds)

    def snapshot(self) -> list[DurationCounts]:
        """What has been observed; a histogram without observations is left out."""
        found = []
        for (name, value), histogram in self._histograms.items():
            within, calls = histogram.cumulative()
            found.append(DurationCounts(name, value, calls, histogram.seconds, within))
        return found
