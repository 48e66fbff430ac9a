"""The metric catalogue, and the counters of one server."""

from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter

from kvstrata.observe.operations import OperationMetrics


class Metric(NamedTuple):
    name: str
    help: str
    values: tuple[str, ...] = ()  # of its label, if it has one
    label: str = "tier"

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.label,) if self.values else ()


LOOKUPS: Final = Metric("kvstrata_lookups_total", "Lookups answered.")
LOOKUP_BLOCKS: Final = Metric(
    "kvstrata_lookup_blocks_total",
    "Blocks asked for, by the tier that answered (tier='none' is a miss). "
    "Summed over tier this is every block of every lookup.",
    ("host", "disk", "remote", "none"),
)
DECLINED_BLOCKS: Final = Metric(
    "kvstrata_declined_blocks_total",
    "Blocks that a lookup found and did not take: computing them was expected to be sooner "
    "(recompute), they would have come after the load timeout (too_late), host memory had no "
    "room for them (no_room), or their tier was switched off (off).",
    ("recompute", "too_late", "no_room", "off"),
    "reason",
)
LOADED_BLOCKS: Final = Metric(
    "kvstrata_loaded_blocks_total", "Blocks that engines have loaded from host memory."
)
FAILED_LOADS: Final = Metric(
    "kvstrata_failed_loads_total", "Loads that an engine reported as failed; it recomputed them."
)
SAVED_BLOCKS: Final = Metric("kvstrata_saved_blocks_total", "Blocks that engines have saved.")
SHED_BLOCKS: Final = Metric(
    "kvstrata_shed_blocks_total", "Blocks offered for saving that found no room in host memory."
)
PROMOTED_BLOCKS: Final = Metric(
    "kvstrata_promoted_blocks_total",
    "Blocks read into host memory, by the tier that they came from.",
    ("disk", "remote"),
)
CASCADED_BLOCKS: Final = Metric(
    "kvstrata_cascaded_blocks_total",
    "Blocks written from host memory, by the tier that they went to.",
    ("disk", "remote"),
)
EVICTED_BLOCKS: Final = Metric(
    "kvstrata_evicted_blocks_total", "Blocks given up to make room, by tier.", ("host", "disk")
)
LOST_BLOCKS: Final = Metric(
    "kvstrata_lost_blocks_total",
    "Blocks that left host memory before they could reach a tier below.",
)
CORRUPT_BLOCKS: Final = Metric(
    "kvstrata_corrupt_blocks_total", "Stored blocks that failed a check; dropped, never served."
)
REMOTE_FAULTS: Final = Metric(
    "kvstrata_remote_faults_total",
    "Calls to the tier shared with other nodes that failed, by cause: nobody answered (unreachable), "
    "or not in time (timeout), its name is not known (name), it did not let us in (credentials), it "
    "answered with an error (refused), a mount failed (io); and blocks that found no room (full), "
    "failed a check (corrupt), or had their name taken by something else (foreign).",
    (
        "unreachable",
        "timeout",
        "name",
        "credentials",
        "refused",
        "io",
        "full",
        "closed",
        "corrupt",
        "foreign",
    ),
    "cause",
)
UNLOGGED_EVENTS: Final = Metric(
    "kvstrata_unlogged_events_total",
    "Lookups and saves that are missing in the event log: it could not be written, or not fast "
    "enough, or blocks of their namespace have another number of tokens.",
)

CATALOGUE: Final = (
    LOOKUPS,
    LOOKUP_BLOCKS,
    LOADED_BLOCKS,
    FAILED_LOADS,
    SAVED_BLOCKS,
    SHED_BLOCKS,
    PROMOTED_BLOCKS,
    CASCADED_BLOCKS,
    EVICTED_BLOCKS,
    LOST_BLOCKS,
    CORRUPT_BLOCKS,
    DECLINED_BLOCKS,
    UNLOGGED_EVENTS,
    REMOTE_FAULTS,
)


class Counters:
    """The catalogue's counters in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.operations = OperationMetrics(CollectorRegistry())
        self._counters = {
            metric: Counter(metric.name, metric.help, metric.labels, registry=self._registry)
            for metric in CATALOGUE
        }
        # By metric and label; one that has not counted reads 0.
        self._labelled = {
            (metric, value): self._counters[metric].labels(value)
            for metric in CATALOGUE
            for value in metric.values
        }

    def add(self, metric: Metric, amount: int, value: str | None = None) -> None:
        if amount:
            counter = self._counters[metric] if value is None else self._labelled[metric, value]
            counter.inc(amount)

    def snapshot(self) -> dict[str, int]:
        """Every value by name, a labelled one as ``name{label=value}``."""
        return {
            sample.name + "".join(f"{{{k}={v}}}" for k, v in sample.labels.items()): int(
                sample.value
            )
            for family in self._registry.collect()
            for sample in family.samples
            if sample.name.endswith("_total")
        }
