"""The metric catalogue: every name that is exported, wherever it is, and the counters of one server."""

import threading
from typing import Final, Literal, NamedTuple

from kvstrata.core.errors import InvariantViolated
from kvstrata.observe.durations import Durations
from kvstrata.observe.operations import OperationMetrics

Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    name: str
    help: str
    values: tuple[str, ...] = ()  # of its first label, if it has labels and they are known
    label: str = "tier"
    kind: Kind = "counter"
    labels: tuple[str, ...] = ()  # all of them, where it is not *label* alone

    @property
    def label_names(self) -> tuple[str, ...]:
        return self.labels or ((self.label,) if self.values else ())


LOOKUPS: Final = Metric(
    "kvstrata_lookups_total", "Lookups of engines answered. What `kvstrata warm` asks for is none."
)
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
    "room for them (no_room), their tier was switched off (off), or the tier shared with other nodes "
    "said too late that it has them (unanswered).",
    ("recompute", "too_late", "no_room", "off", "unanswered"),
    "reason",
)
LOADED_BLOCKS: Final = Metric(
    "kvstrata_loaded_blocks_total",
    "Blocks that engines have loaded from host memory, also those that blended requests reuse.",
)
FAILED_LOADS: Final = Metric(
    "kvstrata_failed_loads_total",
    "Loads that an engine reported as failed, or gave up as too late, and the runs of blended "
    "requests that failed, not of aborted ones; it recomputed them.",
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
    "answered with an error (refused), a mount or a library failed (io). Blocks that one server of a "
    "cluster failed to serve, by the same causes. And blocks that found no room (full), failed a "
    "check (corrupt), or had their name taken by something else (foreign).",
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
UNANSWERED_LOOKUPS: Final = Metric(
    "kvstrata_unanswered_lookups_total",
    "Lookups that went on without the tier shared with other nodes: what it has of the prompt it had "
    "not said within remote_lookup_seconds.",
)
UNLOGGED_EVENTS: Final = Metric(
    "kvstrata_unlogged_events_total",
    "Lookups and saves that are missing in the event log: it could not be written, or not fast "
    "enough, or blocks of their namespace have another number of tokens.",
)

LOADED_BYTES: Final = Metric(
    "kvstrata_loaded_bytes_total",
    "Bytes that engines have loaded, by the tier that they were found in.",
    ("host", "disk", "remote"),
)
SAVED_BYTES: Final = Metric(
    "kvstrata_saved_bytes_total", "Bytes of the blocks that engines have saved."
)
SPARED_TOKENS: Final = Metric(
    "kvstrata_spared_prefill_tokens_total",
    "Tokens of prompts that engines have loaded and not computed. Of blended requests all tokens of "
    "the blocks that they reuse, also the share that is computed anew.",
)
SPARED_SECONDS: Final = Metric(
    "kvstrata_spared_prefill_seconds_total",
    "Seconds that engines would have computed these tokens for, at the rate that each has measured.",
)
LOOKUP_SECONDS: Final = Metric(
    "kvstrata_lookup_seconds",
    "Time from a lookup until all that it found is in host memory, by the lowest tier that had some "
    "of it (tier='none' is a miss). Lookups that were given up are not in it.",
    ("host", "disk", "remote", "none"),
    kind="histogram",
)
PROMOTION_SECONDS: Final = Metric(
    "kvstrata_promotion_seconds",
    "Time from asking a tier for blocks until some of them are in host memory.",
    ("disk", "remote"),
    kind="histogram",
)
LOAD_SECONDS: Final = Metric(
    "kvstrata_load_seconds",
    "Time that the workers of an engine have taken to copy a load to the device; of a run of a "
    "blended request, until that has been blended.",
    kind="histogram",
)
SAVE_SECONDS: Final = Metric(
    "kvstrata_save_seconds",
    "Time from the reservation of host memory for blocks until all workers have copied them there.",
    kind="histogram",
)
STORE_SECONDS: Final = Metric(
    "kvstrata_store_operation_seconds",
    "Duration of calls to a store, each for a batch of blocks, failed ones included.",
    ("disk", "remote"),
    kind="histogram",
    labels=("tier", "operation"),
)
STORE_BYTES: Final = Metric(
    "kvstrata_store_operation_bytes_total",
    "Bytes of the blocks that a store has read or newly stored.",
    ("disk", "remote"),
    labels=("tier", "operation"),
)
CAPACITY_BYTES: Final = Metric(
    "kvstrata_tier_capacity_bytes",
    "Bytes that a tier can hold; 0 where nobody knows.",
    ("host", "disk", "remote"),
    kind="gauge",
)
USED_BYTES: Final = Metric(
    "kvstrata_tier_used_bytes",
    "Bytes of blocks in a tier.",
    ("host", "disk", "remote"),
    kind="gauge",
)
WAITING_BLOCKS: Final = Metric(
    "kvstrata_tier_waiting_blocks",
    "Blocks still to be written there.",
    ("host", "disk", "remote"),
    kind="gauge",
)
READING_BLOCKS: Final = Metric(
    "kvstrata_tier_reading_blocks",
    "Blocks that a tier was asked for and that have not come yet.",
    ("host", "disk", "remote"),
    kind="gauge",
)
SWITCHED_OFF: Final = Metric(
    "kvstrata_tier_switched_off",
    "1 while its circuit breaker is open.",
    ("host", "disk", "remote"),
    kind="gauge",
)
BACKED_BYTES: Final = Metric(
    "kvstrata_tier_backed_bytes",
    "Bytes of host memory that are there.",
    ("host",),
    kind="gauge",
)
PADDING_BYTES: Final = Metric(
    "kvstrata_tier_padding_bytes",
    "Bytes that blocks leave of their slots.",
    ("host",),
    kind="gauge",
)
LONGEST_FREE_RUN: Final = Metric(
    "kvstrata_tier_longest_free_run", "Free slots that lie side by side.", ("host",), kind="gauge"
)
RUNNING_TASKS: Final = Metric(
    "kvstrata_running_tasks", "Loads and saves in flight.", ("load", "save"), "kind", kind="gauge"
)
PINNED_BLOCKS: Final = Metric(
    "kvstrata_pinned_blocks", "Blocks that operators have pinned.", kind="gauge"
)
LEASED_BLOCKS: Final = Metric(
    "kvstrata_leased_blocks",
    "Blocks that lookups and loads in flight keep from leaving; one that several keep counts as often.",
    kind="gauge",
)
ENGINES: Final = Metric("kvstrata_engines", "Engines that are connected.", kind="gauge")
CONNECTED: Final = Metric(
    "kvstrata_connected",
    "1 while the engine has a cache server that answers; 0: it computes everything. Only in vLLM's "
    "metrics; the server is its socket, or 'embedded'.",
    label="server",
    kind="gauge",
    labels=("server",),
)
BLEND_REQUESTS: Final = Metric(
    "kvstrata_blend_requests_total",
    "Requests that BlendConnector has scheduled: blended; failed, which were computed after all; or "
    "computed because it was not asked for (not_asked) or not in a form that is understood "
    "(not_understood), the request has an adapter, images, embeddings or prompt_logprobs, KV that its "
    "sender called approximate (tainted), no other KV of its tokens is known (no_run), blending would "
    "spare too few tokens (few_tokens, small_share), takes longer here than to compute prompts of this "
    "size (slower), the device blocks that it takes behind a sliding "
    "window are not free (no_room), audits have switched it off for its salt (switched_off), "
    "or there is no cache server (no_server). Only in vLLM's metrics.",
    (
        "blended",
        "failed",
        "not_asked",
        "not_understood",
        "adapter",
        "images",
        "embeddings",
        "prompt_logprobs",
        "tainted",
        "no_run",
        "few_tokens",
        "small_share",
        "slower",
        "no_room",
        "switched_off",
        "no_server",
    ),
    "result",
)
BLEND_TOKENS: Final = Metric(
    "kvstrata_blend_tokens_total",
    "Tokens of blended requests behind their exact prefix: those found elsewhere (reused), of which "
    "some are computed anew, and those of a prefill that all this spares (spared). Only in vLLM's "
    "metrics.",
    ("reused", "spared"),
    "kind",
)
BLEND_AUDITS: Final = Metric(
    "kvstrata_blend_audits_total",
    "Blended requests whose first token was computed exactly, too, by whether both ways the same "
    "token was the most likely. Only in vLLM's metrics.",
    ("same", "other"),
    "result",
)
BLEND_DIVERGENCE: Final = Metric(
    "kvstrata_blend_audit_divergence_total",
    "Divergence (Kullback-Leibler, nats) that these audits have found, in sum. Only in vLLM's "
    "metrics.",
)
BLEND_OFF: Final = Metric(
    "kvstrata_blend_switched_off",
    "How many cache salts that have had audits, none being one of them, are not blended until the cache "
    "is reset, because answers diverge too far. Only in vLLM's metrics.",
    kind="gauge",
)

OF_ENGINES: Final = frozenset(
    {CONNECTED, BLEND_REQUESTS, BLEND_TOKENS, BLEND_AUDITS, BLEND_DIVERGENCE, BLEND_OFF}
)
"""What only an engine can tell; no server exports it."""

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
    UNANSWERED_LOOKUPS,
    LOADED_BYTES,
    SAVED_BYTES,
    SPARED_TOKENS,
    SPARED_SECONDS,
    LOOKUP_SECONDS,
    PROMOTION_SECONDS,
    LOAD_SECONDS,
    SAVE_SECONDS,
    STORE_SECONDS,
    STORE_BYTES,
    CAPACITY_BYTES,
    USED_BYTES,
    WAITING_BLOCKS,
    READING_BLOCKS,
    SWITCHED_OFF,
    BACKED_BYTES,
    PADDING_BYTES,
    LONGEST_FREE_RUN,
    RUNNING_TASKS,
    PINNED_BLOCKS,
    LEASED_BLOCKS,
    ENGINES,
    CONNECTED,
    BLEND_REQUESTS,
    BLEND_TOKENS,
    BLEND_AUDITS,
    BLEND_DIVERGENCE,
    BLEND_OFF,
)
# What a server counts in blocks or tokens; the other metrics are made from its report.
_COUNTED: Final = tuple(
    metric
    for metric in CATALOGUE
    if metric.kind == "counter"
    and metric not in OF_ENGINES | {SAVED_BYTES, SPARED_SECONDS, STORE_BYTES}
)
# What each is called in a report, by its name and the value of its label.
_SAMPLES: Final = {
    (metric.name, value): metric.name + (f"{{{metric.label}={value}}}" if value else "")
    for metric in _COUNTED
    for value in metric.values or (None,)
}


class Counters:
    """What one server counts. ``add`` is thread-safe."""

    def __init__(self) -> None:
        self.operations = OperationMetrics()
        self.durations = Durations()
        self.spared_seconds = 0.0
        self._lock = threading.Lock()  # guards the counts
        self._counts = dict.fromkeys(_SAMPLES, 0)

    def add(self, metric: Metric, amount: int, value: str | None = None) -> None:
        """Raises ``InvariantViolated`` for less than 0: what reads a counter takes that for a restart."""
        if amount < 0:
            raise InvariantViolated(f"{metric.name} would count {amount}")
        if amount:
            with self._lock:
                self._counts[metric.name, value] += amount

    def snapshot(self) -> dict[str, int]:
        """Every value by name, a labelled one as ``name{label=value}``; what has not counted is 0."""
        with self._lock:
            return {_SAMPLES[key]: count for key, count in self._counts.items()}
