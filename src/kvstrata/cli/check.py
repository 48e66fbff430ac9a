"""`kvstrata check`: read a whole disk tier, and say what of it is sound."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli.reporting import FAILED, JsonFlag, plain_console, plain_table, reported
from kvstrata.core.units import human_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from kvstrata.storage.disk_check import CheckReport

__all__ = ["check"]


def check(
    directory: Annotated[list[Path], typer.Argument(help="The directories of one disk tier.")],
    *,
    repair: Annotated[
        bool, typer.Option("--repair", help="Forget what is damaged; good blocks stay.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Read every block of a disk tier and report what is good, damaged or lost.

    Name the directories of a striped tier together, in the order of its configuration. Without
    `--repair` nothing is written. A tier that is in use cannot be checked.

    Exits with 0 if the tier is sound, with 1 if there was damage, repaired or not, and with 2 if
    the directories are no disk tier, are refused, or are in use.
    """
    with reported():
        from kvstrata.storage.disk_check import check_store

        with _progress() as progress:
            report = check_store(directory, repair=repair, progress=progress)
    if as_json:
        typer.echo(json.dumps(_plain(report), indent=2))
    else:
        _print(report)
    if not report.sound:
        raise typer.Exit(FAILED)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Yield what draws a bar on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading blocks", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _plain(report: "CheckReport") -> dict[str, Any]:
    """Return *report* as values that JSON has."""
    from kvstrata.storage.superblock import FORMAT_VERSION

    superblock = report.superblock
    return {
        "sound": report.sound,
        "repaired": report.repaired,
        "format_version": FORMAT_VERSION,
        "store": superblock.store_id.hex(),
        "block_bytes": superblock.block_bytes,
        "slot_bytes": superblock.slot_bytes,
        "slots": superblock.slots,
        "free_slots": report.free_slots,
        "max_blocks_per_file": superblock.max_blocks_per_file,
        "directories": superblock.directories,
        "stripe_blocks": superblock.stripe_blocks,
        "good_blocks": sum(report.good_blocks.values()),
        "damaged_blocks": sum(report.damaged_blocks.values()),
        "lost_blocks": report.lost_blocks,
        "has_journal": report.has_journal,
        "damaged_records": report.damaged_records,
        "torn_bytes": report.torn_bytes,
        "namespaces": {
            name.hex(): {"good_blocks": good, "damaged_blocks": damaged}
            for name, good, damaged in _namespaces(report)
        },
        "short_files": [str(file) for file in report.short_files],
        "stray_files": [str(file) for file in report.stray_files],
    }


def _namespaces(report: "CheckReport") -> Iterator[tuple[bytes, int, int]]:
    """Each namespace with its good and damaged blocks."""
    for name in sorted({*report.good_blocks, *report.damaged_blocks}):
        yield name, report.good_blocks.get(name, 0), report.damaged_blocks.get(name, 0)


def _print(report: "CheckReport") -> None:
    console = plain_console()
    console.print(_store_table(report))
    if report.good_blocks or report.damaged_blocks:
        console.print()
        console.print(_namespace_table(report))
    for file in report.stray_files:
        console.print(f"not of this store: {file}", soft_wrap=True)
    console.print(f"\n{_verdict(report)}", style="green" if report.sound else "bold red")


def _store_table(report: "CheckReport") -> "Table":
    plain, superblock = _plain(report), report.superblock
    table = plain_table("found", "", right=("",))
    table.add_row("format version", str(plain["format_version"]))
    table.add_row("block", human_bytes(superblock.block_bytes))
    table.add_row("slots", f"{superblock.slots:,}")
    table.add_row("directories", str(superblock.directories))
    table.add_row("good blocks", f"{plain['good_blocks']:,}")
    table.add_row("damaged blocks", f"{plain['damaged_blocks']:,}")
    table.add_row("lost blocks", f"{report.lost_blocks:,}")
    table.add_row("free slots", f"{report.free_slots:,}")
    table.add_row("damaged journal records", f"{report.damaged_records:,}")
    table.add_row("unreadable end of the journal", human_bytes(report.torn_bytes))
    table.add_row("slot files missing or truncated", str(len(report.short_files)))
    return table


def _namespace_table(report: "CheckReport") -> "Table":
    numbers = ("good blocks", "damaged blocks", "bytes")
    table = plain_table("namespace", *numbers, right=numbers)
    for name, good, damaged in _namespaces(report):
        size = human_bytes(good * report.superblock.block_bytes)
        table.add_row(name.hex(), f"{good:,}", f"{damaged:,}", size)
    return table


def _verdict(report: "CheckReport") -> str:
    if report.sound:
        return "sound"
    found = "damage found" if report.has_journal else "damage found: the journal is missing"
    if report.repaired:
        return f"{found} and repaired: the good blocks are kept, the others forgotten"
    return f"{found}; --repair forgets what is damaged and keeps the good blocks"
