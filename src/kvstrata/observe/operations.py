"""How long calls to the stores take, and how many bytes they move: the sink of ``TimedStore``."""

from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram

# From a lookup in memory to a store that hangs.
SECONDS_BUCKETS: Final = (
    1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0
)  # fmt: skip


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
    """Two metrics in *registry*, labelled by tier and operation, for any number of tiers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("tier", "operation")
        self._seconds = Histogram(
            OPERATION_SECONDS,
            "Duration of calls.",
            labels,
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self._bytes = Counter(
            OPERATION_BYTES,
            "Bytes moved.",
            labels,
            registry=registry,
        )

    def observe(self, tier: str, operation: str, seconds: float, moved_bytes: int) -> None:
        """Count one call. Bind *tier* with ``functools.partial`` to make the sink of one store."""
        self._seconds.labels(tier, operation).observe(seconds)
        self._bytes.labels(tier, operation).inc(moved_bytes)

    def snapshot(self) -> list[OperationCounts]:
        """What has been counted, for each tier and operation that was called.

        One whose first call is being counted at this moment is left out.
        """
        found: dict[tuple[str, str], dict[str, float]] = {}
        for family in (*self._seconds.collect(), *self._bytes.collect()):
            for sample in family.samples:
                labels = sample.labels
                values = found.setdefault((labels["tier"], labels["operation"]), {})
                values[sample.name + labels.get("le", "")] = sample.value
        return [
            OperationCounts(
                tier,
                operation,
                int(values[f"{OPERATION_SECONDS}_count"]),
                values[f"{OPERATION_SECONDS}_sum"],
                int(values[OPERATION_BYTES]),
                [int(values[f"{OPERATION_SECONDS}_bucket{le}"]) for le in SECONDS_BUCKETS],
            )
            for (tier, operation), values in sorted(found.items())
            if values.keys() >= {f"{OPERATION_SECONDS}_count", OPERATION_BYTES}
        ]
