"""Our metrics in vLLM's own machinery: its registry, its frontends, its log, its MultiConnector."""

import os
import subprocess
import sys
import textwrap
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client import generate_latest as text_of
from prometheus_client.multiprocess import MultiProcessCollector
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats

from kvstrata.integration.vllm import engine_metrics
from kvstrata.integration.vllm.engine_metrics import KVStrataStats, replayed
from kvstrata.integration.vllm.plugin import register
from kvstrata.manager.samples import Spread
from kvstrata.observe import metrics
from kvstrata.observe.histogram import SECONDS_BUCKETS

LABELS = ["model_name", "engine"]
OURS = {"kv_connector": "KVStrataConnector", "kv_role": "kv_both"}

seconds = st.floats(min_value=0.0, max_value=100.0, allow_subnormal=False)


def spread_of(values: list[float]) -> Spread:
    tally = Tally(bisect_left(SECONDS_BUCKETS, value) for value in values)
    *within, calls = accumulate(tally[i] for i in range(len(SECONDS_BUCKETS) + 1))
    return Spread(tuple(within), calls, sum(values))


def some_stats() -> KVStrataStats:
    stats = KVStrataStats()
    stats.add_counter(metrics.SAVED_BLOCKS, (), 3)
    stats.add_counter(metrics.LOOKUP_BLOCKS, ("disk",), 2)
    stats.set_gauge(metrics.CONNECTED, ("/run/a|b.sock",), 1)
    stats.add_spread(metrics.STORE_SECONDS, ("disk", "read"), spread_of([0.002, 0.02, 40.0]))
    return stats


def config(transfer: dict[str, Any]) -> Any:
    return SimpleNamespace(kv_transfer_config=KVTransferConfig(**transfer))


def prom(transfer: dict[str, Any]) -> KVConnectorProm:
    register()
    return KVConnectorProm(config(transfer), LABELS, {0: ["m", "0"], 1: ["m", "1"]})


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    yield
    for collector in engine_metrics._registered:
        REGISTRY.unregister(collector)
    engine_metrics._registered.clear()


def value(name: str, *, engine: str = "0", **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "m", "engine": engine, **labels})


@given(values=st.lists(seconds, max_size=30))
def test_a_replayed_histogram_is_the_one_that_was_measured(values: list[float]) -> None:
    spread = spread_of(values)
    again = spread_of(list(replayed(spread)))
    assert (again.within, again.calls) == (spread.within, spread.calls)
    assert again.seconds == pytest.approx(spread.seconds, rel=1e-9, abs=1e-9)


def test_vllm_counts_what_it_is_told_for_each_engine() -> None:
    frontend = prom(OURS)
    over_the_wire = msgspec.msgpack.decode(msgspec.msgpack.encode(some_stats().to_dict()))
    frontend.observe(over_the_wire, 0)
    frontend.observe(over_the_wire, 1)
    frontend.observe(over_the_wire, 1)
    assert value("kvstrata_saved_blocks_total") == 3
    assert value("kvstrata_saved_blocks_total", engine="1") == 6
    assert value("kvstrata_lookup_blocks_total", tier="disk") == 2
    assert value("kvstrata_lookup_blocks_total", tier="host") == 0  # rates begin at zero
    assert value("kvstrata_connected", server="/run/a|b.sock") == 1
    where = {"tier": "disk", "operation": "read"}
    assert value("kvstrata_store_operation_seconds_count", **where) == 3
    assert value("kvstrata_store_operation_seconds_sum", **where) == pytest.approx(40.022)
    assert value("kvstrata_store_operation_seconds_bucket", le="0.003", **where) == 1
    assert value("kvstrata_store_operation_seconds_bucket", le="30.0", **where) == 2


def test_names_kinds_and_labels_are_those_of_the_catalogue() -> None:
    prom(OURS)
    families = {family.name: family for family in REGISTRY.collect()}
    for metric in metrics.CATALOGUE:
        family = families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == {*LABELS, *metric.label_names}


def test_a_second_engine_in_one_process_takes_the_place_of_the_first() -> None:
    prom(OURS).observe(some_stats().to_dict())
    prom(OURS)
    assert value("kvstrata_saved_blocks_total") == 0


