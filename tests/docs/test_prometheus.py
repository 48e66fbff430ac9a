"""Every query of the dashboard and every alert, on a real Prometheus that scrapes a real server."""

import itertools
import json
import math
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.caches import ALICE, PATIENCE_SECONDS, config, eventually, keys
from tests.docs.test_dashboard import ALERTS, BOARD, BY_NAME, series_of_instances
from tests.ports import free_port
from tests.server.harness import engine, serving, worker

from kvstrata.manager.tasks import TaskStatus
from kvstrata.observe import metrics
from kvstrata.observe.metrics import OF_ENGINES
from kvstrata.server.client import ManagerClient
from kvstrata.server.server import Server

DOCS = Path(__file__).parents[2] / "docs"
# What only an engine exports: no series, and no error.
EMPTY = {metric.name for metric in OF_ENGINES}


@dataclass
class Prometheus:
    address: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        found = self._get("query", query=expression)
        result: list[dict[str, Any]] = found["result"]
        return result

    def rules(self) -> list[dict[str, Any]]:
        groups = self._get("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def _get(self, what: str, **parameters: str) -> dict[str, Any]:
        url = f"http://{self.address}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
            found = json.load(answer)
        assert found["status"] == "success"
        data: dict[str, Any] = found["data"]
        return data


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It has scraped a server with a disk tier that was busy all along."""
    folder = tmp_path_factory.mktemp("prom")
    scraped, own = free_address(), free_address()
    program = shutil.which("prometheus")
    assert program is not None, "run `make servers`"
    (folder / "prometheus.yml").write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "250ms", "evaluation_interval": "500ms"},
                "rule_files": [str(DOCS / "prometheus-alerts.yml")],
                "scrape_configs": [
                    {"job_name": "kvstrata", "static_configs": [{"targets": [scraped]}]}
                ],
            }
        )
    )
    settings = config(8, folder / "disk", metrics=scraped, recompute="never")
    with (
        serving(settings, folder / "s") as server,
        closing(engine(folder / "s")) as scheduler,
        closing(worker(folder / "s")),
        (folder / "log").open("wb") as log,
    ):
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={own}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            found = Prometheus(own)
            work_until_scraped(found, server, scheduler)
            yield found
        finally:
            process.terminate()
            process.wait(PATIENCE_SECONDS)


def work_until_scraped(prometheus: Prometheus, server: Server, scheduler: ManagerClient) -> None:
    """Save, load from both tiers, and miss, until several scrapes have seen it grow."""
    manager = server.manager
    assert manager is not None
    give_up = time.monotonic() + 3 * PATIENCE_SECONDS
    prompts = itertools.cycle(keys(number, *range(4)) for number in range(6))
    while not is_scraped(prometheus):
        assert time.monotonic() < give_up, "Prometheus has not seen what happens"
        asked = next(prompts)
        put = scheduler.put_match(ALICE, asked)
        end(scheduler, put)
        eventually(lambda: not any(t.waiting_blocks for t in manager.stats().tiers), "not written")
        get = scheduler.get_match(ALICE, asked)
        scheduler.wait([get.task_id], PATIENCE_SECONDS)
        end(scheduler, get)
        time.sleep(0.05)  # a scrape comes every quarter of a second


def end(scheduler: ManagerClient, task: TaskStatus) -> None:
    if task.task_id:
        scheduler.launch([task.task_id])
        scheduler.complete([task.task_id])


def is_scraped(prometheus: Prometheus) -> bool:
    try:
        grows = prometheus.query('rate(kvstrata_promoted_blocks_total{tier="disk"}[10s]) > 0')
        return bool(grows) and bool(prometheus.query("count_over_time(up[1m]) > 8"))
    except OSError:  # it does not listen yet
        return False


def expressions() -> list[str]:
    return [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())]


@pytest.mark.parametrize("expression", expressions())
def test_a_query_of_the_dashboard_gives_numbers(prometheus: Prometheus, expression: str) -> None:
    shown = expression.replace("$instance", ".*").replace("$__rate_interval", "10s")
    assert "$" not in shown
    result = prometheus.query(shown)
    assert result or any(name in shown for name in EMPTY)
    for series in result:
        assert set(series["metric"]) <= {"tier", "operation", "reason", "cause", "kind"}
        value = float(series["value"][1])
        assert value >= 0 or math.isnan(value)  # where nothing has happened


def test_the_server_can_be_chosen(prometheus: Prometheus) -> None:
    (up,) = prometheus.query("up")
    found = prometheus.query(f"group by (instance) ({series_of_instances()})")
    assert [each["metric"] for each in found] == [{"instance": up["metric"]["instance"]}]


def test_what_is_scraped_is_the_catalogue(prometheus: Prometheus) -> None:
    for name in BY_NAME.keys() - EMPTY:
        metric = BY_NAME[name]
        series = prometheus.query(f"{name}_count" if metric.kind == "histogram" else name)
        assert series, name
        for each in series:
            labels = set(each["metric"]) - {"__name__", "instance", "job", "server"}
            assert labels == set(metric.label_names)


def test_hits_are_those_of_both_tiers(prometheus: Prometheus) -> None:
    (found,) = prometheus.query('kvstrata_lookup_blocks_total{tier="disk"}')
    assert float(found["value"][1]) > 0
    (share,) = prometheus.query(
        "histogram_quantile(0.5, sum by (le) (rate(kvstrata_promotion_seconds_bucket[10s])))"
    )
    assert 0 < float(share["value"][1]) < 30


def test_alerts_are_understood_and_none_fires_for_a_sound_server(prometheus: Prometheus) -> None:
    eventually(lambda: all(rule["health"] == "ok" for rule in prometheus.rules()), "a rule fails")
    rules = {rule["name"]: rule for rule in prometheus.rules()}
    assert rules.keys() == {rule["alert"] for group in ALERTS["groups"] for rule in group["rules"]}
    assert {name: rule["alerts"] for name, rule in rules.items() if rule["alerts"]} == {}
    assert metrics.CORRUPT_BLOCKS.name in rules["KVStrataCorruptBlocks"]["query"]
