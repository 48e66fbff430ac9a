"""What a server exports: every metric of the catalogue, with its labels, and values that add up."""

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.caches import ALICE, BLOCK_BYTES, BOB, config, eventually, keys, load, save

from kvstrata.manager.manager import KVManager
from kvstrata.manager.report import CacheReport
from kvstrata.manager.samples import Sample, Spread, samples
from kvstrata.observe import metrics
from kvstrata.observe.histogram import SECONDS_BUCKETS
from kvstrata.server.exposition import exposition

ONE, OTHER = keys(*range(4)), keys(*range(100, 104))


def told(found: list[Sample]) -> dict[str, float | Spread]:
    return {".".join((s.metric.name, *s.labels)): s.value for s in found}


def on_disk(manager: KVManager) -> int:
    return manager.stats().counters["kvstrata_cascaded_blocks_total{tier=disk}"]


@pytest.fixture
def report(tmp_path: Path) -> CacheReport:
    """Of a cache that has loaded four blocks from disk, four from host memory, and missed once."""
    manager = KVManager(config(4, tmp_path / "disk", recompute="never"), block_bytes=BLOCK_BYTES)
    manager.register_namespace(ALICE, {"tokens_per_block": "32"})
    save(manager, ALICE, ONE)
    eventually(lambda: on_disk(manager) == 4, "not written")
    save(manager, ALICE, OTHER)  # drives the first ones out of host memory
    eventually(lambda: on_disk(manager) == 8, "not written")
    owner = manager.connect_engine("engine", world_size=0)
    manager.measured(owner, 8.0)
    assert len(load(manager, ALICE, ONE, owner=owner)) == 4
    assert len(load(manager, ALICE, ONE, owner=owner)) == 4
    assert load(manager, BOB, ONE, owner=owner) == []
    held = manager.get_match(ALICE, ONE[:3], owner=owner)
    found = manager.stats()
    manager.cancel([held.task_id], owner=owner)
    manager.check()
    manager.close()
    return found


def test_loads_are_counted_by_tier_in_bytes_tokens_and_seconds(report: CacheReport) -> None:
    values = told(list(samples(report)))
    assert values["kvstrata_loaded_bytes_total.host"] == 4 * BLOCK_BYTES
    assert values["kvstrata_loaded_bytes_total.disk"] == 4 * BLOCK_BYTES
    assert values["kvstrata_loaded_bytes_total.remote"] == 0
    assert values["kvstrata_saved_bytes_total"] == 8 * BLOCK_BYTES
    assert values["kvstrata_spared_prefill_tokens_total"] == 8 * 32
    assert values["kvstrata_spared_prefill_seconds_total"] == 8 / 8.0
    assert values["kvstrata_leased_blocks"] == 3
    assert values["kvstrata_engines"] == 1
    assert values["kvstrata_tier_reading_blocks.disk"] == 0


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("kvstrata_lookup_seconds.disk", 1),
        ("kvstrata_lookup_seconds.host", 2),
        ("kvstrata_lookup_seconds.none", 1),
        ("kvstrata_load_seconds", 2),
        ("kvstrata_save_seconds", 2),
    ],
)
def test_each_step_is_timed_once(report: CacheReport, name: str, calls: int) -> None:
    spread = told(list(samples(report)))[name]
    assert isinstance(spread, Spread)
    assert spread.calls == calls
    assert list(spread.within) == sorted(spread.within)
    assert len(spread.within) == len(SECONDS_BUCKETS)
    assert spread.within[-1] == calls
    assert spread.seconds > 0


def test_promotions_are_timed_from_the_question_to_the_blocks(report: CacheReport) -> None:
    spread = told(list(samples(report)))["kvstrata_promotion_seconds.disk"]
    assert isinstance(spread, Spread)
    assert spread.calls >= 1
    assert spread.seconds > 0


def test_text_has_each_metric_of_the_catalogue_with_its_labels(report: CacheReport) -> None:
    families = {
        family.name: family
        for family in text_string_to_metric_families(exposition({"/run/a": report}).decode())
    }
    for metric in metrics.CATALOGUE:
        if metric in metrics.OF_ENGINES:
            continue
        family = families.pop(metric.name.removesuffix("_total"))
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == {"server", *metric.label_names}
            assert sample.labels["server"] == "/run/a"
            if metric.values and metric.kind != "histogram":
                assert sample.labels[metric.label_names[0]] in metric.values
    assert not families


def test_a_histogram_in_the_text_is_whole(report: CacheReport) -> None:
    families = text_string_to_metric_families(exposition({"s": report}).decode())
    (lookups,) = [family for family in families if family.name == "kvstrata_lookup_seconds"]
    by_host = {
        (sample.name.rpartition("_")[2], sample.labels.get("le")): sample.value
        for sample in lookups.samples
        if sample.labels["tier"] == "host"
    }
    assert by_host["count", None] == by_host["bucket", "+Inf"] == 2
    assert len([1 for kind, _ in by_host if kind == "bucket"]) == len(SECONDS_BUCKETS) + 1


def test_counters_of_a_newer_server_are_passed_over(report: CacheReport) -> None:
    before = len(list(samples(report)))
    report.counters["kvstrata_unheard_of_total{tier=moon}"] = 7
    assert len(list(samples(report))) == before