def test_an_attached_engine_has_no_counters_of_the_server_that_others_share() -> None:
    frontend = prom(
        {**OURS, "kv_connector_extra_config": {"server": "attached", "socket": "/run/k.sock"}}
    )
    stats = KVStrataStats()
    stats.set_gauge(metrics.CONNECTED, ("/run/k.sock",), 0)
    frontend.observe(stats.to_dict())
    assert value("kvstrata_connected", server="/run/k.sock") == 0
    assert value("kvstrata_lookups_total") is None


def test_stats_of_later_steps_are_added() -> None:
    both = some_stats().aggregate(some_stats())
    both.set_gauge(metrics.CONNECTED, ("/run/a|b.sock",), 0)
    prom(OURS).observe(both.to_dict())
    assert value("kvstrata_saved_blocks_total") == 6
    assert value("kvstrata_connected", server="/run/a|b.sock") == 0
    where = {"tier": "disk", "operation": "read"}
    assert value("kvstrata_store_operation_seconds_count", **where) == 6
    assert KVStrataStats().is_empty()
    assert not both.is_empty()


def test_the_log_of_vllm_has_one_line_of_the_counters_that_counted() -> None:
    register()
    lines: list[str] = []
    log = KVConnectorLogging(KVTransferConfig(**OURS))
    log.observe(some_stats().to_dict())
    log.observe(some_stats().to_dict())
    log.log(lambda text, *values: lines.append(text % values))
    assert lines == ["KV Transfer metrics: saved_blocks=6"]


def test_a_multi_connector_hands_them_on() -> None:
    children = [
        {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
        {**OURS, "kv_connector_extra_config": {"tiers": "host:1GiB"}},
    ]
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }
    frontend = prom(multi)
    step = MultiKVConnectorStats(data={"KVStrataConnector": some_stats()})
    step = step.aggregate(MultiKVConnectorStats(data={"KVStrataConnector": some_stats()}))
    frontend.observe(msgspec.msgpack.decode(msgspec.msgpack.encode(step.to_dict())))
    assert value("kvstrata_saved_blocks_total") == 6
    log = KVConnectorLogging(KVTransferConfig(**multi))
    log.observe(step.to_dict())
    lines: list[str] = []
    log.log(lambda text, *values: lines.append(text % values))
    assert lines == ["KV Transfer metrics: KVStrataConnector={'saved_blocks': 6}"]


def test_api_servers_that_share_the_work_count_together(tmp_path: Path) -> None:
    """vLLM hands the stats of each step to one of its API servers."""
    program = textwrap.dedent("""
        import sys
        from tests.vllm import test_engine_metrics as tests
        stats = tests.some_stats()
        stats.set_gauge(tests.metrics.CONNECTED, ("s",), float(sys.argv[1]))
        tests.prom(tests.OURS).observe(stats.to_dict())
    """)
    environment = os.environ | {
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    for number in ("1", "0"):
        subprocess.run([sys.executable, "-c", program, number], env=environment, check=True)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))  # type: ignore[no-untyped-call]  # theirs
    text = text_of(registry).decode()
    engine = 'engine="0",model_name="m"'
    assert f"kvstrata_saved_blocks_total{{{engine}}} 6.0" in text
    assert f'kvstrata_connected{{{engine},server="s"}} 0.0' in text
    assert (
        "kvstrata_store_operation_seconds_count"
        f'{{{engine},operation="read",tier="disk"}} 6.0' in text
    )


def test_types_that_vllm_puts_in_place_of_prometheus_are_used() -> None:
    """As Ray's are: constructor with name, documentation, labelnames; ``labels`` by position."""
    made: list[str] = []

    def kind(name: str) -> Any:
        class Fake:
            def __init__(self, **options: Any) -> None:
                made.append(f"{name} {options['name']}")

            def labels(self, *_: object) -> "Fake":
                return self

        return Fake

    types = {Counter: kind("counter"), Gauge: kind("gauge"), Histogram: kind("histogram")}
    engine_metrics.KVStrataPromMetrics(config(OURS), types, LABELS, {0: ["m", "0"]})
    assert made == [f"{metric.kind} {metric.name}" for metric in metrics.CATALOGUE]
    engine_metrics._registered.clear()
