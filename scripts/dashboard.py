"""docs/grafana-dashboard.json: the dashboard of all metrics. `make references` writes it."""

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

FILE: Final = Path(__file__).resolve().parent.parent / "docs" / "grafana-dashboard.json"
WHERE: Final = 'instance=~"$instance"'
WIDTH: Final = 8  # of a panel; a row is 24 wide
HEIGHT: Final = 8

NOT_SHOWN: Final = {
    "kvstrata_tier_backed_bytes": "grows once, while the server starts",
    "kvstrata_tier_padding_bytes": "constant; `kvstrata stats` shows it where it matters",
    "kvstrata_tier_longest_free_run": "for whoever tunes copies; `kvstrata stats` shows it",
}


class Query(NamedTuple):
    expr: str
    legend: str


class Panel(NamedTuple):
    title: str
    unit: str  # Grafana's name of it
    help: str
    queries: tuple[Query, ...]


class Row(NamedTuple):
    title: str
    panels: tuple[Panel, ...]


def rate(name: str, by: str = "", only: str = "") -> str:
    matchers = f"{WHERE},{only}" if only else WHERE
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} (rate({name}{{{matchers}}}[$__rate_interval]))"


def total(name: str, by: str = "") -> str:
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} ({name}{{{WHERE}}})"


def quantile(share: float, name: str, by: str = "") -> str:
    inner = rate(f"{name}_bucket", ", ".join(filter(None, ("le", by))))
    return f"histogram_quantile({share}, {inner})"


def quantiles(name: str, by: str = "", legend: str = "") -> tuple[Query, ...]:
    return tuple(
        Query(quantile(share, name, by), f"{legend} {label}".strip())
        for share, label in ((0.5, "median"), (0.99, "99 %"))
    )


