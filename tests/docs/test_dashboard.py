"""The dashboard and the alerts: every query names metrics and labels that there are."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts import dashboard

from kvstrata.observe import metrics
from kvstrata.observe.metrics import CATALOGUE, Metric

ROOT = Path(__file__).parents[2]

BOARD: dict[str, Any] = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text())
ALERTS: dict[str, Any] = yaml.safe_load((ROOT / "docs" / "prometheus-alerts.yml").read_text())
BY_NAME = {metric.name: metric for metric in CATALOGUE}
SCRAPED = {"instance", "job"}  # labels that Prometheus adds
SELECTOR = re.compile(r"\b(kvstrata_\w+?)(_bucket|_sum|_count)?\b(?:\{([^}]*)\})?(?=[^\w]|$)")
GROUPING = re.compile(r"\bby \(([^)]*)\)")


def board_queries() -> Iterator[str]:
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


def series_of_instances() -> str:
    """What is selected to find the values of `instance`."""
    (query,) = (each["query"] for each in BOARD["templating"]["list"] if each["name"] == "instance")
    found = re.fullmatch(r"label_values\((.+), instance\)", query)
    assert found, query
    return found[1]


def alert_queries() -> Iterator[str]:
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]


def selected(query: str) -> Iterator[tuple[Metric, str, set[str]]]:
    """Metric, suffix, and labels that are matched."""
    for name, suffix, matchers in SELECTOR.findall(query):
        labels = {label for label, _ in re.findall(r'(\w+)\s*[=!]~?\s*"([^"]*)"', matchers)}
        yield BY_NAME[name], suffix, labels


@pytest.mark.parametrize("query", [*board_queries(), *alert_queries()])
def test_metrics_and_labels_of_a_query_are_in_the_catalogue(query: str) -> None:
    found = list(selected(query))
    assert found
    grouped = {label for group in GROUPING.findall(query) for label in re.findall(r"\w+", group)}
    for metric, suffix, matched in found:
        assert bool(suffix) == (metric.kind == "histogram")
        own = {*metric.label_names, *({"le"} if suffix == "_bucket" else ())}
        assert matched <= own | SCRAPED
        assert grouped <= own
        if metric.kind == "counter":
            assert re.search(rf"(rate|increase)\({metric.name}", query)


@pytest.mark.parametrize("query", [*board_queries()])
def test_values_that_a_query_picks_are_values_of_the_label(query: str) -> None:
    for metric, _, _ in selected(query):
        for label, value in re.findall(r'(\w+)\s*!?=\s*"([^"]*)"', query):
            assert label == metric.label
            assert value in metric.values


def test_servers_and_engines_of_attached_servers_can_be_chosen() -> None:
    """The one has no metric of the other, and each has one of these."""
    selected = re.fullmatch(r'{__name__=~"(.+)"}', series_of_instances())
    assert selected
    found = {name for name in BY_NAME if re.fullmatch(selected[1], name)}
    assert found == {metrics.LOOKUPS.name, metrics.CONNECTED.name}


def test_whatever_is_chosen_all_engines_without_a_cache_are_counted() -> None:
    """Whoever looks at a server sees its engines that are cut off, which are other instances."""
    (query,) = (each for each in board_queries() if metrics.CONNECTED.name in each)
    assert "$instance" not in query


def test_every_metric_is_shown_or_is_named_as_not_shown() -> None:
    shown = {metric.name for query in board_queries() for metric, _, _ in selected(query)}
    assert shown | dashboard.NOT_SHOWN.keys() == BY_NAME.keys()
    assert not shown & dashboard.NOT_SHOWN.keys()


def test_the_page_names_what_is_not_shown_and_every_alert() -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    assert all(f"`{name}`" in page for name in dashboard.NOT_SHOWN)
    rules = [rule["alert"] for group in ALERTS["groups"] for rule in group["rules"]]
    assert all(f"| `{name}` |" in page for name in rules)


def test_legends_name_labels_that_the_query_keeps() -> None:
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            kept = set(re.findall(r"\w+", "".join(GROUPING.findall(target["expr"])[:1]))) - {"le"}
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) == kept


def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken
        assert all(x < 24 for x, _ in cells)
        taken |= cells
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
