"""`kvstrata inspect`: whose blocks a server holds, and who uses it."""

import json
import math
from typing import TYPE_CHECKING

import typer

from kvstrata.cli.explain import ExplainOption, show_decisions
from kvstrata.cli.reporting import JsonFlag, plain_table, reported
from kvstrata.cli.servers import SocketOption, as_plain, look_at, print_views
from kvstrata.core.units import human_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvstrata.manager.report import CacheReport

__all__ = ["inspect"]


def inspect(
    socket: SocketOption = None, *, explain: ExplainOption = None, as_json: JsonFlag = False
) -> None:
    """Show namespaces with what they stand for, their blocks in each tier, engines and pins.

    Exits with 1 if no server answers, or with --explain if none knows the request.
    """
    with reported():
        if explain is not None:
            show_decisions(socket, explain, as_json=as_json)
            return
        views = look_at(socket)
        if as_json:
            typer.echo(json.dumps(as_plain(views), indent=2))
        else:
            print_views(views, _print)


def _print(console: "Console", report: "CacheReport") -> None:
    console.print(_engine_table(report) if report.engines else "no engine is connected")
    console.print()
    if report.pins:
        console.print(_pin_table(report))
        console.print()
    if not report.namespaces:
        console.print("no blocks yet")
        return
    console.print(_namespace_table(report))
    for each in report.namespaces:
        if each.parts:
            console.print(f"\n{each.namespace} stands for")
            console.print(_part_table(each.parts))


def _engine_table(report: "CacheReport") -> "Table":
    table = plain_table("engine", "workers attached")
    for engine in report.engines:
        workers = engine["workers"]
        attached = len(workers) if isinstance(workers, list) else 0
        table.add_row(str(engine["session"]), f"{attached} of {engine['world_size']}")
    return table


def _pin_table(report: "CacheReport") -> "Table":
    numbers = ("blocks", "seconds left")
    table = plain_table("pin", "namespace", *numbers, right=numbers)
    for pin in report.pins:
        table.add_row(
            str(pin.number), pin.namespace, f"{pin.blocks:,}", f"{math.ceil(pin.seconds_left):,}"
        )
    return table


def _namespace_table(report: "CacheReport") -> "Table":
    """Return what each namespace holds; those without parts are from before this server."""
    numbers = ("blocks", "bytes", "in host", "on disk")
    table = plain_table("namespace", *numbers, "", right=numbers)
    block_bytes = report.tiers[0].block_bytes if report.tiers else 0
    for each in report.namespaces:
        table.add_row(
            each.namespace,
            f"{each.blocks:,}",
            human_bytes(each.blocks * block_bytes),
            f"{each.host_blocks:,}",
            f"{each.disk_blocks:,}",
            "" if each.parts else "not used yet",
        )
    return table


def _part_table(parts: dict[str, str]) -> "Table":
    """Return one line for each part, cut to the width of a terminal; JSON has it whole."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=2 + max(map(len, parts)))
    table.add_column(no_wrap=True, overflow="ellipsis")
    for name, value in sorted(parts.items()):
        table.add_row(f"  {name}", Text(value))
    return table
