"""Reports of servers in the Prometheus text format."""

import re
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvstrata.cli.servers import ServerView
from kvstrata.manager.report import CacheReport
from kvstrata.observe.metrics import CATALOGUE
from kvstrata.observe.operations import SECONDS_BUCKETS

__all__ = ["exposition"]

_LABEL: Final = re.compile(r"\{([^=}]+)=([^}]*)\}")


def exposition(views: Iterable[ServerView]) -> str:
    """Return counters of the catalogue and gauges of the tiers, with a label for the server."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Reports([(str(v.socket), v.report) for v in views if v.report]))
    return generate_latest(registry).decode()


class _Reports(Collector):
    def __init__(self, reports: list[tuple[str, CacheReport]]) -> None:
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        yield from self._counters()
        yield from self._gauges()

    def _counters(self) -> Iterator[Metric]:
        for metric in CATALOGUE:
            name = metric.name.removesuffix("_total")
            family = CounterMetricFamily(name, metric.help, labels=["server", *metric.labels])
            for socket, report in self._reports:
                for sample, value in report.counters.items():
                    if sample.partition("{")[0] == metric.name:
                        labels = dict(_LABEL.findall(sample))
                        values = [labels.get(label, "") for label in metric.labels]
                        family.add_metric([socket, *values], value)
            yield family

    def _operations(self) -> Iterator[Metric]:
        labels = ["server", "tier", "operation"]
        seconds = HistogramMetricFamily(
            "kvstrata_store_operation_seconds",
            "Duration of calls to a store, each for a batch of blocks, failed ones included.",
            labels=labels,
        )
        moved = CounterMetricFamily(
            "kvstrata_store_operation_bytes",
            "Bytes of the blocks that a store has read or newly stored.",
            labels=labels,
        )
        for socket, report in self._reports:
            for each in report.operations:
                where = [socket, each.tier, each.operation]
                buckets = [(str(le), n) for le, n in zip(SECONDS_BUCKETS, each.within, strict=True)]
                seconds.add_metric(where, [*buckets, ("+Inf", each.calls)], each.seconds)
                moved.add_metric(where, each.moved_bytes)
        yield from (seconds, moved)

    def _gauges(self) -> Iterator[Metric]:
        by_tier = ["server", "tier"]
        capacity = GaugeMetricFamily(
            "kvstrata_tier_capacity_bytes", "Bytes that a tier can hold.", labels=by_tier
        )
        used = GaugeMetricFamily(
            "kvstrata_tier_used_bytes", "Bytes of blocks in a tier.", labels=by_tier
        )
        waiting = GaugeMetricFamily(
            "kvstrata_tier_waiting_blocks", "Blocks still to be written there.", labels=by_tier
        )
        off = GaugeMetricFamily(
            "kvstrata_tier_switched_off", "1 while its circuit breaker is open.", labels=by_tier
        )
        backed = GaugeMetricFamily(
            "kvstrata_tier_backed_bytes", "Bytes of host memory that are there.", labels=by_tier
        )
        padding = GaugeMetricFamily(
            "kvstrata_tier_padding_bytes", "Bytes that blocks leave of their slots.", labels=by_tier
        )
        free_run = GaugeMetricFamily(
            "kvstrata_tier_longest_free_run", "Free slots that lie side by side.", labels=by_tier
        )
        running = GaugeMetricFamily(
            "kvstrata_running_tasks", "Loads and saves in flight.", labels=["server", "kind"]
        )
        pinned = GaugeMetricFamily(
            "kvstrata_pinned_blocks", "Blocks that operators have pinned.", labels=["server"]
        )
        for socket, report in self._reports:
            pinned.add_metric([socket], report.pinned_blocks)
            for tier in report.tiers:
                where = [socket, tier.tier]
                capacity.add_metric(where, tier.capacity_blocks * tier.block_bytes)
                used.add_metric(where, tier.used_blocks * tier.block_bytes)
                waiting.add_metric(where, tier.waiting_blocks)
                off.add_metric(where, int(tier.switched_off))
                if tier.tier == "host":
                    backed.add_metric(where, tier.backed_bytes)
                    padding.add_metric(where, tier.padding_bytes)
                    free_run.add_metric(where, tier.longest_free_run)
            running.add_metric([socket, "load"], report.running_gets)
            running.add_metric([socket, "save"], report.running_puts)
        yield from self._operations()
        yield from (capacity, used, waiting, off, backed, padding, free_run, running, pinned)
