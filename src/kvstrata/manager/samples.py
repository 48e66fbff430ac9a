"""The values of the metric catalogue in a report: what every exporter exports."""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvstrata.manager.report import CacheReport
from kvstrata.observe import metrics
from kvstrata.observe.metrics import Metric

__all__ = ["Sample", "Spread", "samples"]

_LABEL: Final = re.compile(r"\{[^=}]+=([^}]*)\}")
_BY_NAME: Final = {metric.name: metric for metric in metrics.CATALOGUE}


class Spread(NamedTuple):
    """The value of a histogram."""

    within: tuple[int, ...]  # observations of at most each of ``SECONDS_BUCKETS``
    calls: int
    seconds: float


class Sample(NamedTuple):
    metric: Metric
    labels: tuple[str, ...]  # values, in the order of ``metric.label_names``
    value: float | Spread


def samples(report: CacheReport) -> Iterator[Sample]:
    """Every sample of *report*; names that this version does not know are left out."""
    yield from _counters(report)
    yield from _histograms(report)
    yield from _gauges(report)


def _counters(report: CacheReport) -> Iterator[Sample]:
    for name, value in report.counters.items():
        metric = _BY_NAME.get(name.partition("{")[0])
        if metric is not None:
            yield Sample(metric, tuple(_LABEL.findall(name)), value)
    saved = report.counters.get(metrics.SAVED_BLOCKS.name, 0)
    block_bytes = report.tiers[0].block_bytes if report.tiers else 0
    yield Sample(metrics.SAVED_BYTES, (), saved * block_bytes)
    yield Sample(metrics.SPARED_SECONDS, (), report.spared_prefill_seconds)
    for each in report.operations:
        yield Sample(metrics.STORE_BYTES, (each.tier, each.operation), each.moved_bytes)


def _histograms(report: CacheReport) -> Iterator[Sample]:
    for each in report.operations:
        spread = Spread(tuple(each.within), each.calls, each.seconds)
        yield Sample(metrics.STORE_SECONDS, (each.tier, each.operation), spread)
    for duration in report.durations:
        metric = _BY_NAME.get(duration.metric)
        if metric is not None:
            labels = (duration.value,) if metric.label_names else ()
            spread = Spread(tuple(duration.within), duration.calls, duration.seconds)
            yield Sample(metric, labels, spread)


def _gauges(report: CacheReport) -> Iterator[Sample]:
    for tier in report.tiers:
        where = (tier.tier,)
        yield Sample(metrics.CAPACITY_BYTES, where, tier.capacity_blocks * tier.block_bytes)
        yield Sample(metrics.USED_BYTES, where, tier.used_blocks * tier.block_bytes)
        yield Sample(metrics.WAITING_BLOCKS, where, tier.waiting_blocks)
        yield Sample(metrics.READING_BLOCKS, where, tier.reading_blocks)
        yield Sample(metrics.SWITCHED_OFF, where, int(tier.switched_off))
        if tier.tier == "host":
            yield Sample(metrics.BACKED_BYTES, where, tier.backed_bytes)
            yield Sample(metrics.PADDING_BYTES, where, tier.padding_bytes)
            yield Sample(metrics.LONGEST_FREE_RUN, where, tier.longest_free_run)
    yield Sample(metrics.RUNNING_TASKS, ("load",), report.running_gets)
    yield Sample(metrics.RUNNING_TASKS, ("save",), report.running_puts)
    yield Sample(metrics.PINNED_BLOCKS, (), report.pinned_blocks)
    yield Sample(metrics.LEASED_BLOCKS, (), report.leased_blocks)
    yield Sample(metrics.ENGINES, (), len(report.engines))