ROWS: Final = (
    Row(
        "What it gives",
        (
            Panel(
                "Share of blocks that are found",
                "percentunit",
                "Of all blocks that engines asked for. Low with prompts that share nothing.",
                (
                    Query(
                        rate("kvstrata_lookup_blocks_total", only='tier!="none"')
                        + " / "
                        + rate("kvstrata_lookup_blocks_total"),
                        "found",
                    ),
                ),
            ),
            Panel(
                "Blocks looked up, by tier",
                "short",
                "none: not found.",
                (
                    Query(rate("kvstrata_lookup_blocks_total", "tier"), "{{tier}}"),
                    Query(rate("kvstrata_lookups_total"), "lookups"),
                ),
            ),
            Panel(
                "Prompt tokens loaded and not computed",
                "short",
                "Tokens a second.",
                (Query(rate("kvstrata_spared_prefill_tokens_total"), "tokens"),),
            ),
            Panel(
                "Prefill time spared",
                "s",
                "Seconds of prefill a second, at the rate that each engine has measured.",
                (Query(rate("kvstrata_spared_prefill_seconds_total"), "seconds"),),
            ),
            Panel(
                "Bytes loaded, by the tier they were found in",
                "Bps",
                "Into device memory.",
                (Query(rate("kvstrata_loaded_bytes_total", "tier"), "{{tier}}"),),
            ),
            Panel(
                "Found and not taken, by reason",
                "short",
                "recompute: computing was expected to be sooner. Blocks a second.",
                (Query(rate("kvstrata_declined_blocks_total", "reason"), "{{reason}}"),),
            ),
        ),
    ),
    Row(
        "How long it takes",
        (
            Panel(
                "Lookups",
                "s",
                "Until all that was found is in host memory, by the lowest tier that had some of it.",
                quantiles("kvstrata_lookup_seconds", "tier", "{{tier}}"),
            ),
            Panel(
                "Promotions",
                "s",
                "From the question to the blocks, by tier.",
                quantiles("kvstrata_promotion_seconds", "tier", "{{tier}}"),
            ),
            Panel(
                "Loads and saves",
                "s",
                "Copies between host memory and the device.",
                (
                    *quantiles("kvstrata_load_seconds", legend="load"),
                    *quantiles("kvstrata_save_seconds", legend="save"),
                ),
            ),
            Panel(
                "Calls to stores, 99 %",
                "s",
                "Each for a batch of blocks.",
                (
                    Query(
                        quantile(0.99, "kvstrata_store_operation_seconds", "tier, operation"),
                        "{{tier}} {{operation}}",
                    ),
                ),
            ),
            Panel(
                "Bytes of stores",
                "Bps",
                "Read and newly written.",
                (
                    Query(
                        rate("kvstrata_store_operation_bytes_total", "tier, operation"),
                        "{{tier}} {{operation}}",
                    ),
                ),
            ),
            Panel(
                "Bytes saved",
                "Bps",
                "From device to host memory.",
                (Query(rate("kvstrata_saved_bytes_total"), "saved"),),
            ),
        ),
    ),
    Row(
        "Room and queues",
        (
            Panel(
                "How full each tier is",
                "percentunit",
                "A tier that is full evicts; that is no fault.",
                (
                    Query(
                        total("kvstrata_tier_used_bytes", "tier")
                        + " / ("
                        + total("kvstrata_tier_capacity_bytes", "tier")
                        + " > 0)",
                        "{{tier}}",
                    ),
                ),
            ),
            Panel(
                "Blocks moved and evicted",
                "short",
                "A second.",
                (
                    Query(rate("kvstrata_saved_blocks_total"), "saved"),
                    Query(rate("kvstrata_loaded_blocks_total"), "loaded"),
                    Query(rate("kvstrata_promoted_blocks_total", "tier"), "up from {{tier}}"),
                    Query(rate("kvstrata_cascaded_blocks_total", "tier"), "down to {{tier}}"),
                    Query(rate("kvstrata_evicted_blocks_total", "tier"), "evicted from {{tier}}"),
                ),
            ),
            Panel(
                "Queues of tiers",
                "short",
                "Blocks to be written to a tier, and asked of it.",
                (
                    Query(total("kvstrata_tier_waiting_blocks", "tier"), "to {{tier}}"),
                    Query(total("kvstrata_tier_reading_blocks", "tier"), "from {{tier}}"),
                ),
            ),
            Panel(
                "Loads and saves in flight",
                "short",
                "And the engines that are connected.",
                (
                    Query(total("kvstrata_running_tasks", "kind"), "{{kind}}"),
                    Query(total("kvstrata_engines"), "engines"),
                ),
            ),
            Panel(
                "Blocks that are kept from leaving",
                "short",
                "Leased by loads in flight, pinned by operators.",
                (
                    Query(total("kvstrata_leased_blocks"), "leased"),
                    Query(total("kvstrata_pinned_blocks"), "pinned"),
                ),
            ),
        ),
    ),
    Row(
        "Trouble",
        (
            Panel(
                "Engines without a cache",
                "short",
                "They compute everything. Of all instances: a server is another one than its engines. Only "
                "engines that vLLM's metrics are scraped of.",
                (Query("count (kvstrata_connected == 0) or vector(0)", "without"),),
            ),
            Panel(
                "Tiers switched off",
                "short",
                "By their circuit breaker, after repeated failures.",
                (Query(f"max by (tier) (kvstrata_tier_switched_off{{{WHERE}}})", "{{tier}}"),),
            ),
            Panel(
                "Failed, shed, lost, corrupt",
                "short",
                "None of it is served: it is computed again. A second.",
                (
                    Query(rate("kvstrata_failed_loads_total"), "failed loads"),
                    Query(rate("kvstrata_shed_blocks_total"), "blocks not saved: no room"),
                    Query(rate("kvstrata_lost_blocks_total"), "blocks lost before written down"),
                    Query(rate("kvstrata_corrupt_blocks_total"), "corrupt blocks"),
                    Query(rate("kvstrata_unlogged_events_total"), "events not logged"),
                ),
            ),
            Panel(
                "Faults of the tier that nodes share, by cause",
                "short",
                "Calls a second.",
                (Query(rate("kvstrata_remote_faults_total", "cause"), "{{cause}}"),),
            ),
            Panel(
                "Lookups that the tier that nodes share answered too late",
                "short",
                "Longer than remote_lookup_seconds: the prompt is computed. Lookups a second.",
                (Query(rate("kvstrata_unanswered_lookups_total"), "lookups"),),
            ),
        ),
    ),
    Row(
        "Blending",
        (
            Panel(
                "Requests, by what became of blending",
                "short",
                "Or why they were computed as ever. A second; only of engines with BlendConnector.",
                (Query(rate("kvstrata_blend_requests_total", "result"), "{{result}}"),),
            ),
            Panel(
                "Tokens reused elsewhere, and spared",
                "short",
                "Of prefill, a second.",
                (Query(rate("kvstrata_blend_tokens_total", "kind"), "{{kind}}"),),
            ),
            Panel(
                "What audits find",
                "short",
                "Divergence of the first token, in nats, and the share whose likeliest token is "
                "another.",
                (
                    Query(
                        rate("kvstrata_blend_audit_divergence_total")
                        + " / "
                        + rate("kvstrata_blend_audits_total"),
                        "divergence",
                    ),
                    Query(
                        rate("kvstrata_blend_audits_total", only='result="other"')
                        + " / "
                        + rate("kvstrata_blend_audits_total"),
                        "another token",
                    ),
                    Query(total("kvstrata_blend_switched_off"), "salts switched off"),
                ),
            ),
        ),
    ),
)


def render() -> str:
    """Return the dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in ROWS:
        panels.append(_row(row.title, top, len(panels) + 1))
        top += 1
        for number, panel in enumerate(row.panels):
            place = {
                "x": number * WIDTH % 24,
                "y": top + number * WIDTH // 24 * HEIGHT,
                "w": WIDTH,
                "h": HEIGHT,
            }
            panels.append(_panel(panel, place, len(panels) + 1))
        top += -(-len(row.panels) * WIDTH // 24) * HEIGHT
    board = {
        "title": "KVStrata",
        "uid": "kvstrata",
        "tags": ["kvstrata", "vllm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }
    return json.dumps(board, indent=1) + "\n"


def _variables() -> list[dict[str, Any]]:
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            "name": "instance",
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            # Lookups are counted by a server, `connected` is told by an engine; an embedded one has both.
            "query": 'label_values({__name__=~"kvstrata_lookups_total|kvstrata_connected"}, instance)',
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def _row(title: str, top: int, number: int) -> dict[str, Any]:
    place = {"x": 0, "y": top, "w": 24, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place}


def _panel(panel: Panel, place: dict[str, int], number: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "gridPos": place,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": query.expr, "legendFormat": query.legend}
            for i, query in enumerate(panel.queries)
        ],
    }
