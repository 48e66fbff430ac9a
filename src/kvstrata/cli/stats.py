"""`kvstrata stats`: how full the tiers are and what has been found in them."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstrata.cli.reporting import JsonFlag, plain_table, reported
from kvstrata.cli.servers import SocketOption, as_plain, look_at, print_views
from kvstrata.core.errors import ConfigError
from kvstrata.core.units import human_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvstrata.manager.report import CacheReport, TierReport

__all__ = ["stats"]

_COUNTED: Final = {
    "kvstrata_lookups_total": "lookups",
    "kvstrata_lookup_blocks_total{tier=host}": "looked up, found in host memory",
    "kvstrata_lookup_blocks_total{tier=disk}": "looked up, found on disk",
    "kvstrata_lookup_blocks_total{tier=remote}": "looked up, found in the tier that nodes share",
    "kvstrata_lookup_blocks_total{tier=none}": "looked up, not found",
    "kvstrata_declined_blocks_total{reason=recompute}": "found, sooner computed",
    "kvstrata_declined_blocks_total{reason=too_late}": "found, would have come too late",
    "kvstrata_declined_blocks_total{reason=no_room}": "found, no room in host memory",
    "kvstrata_declined_blocks_total{reason=off}": "found, their tier was switched off",
    "kvstrata_declined_blocks_total{reason=unanswered}": "found, the tier that nodes share said so too late",
    "kvstrata_unanswered_lookups_total": "lookups that the tier that nodes share answered too late",
    "kvstrata_loaded_blocks_total": "loaded by engines",
    "kvstrata_spared_prefill_tokens_total": "tokens loaded and not computed",
    "kvstrata_failed_loads_total": "failed loads",
    "kvstrata_saved_blocks_total": "saved by engines",
    "kvstrata_shed_blocks_total": "not saved, no room",
    "kvstrata_promoted_blocks_total{tier=disk}": "promoted from disk",
    "kvstrata_promoted_blocks_total{tier=remote}": "promoted from the tier that nodes share",
    "kvstrata_cascaded_blocks_total{tier=disk}": "cascaded to disk",
    "kvstrata_cascaded_blocks_total{tier=remote}": "cascaded to the tier that nodes share",
    "kvstrata_evicted_blocks_total{tier=host}": "evicted from host memory",
    "kvstrata_evicted_blocks_total{tier=disk}": "evicted from disk",
    "kvstrata_lost_blocks_total": "lost before a tier below had them",
    "kvstrata_corrupt_blocks_total": "corrupt, dropped",
    "kvstrata_unlogged_events_total": "missing in the event log",
}
_FAULTS: Final = "kvstrata_remote_faults_total{cause="
_SHOWN_AS_BLOCKS: Final = "kvstrata_loaded_bytes_total"


def stats(
    socket: SocketOption = None,
    *,
    as_json: JsonFlag = False,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print the Prometheus text format.")
    ] = False,
) -> None:
    """Show usage of each tier, hits and traffic of running cache servers.

    Exits with 1 if no server answers.
    """
    with reported():
        if as_json and prometheus:
            raise ConfigError("--json and --prometheus are two formats", hint="give one of them")
        views = look_at(socket)
        if as_json:
            typer.echo(json.dumps(as_plain(views), indent=2))
        elif prometheus:
            from kvstrata.server.exposition import exposition

            reports = {str(view.socket): view.report for view in views if view.report}
            typer.echo(exposition(reports), nl=False)
        else:
            print_views(views, _print)


def _print(console: "Console", report: "CacheReport") -> None:
    console.print(_tier_table(report))
    console.print()
    console.print(_counter_table(report))
    running = f"running: {report.running_gets} loads, {report.running_puts} saves"
    console.print(f"\n{running}; engines: {len(report.engines)}")
    if report.pins:
        console.print(f"pinned: {report.pinned_blocks:,} blocks, in {len(report.pins):,} pins")


def _tier_table(report: "CacheReport") -> "Table":
    table = plain_table("tier", "used", "capacity", "full", "blocks", "", right=("full", "blocks"))
    for tier in report.tiers:
        used = human_bytes(tier.used_blocks * tier.block_bytes)
        room = ("", "", f"{tier.used_blocks:,} from here")  # of an engine that others use too
        if tier.capacity_blocks:
            room = (
                human_bytes(tier.capacity_blocks * tier.block_bytes),
                f"{tier.used_blocks / tier.capacity_blocks:.0%}",
                f"{tier.used_blocks:,} of {tier.capacity_blocks:,}",
            )
        table.add_row(tier.tier, used, *room, ", ".join(_notes(tier)))
    return table


def _notes(tier: "TierReport") -> Iterator[str]:
    yield f"{human_bytes(tier.block_bytes)} a block"
    if tier.waiting_blocks:
        yield f"{tier.waiting_blocks:,} blocks to be written"
    if tier.uncleared:
        yield f"still to be cleared of {tier.uncleared}"
    if tier.switched_off:
        yield "switched off after repeated failures"
    if tier.padding_bytes > tier.capacity_blocks * tier.block_bytes // 100:
        yield f"{human_bytes(tier.padding_bytes)} taken by whole pages"
    if tier.longest_free_run:
        yield f"{tier.longest_free_run:,} free side by side"


def _counter_table(report: "CacheReport") -> "Table":
    """Return every counter that has counted, and the two that always matter."""
    table = plain_table("since start", "count", "bytes", right=("count", "bytes"))
    block_bytes = report.tiers[0].block_bytes if report.tiers else 0
    known = {name: report.counters.get(name, 0) for name in _COUNTED}
    for name, value in (known | report.counters).items():
        if name.startswith(_SHOWN_AS_BLOCKS):
            continue
        if value or name in {"kvstrata_lookups_total", "kvstrata_saved_blocks_total"}:
            is_blocks = name.partition("{")[0].endswith("_blocks_total")
            size = human_bytes(value * block_bytes) if is_blocks else ""
            table.add_row(_label(name), f"{value:,}", size)
    return table


def _label(name: str) -> str:
    if name.startswith(_FAULTS):
        cause = name.removeprefix(_FAULTS).rstrip("}")
        return f"faults of the tier that nodes share: {cause}"
    return _COUNTED.get(name, name)
