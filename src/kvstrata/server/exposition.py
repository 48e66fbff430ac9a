"""Reports of servers in the Prometheus text format."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvstrata.manager.report import CacheReport
from kvstrata.manager.samples import Sample, Spread, samples
from kvstrata.observe import metrics
from kvstrata.observe.histogram import SECONDS_BUCKETS

__all__ = ["exposition"]

_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_FAMILIES: Final[Mapping[metrics.Kind, type[_Family]]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def exposition(reports: Mapping[str, CacheReport]) -> bytes:
    """Return what *reports* tell of the catalogue, labelled with the *server* that each is of."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Reports(reports))
    return generate_latest(registry)


class _Reports(Collector):
    def __init__(self, reports: Mapping[str, CacheReport]) -> None:
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        found = [(server, list(samples(report))) for server, report in self._reports.items()]
        for metric in metrics.CATALOGUE:
            if metric in metrics.OF_ENGINES:
                continue
            labels = ["server", *metric.label_names]
            family = _FAMILIES[metric.kind](metric.name, metric.help, labels=labels)
            for server, of_server in found:
                _add(family, server, (s for s in of_server if s.metric is metric))
            yield family


def _add(family: _Family, server: str, found: Iterable[Sample]) -> None:
    for sample in found:
        labels = [server, *sample.labels]
        if isinstance(family, HistogramMetricFamily):
            assert isinstance(sample.value, Spread)
            buckets = [
                (str(le), n) for le, n in zip(SECONDS_BUCKETS, sample.value.within, strict=True)
            ]
            buckets.append(("+Inf", sample.value.calls))
            family.add_metric(labels, buckets, sample.value.seconds)
        else:
            assert not isinstance(sample.value, Spread)
            family.add_metric(labels, sample.value)
