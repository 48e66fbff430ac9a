"""`kvstrata inspect`: whose blocks a server holds, and who uses it."""

import json
from typing import TYPE_CHECKING

import typer

from kvstrata.cli.reporting import JsonFlag, plain_table, reported
from kvstrata.cli.servers import SocketOption, as_plain, look_at, print_views
from kvstrata.core.units import human_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvstrata.manager.report import CacheReport

__all__ = ["inspect"]


def inspect(socket: SocketOption = None, *, as_json: JsonFlag = False) -> None:
    """Show namespaces with what they stand for, their blocks in each tier, and engines.

    Exits with 1 if no server answers.
    """
    with reported():
        views = look_at(socket)
        if as_json:
            typer.echo(json.dumps(as_plain(views), indent=2))
        else:
            print_views(views, _print)


def _print(console: "Console", report: "CacheReport") -> None:
    console.print(_engine_table(report) if report.engines else "no engine is connected")
    console.print()
    console.print(_namespace_table(report) if report.namespaces else "no blocks yet")


def _engine_table(report: "CacheReport") -> "Table":
    table = plain_table("engine", "workers attached")
    for engine in report.engines:
        workers = engine["workers"]
        attached = len(workers) if isinstance(workers, list) else 0
        table.add_row(str(engine["session"]), f"{attached} of {engine['world_size']}")
    return table


def _namespace_table(report: "CacheReport") -> "Table":
    numbers = ("blocks", "bytes", "in host", "on disk")
    table = plain_table("namespace", *numbers, "stands for", right=numbers)
    block_bytes = report.tiers[0].block_bytes if report.tiers else 0
    for each in report.namespaces:
        parts = "\n".join(f"{name}: {value}" for name, value in sorted(each.parts.items()))
        table.add_row(
            each.namespace,
            f"{each.blocks:,}",
            human_bytes(each.blocks * block_bytes),
            f"{each.host_blocks:,}",
            f"{each.disk_blocks:,}",
            parts or "not in use since this server started",
        )
    return table
