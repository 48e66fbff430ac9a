"""`kvstrata inspect --explain`: what was decided for one request, and on which figures."""

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstrata.cli.reporting import FAILED, plain_console
from kvstrata.cli.servers import KNOWN_REQUESTS, ask

if TYPE_CHECKING:
    from rich.console import Console

    from kvstrata.manager.decisions import Decision

__all__ = ["ExplainOption", "show_decisions", "table_lines", "why_no_more"]

ExplainOption = Annotated[
    str | None,
    typer.Option(
        metavar="REQUEST",
        help="Show what was decided lately for this request, by the id in its response or vLLM's "
        "own, which goes on with more digits.",
    ),
]

_TITLES: Final = (
    *("time", "what", "asked", "host", "disk", "remote", "taken", "load ms", "compute ms"),
)
_NONE: Final = "-"
_NAMES: Final = 2  # of the columns; the others are numbers
_UNKNOWN: Final = (
    f"error: no server has decided anything for {{!r}} lately\n  hint: {KNOWN_REQUESTS}"
)
_REASONS: Final = {
    "all": "{all}",
    "recompute": "the rest is computed sooner than read",
    "too_late": "the rest would come after the load timeout",
    "probe": "{all}, to measure a slow tier again",
    "no_room": "no room for the rest in host memory, or in the model's quota",
    "off": "the rest begins in a tier that is switched off",
    "unanswered": "the tier that nodes share said too late what it has of the rest",
}


def show_decisions(socket: Path | None, request: str, *, as_json: bool) -> None:
    """Print the decisions of every server for *request*; raises ``typer.Exit`` if there is none."""
    import msgspec

    answers = ask(socket, lambda client: client.explain(request))
    if as_json:
        shown = [{"socket": str(path), "decisions": found} for path, found in answers]
        typer.echo(json.dumps({"servers": msgspec.to_builtins(shown)}, indent=2))
    console = plain_console()
    for path, found in answers:
        if found and not as_json:
            console.print(f"server {path}", style="bold", soft_wrap=True)
            _print(console, found)
    if not any(found for _, found in answers):
        typer.echo(_UNKNOWN.format(request), err=True)
        raise typer.Exit(FAILED)


def why_no_more(decision: "Decision") -> str:
    """Why *decision* takes as many blocks as it does."""
    is_whole = decision.kind == "put" or decision.taken_blocks == decision.asked_blocks
    taken = "all of it" if is_whole else "all that was found"
    if not is_whole and not decision.taken_blocks and decision.reason == "all":
        return "nothing was found"
    return _REASONS[decision.reason].format(all=taken)


def table_lines(decisions: list["Decision"]) -> Iterator[str]:
    """A heading, and of each of *decisions* its figures and below them why it takes no more."""
    rows = [_TITLES, *map(_cells, decisions)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if number < _NAMES else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    yield lines[0]
    for line, decision in zip(lines[1:], decisions, strict=True):
        yield line
        yield f"  why no more: {why_no_more(decision)}"


def _cells(decision: "Decision") -> tuple[str, ...]:
    computed = decision.recompute_seconds
    return (
        datetime.fromtimestamp(decision.at_seconds).astimezone().strftime("%H:%M:%S.%f")[:-3],
        "load" if decision.kind == "get" else "save",
        f"{decision.asked_blocks:,}",
        f"{decision.host_blocks:,}",
        f"{decision.disk_blocks:,}",
        f"{decision.remote_blocks:,}",
        f"{decision.taken_blocks:,}",
        _load_ms(decision),
        f"{computed * 1e3:,.1f}" if computed and decision.taken_blocks else _NONE,
    )


def _load_ms(decision: "Decision") -> str:
    """How long what has to be read was expected to take; it is above 0 once measured."""
    if decision.kind == "put" or not decision.disk_blocks + decision.remote_blocks:
        return _NONE
    if not decision.load_seconds:
        return "not measured"
    return f"{decision.load_seconds * 1e3:,.1f}"


def _print(console: "Console", decisions: list["Decision"]) -> None:
    for number, line in enumerate(table_lines(decisions)):
        console.print(line, style="" if number else "bold", soft_wrap=True)
    last = next((each.last_block for each in reversed(decisions) if each.last_block), "")
    if last:
        console.print(f"last block found or saved: {last}", soft_wrap=True)
