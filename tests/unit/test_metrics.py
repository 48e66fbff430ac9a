"""The counters: a fixed catalogue, amounts that add up, the Prometheus text."""

import re

import pytest
from tests.unit.threads import in_turns

from kvstrata.core.errors import InvariantViolated
from kvstrata.observe import metrics
from kvstrata.observe.metrics import Counters


def test_catalogue_is_append_only() -> None:
    """Dashboards name these: take none away, rename none."""
    assert [metric.name for metric in metrics.CATALOGUE] == [
        "kvstrata_lookups_total",
        "kvstrata_lookup_blocks_total",
        "kvstrata_loaded_blocks_total",
        "kvstrata_failed_loads_total",
        "kvstrata_saved_blocks_total",
        "kvstrata_shed_blocks_total",
        "kvstrata_promoted_blocks_total",
        "kvstrata_cascaded_blocks_total",
        "kvstrata_evicted_blocks_total",
        "kvstrata_lost_blocks_total",
        "kvstrata_corrupt_blocks_total",
        "kvstrata_declined_blocks_total",
        "kvstrata_unlogged_events_total",
        "kvstrata_remote_faults_total",
        "kvstrata_unanswered_lookups_total",
        "kvstrata_loaded_bytes_total",
        "kvstrata_saved_bytes_total",
        "kvstrata_spared_prefill_tokens_total",
        "kvstrata_spared_prefill_seconds_total",
        "kvstrata_lookup_seconds",
        "kvstrata_promotion_seconds",
        "kvstrata_load_seconds",
        "kvstrata_save_seconds",
        "kvstrata_store_operation_seconds",
        "kvstrata_store_operation_bytes_total",
        "kvstrata_tier_capacity_bytes",
        "kvstrata_tier_used_bytes",
        "kvstrata_tier_waiting_blocks",
        "kvstrata_tier_reading_blocks",
        "kvstrata_tier_switched_off",
        "kvstrata_tier_backed_bytes",
        "kvstrata_tier_padding_bytes",
        "kvstrata_tier_longest_free_run",
        "kvstrata_running_tasks",
        "kvstrata_pinned_blocks",
        "kvstrata_leased_blocks",
        "kvstrata_engines",
        "kvstrata_connected",
        "kvstrata_blend_requests_total",
        "kvstrata_blend_tokens_total",
        "kvstrata_blend_audits_total",
        "kvstrata_blend_audit_divergence_total",
        "kvstrata_blend_switched_off",
    ]


def test_names_and_units_are_those_that_prometheus_wants() -> None:
    for metric in metrics.CATALOGUE:
        assert re.fullmatch(r"kvstrata_[a-z]+(_[a-z]+)*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert (metric.kind == "histogram") == metric.name.endswith("_seconds")
        assert metric.help.endswith(".")
        labels = {"tier", "operation", "reason", "cause", "kind", "server", "result"}
        assert set(metric.label_names) <= labels


def test_amounts_add_up_by_label() -> None:
    counters = Counters()
    counters.add(metrics.LOOKUP_BLOCKS, 3, "host")
    counters.add(metrics.LOOKUP_BLOCKS, 4, "host")
    counters.add(metrics.LOOKUP_BLOCKS, 5, "none")
    counters.add(metrics.SAVED_BLOCKS, 2)
    snapshot = counters.snapshot()
    assert snapshot["kvstrata_lookup_blocks_total{tier=host}"] == 7
    assert snapshot["kvstrata_lookup_blocks_total{tier=none}"] == 5
    assert snapshot["kvstrata_saved_blocks_total"] == 2
    assert snapshot["kvstrata_shed_blocks_total"] == 0


def test_a_counter_that_has_not_counted_reads_zero() -> None:
    counters = Counters()
    counters.add(metrics.EVICTED_BLOCKS, 0, "disk")
    assert {name: n for name, n in counters.snapshot().items() if "evicted" in name} == {
        "kvstrata_evicted_blocks_total{tier=host}": 0,
        "kvstrata_evicted_blocks_total{tier=disk}": 0,
    }


def test_the_snapshot_has_every_counter_of_a_server_in_the_order_of_the_catalogue() -> None:
    names = list(Counters().snapshot())
    assert names[:3] == [
        "kvstrata_lookups_total",
        "kvstrata_lookup_blocks_total{tier=host}",
        "kvstrata_lookup_blocks_total{tier=disk}",
    ]
    of_metrics = list(dict.fromkeys(name.partition("{")[0] for name in names))
    counters = [metric.name for metric in metrics.CATALOGUE if metric.kind == "counter"]
    assert of_metrics == [name for name in counters if name in of_metrics]


def test_a_counter_does_not_go_back() -> None:
    counters = Counters()
    with pytest.raises(InvariantViolated, match="kvstrata_shed_blocks_total would count -1"):
        counters.add(metrics.SHED_BLOCKS, -1)
    assert counters.snapshot()["kvstrata_shed_blocks_total"] == 0


def test_what_many_threads_count_is_all_counted() -> None:
    counters = Counters()

    def count() -> None:
        for _ in range(2000):
            counters.add(metrics.REMOTE_FAULTS, 1, metrics.REMOTE_FAULTS.values[0])

    in_turns([count] * 4, lambda: None)
    name = f"{metrics.REMOTE_FAULTS.name}{{cause={metrics.REMOTE_FAULTS.values[0]}}}"
    assert counters.snapshot()[name] == 8000


def test_two_servers_in_one_process_do_not_share_counters() -> None:
    one, other = Counters(), Counters()
    one.add(metrics.LOOKUPS, 1)
    assert one.snapshot()["kvstrata_lookups_total"] == 1
    assert other.snapshot()["kvstrata_lookups_total"] == 0
