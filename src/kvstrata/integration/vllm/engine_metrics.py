"""The metric catalogue in vLLM's own ``/metrics`` and log: what its frontends do with our counts."""

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvstrata.core.load import load_config
from kvstrata.manager.samples import Spread
from kvstrata.observe import metrics
from kvstrata.observe.histogram import SECONDS_BUCKETS
from kvstrata.observe.metrics import Metric

__all__ = ["KVStrataPromMetrics", "KVStrataStats", "replayed"]

_BETWEEN: Final = "|"
_BY_NAME: Final = {metric.name: metric for metric in metrics.CATALOGUE}
_COUNTERS, _GAUGES, _SPREADS = "counters", "gauges", "spreads"
_registered: list[Any] = []  # collectors of an engine that this process started


class KVStrataStats(KVConnectorStats):
    """What has changed: amounts that counters and histograms grow by, values that gauges have now.

    ``data`` is three mappings, from the name of a metric and the values of its labels with bars
    between them. That of histograms is to seconds, all observations, and those within each bound.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or {})
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, dict[str, Any]] = {_COUNTERS: {}, _GAUGES: {}, _SPREADS: {}}

    def add_counter(self, metric: Metric, labels: Sequence[str], amount: float) -> None:
        key = _key(metric, labels)
        self.data[_COUNTERS][key] = self.data[_COUNTERS].get(key, 0) + amount

    def set_gauge(self, metric: Metric, labels: Sequence[str], value: float) -> None:
        self.data[_GAUGES][_key(metric, labels)] = value

    def add_spread(self, metric: Metric, labels: Sequence[str], spread: Spread) -> None:
        numbers = [spread.seconds, spread.calls, *spread.within]
        self._add_numbers(_key(metric, labels), numbers)

    def aggregate(self, other: KVConnectorStats) -> "KVStrataStats":
        """Take in *other*, which is later."""
        for key, amount in other.data[_COUNTERS].items():
            self.data[_COUNTERS][key] = self.data[_COUNTERS].get(key, 0) + amount
        self.data[_GAUGES].update(other.data[_GAUGES])
        for key, numbers in other.data[_SPREADS].items():
            self._add_numbers(key, numbers)
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log says: the counters without labels that have counted."""
        return {
            key.removeprefix("kvstrata_").removesuffix("_total"): round(amount, 3)
            for key, amount in self.data[_COUNTERS].items()
            if amount and _BETWEEN not in key
        }

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def _add_numbers(self, key: str, numbers: Sequence[float]) -> None:
        before = self.data[_SPREADS].get(key)
        if before is not None:
            numbers = [old + new for old, new in zip(before, numbers, strict=True)]
        self.data[_SPREADS][key] = list(numbers)


class KVStrataPromMetrics(KVConnectorPromMetrics):
    """The catalogue as metrics of vLLM's registry, with its labels (model and engine) before ours.

    An engine that is started later in the same process takes the place of an earlier one, as vLLM's
    own metrics do.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        for collector in _registered:
            with contextlib.suppress(KeyError):  # Ray's are not in the registry
                REGISTRY.unregister(collector)
        make = {
            "counter": metric_types[Counter],
            "gauge": metric_types[Gauge],
            "histogram": metric_types[Histogram],
        }
        self._metrics = {
            metric.name: make[metric.kind](
                name=metric.name,
                documentation=metric.help,
                labelnames=[*labelnames, *metric.label_names],
                **_options(metric),
            )
            for metric in metrics.CATALOGUE
        }
        _registered[:] = self._metrics.values()
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        is_embedded = load_config(extra).server == "embedded"
        for metric in metrics.CATALOGUE:
            if is_embedded or metric in metrics.OF_ENGINES:
                self._begin_at_zero(metric, per_engine_labelvalues.values())

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data[_COUNTERS].items():
            self._child(engine, key).inc(amount)
        for key, value in transfer_stats_data[_GAUGES].items():
            self._child(engine, key).set(value)
        for key, (seconds, calls, *within) in transfer_stats_data[_SPREADS].items():
            child = self._child(engine, key)
            for value in replayed(Spread(tuple(within), calls, seconds)):
                child.observe(value)

    def _begin_at_zero(self, metric: Metric, engines: Iterable[list[object]]) -> None:
        """Rates need the zero before the first count."""
        if metric.kind == "counter" and not metric.labels:
            for engine, value in itertools.product(engines, metric.values or ("",)):
                self._metrics[metric.name].labels(*engine, *([value] if value else []))

    def _child(self, engine: list[object], key: str) -> Any:
        name, labels = _split(key)
        return self._metrics[name].labels(*engine, *labels)


def replayed(spread: Spread) -> Iterator[float]:
    """Values that make a histogram of what *spread* counts, and add up to its seconds.

    All lie at the same place between the bounds of their buckets: where that gives the sum. Only
    those above the last bound are all alike.
    """
    bounds = (0.0, *SECONDS_BUCKETS)
    counts = [n - before for n, before in zip(spread.within, (0, *spread.within[:-1]), strict=True)]
    over = spread.calls - spread.within[-1]
    least = sum(n * low for n, low in zip(counts, bounds[:-1], strict=True))
    width = sum(
        n * (high - low) for n, low, high in zip(counts, bounds[:-1], bounds[1:], strict=True)
    )
    left = spread.seconds - least - over * bounds[-1]
    place = min(1.0, max(0.0, left / width)) if width else 0.0
    for n, low, high in zip(counts, bounds[:-1], bounds[1:], strict=True):
        value = low + place * (high - low)
        yield from [min(high, max(value, math.nextafter(low, high)))] * n
    if over:
        rest = max(0.0, left - place * width) / over
        yield from [max(bounds[-1] + rest, math.nextafter(bounds[-1], math.inf))] * over


def _options(metric: Metric) -> dict[str, Any]:
    if metric.kind == "gauge":
        return {"multiprocess_mode": "mostrecent"}  # any API server may have the latest
    return {"buckets": list(SECONDS_BUCKETS)} if metric.kind == "histogram" else {}


def _key(metric: Metric, labels: Sequence[str]) -> str:
    return _BETWEEN.join((metric.name, *labels))


def _split(key: str) -> tuple[str, list[str]]:
    """Name and labels; only the last label may have a bar in it."""
    name = key.partition(_BETWEEN)[0]
    count = len(_BY_NAME[name].label_names)
    return name, key.split(_BETWEEN, count)[1:]
