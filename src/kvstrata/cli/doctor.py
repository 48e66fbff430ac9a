"""`kvstrata doctor`: look for what would go wrong, before it does."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli.reporting import plain_console

if TYPE_CHECKING:
    from rich.table import Table

    from kvstrata.cli.diagnosis import Diagnosis, Finding

__all__ = ["doctor"]

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="YAML or JSON file with the settings."),
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check software, settings, memory, disk and limits, and save and load a few blocks.

    Exits with 1 if there is a problem.
    """
    from kvstrata.cli.diagnosis import diagnose

    diagnosis = diagnose(config)
    if as_json:
        typer.echo(json.dumps(_plain(diagnosis), indent=2))
    else:
        _print(diagnosis)
    if diagnosis.problems:
        raise typer.Exit(1)


def _plain(diagnosis: "Diagnosis") -> dict[str, Any]:
    """Return *diagnosis* as values that JSON has."""
    from kvstrata.cli.shown_settings import plain_settings

    values = plain_settings(diagnosis.settings)
    return {
        "problems": diagnosis.problems,
        "findings": [
            {
                "subject": finding.subject,
                "level": finding.level,
                "message": finding.message,
                "remedy": finding.remedy,
            }
            for finding in diagnosis.findings
        ],
        "settings": {
            name: {"value": values[name], "source": setting.source}
            for name, setting in diagnosis.settings.items()
        },
    }


def _print(diagnosis: "Diagnosis") -> None:
    console = plain_console()
    console.print(_table(diagnosis.findings))
    warnings = sum(finding.level == "warning" for finding in diagnosis.findings)
    console.print(f"{_count(diagnosis.problems, 'problem')}, {_count(warnings, 'warning')}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _table(findings: "list[Finding]") -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("check", "result", "finding"):
        table.add_column(title, overflow="fold", no_wrap=title != "finding")
    for finding in findings:
        text = Text(finding.message)
        if finding.remedy:
            text.append(f"\n→ {finding.remedy}", style="italic")
        table.add_row(finding.subject, Text(finding.level, _STYLES[finding.level]), text)
    return table
