"""`kvstrata inspect --explain`: what was decided for one request, and on which figures."""

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstrata.cli.reporting import FAILED, plain_table
from kvstrata.cli.servers import ask

if TYPE_CHECKING:
    from rich.console import Console

    from kvstrata.manager.decisions import Decision

__all__ = ["ExplainOption", "show_decisions", "why_no_more"]

ExplainOption = Annotated[
    str | None,
    typer.Option(
        metavar="REQUEST",
        help="Show what was decided lately for this request, by the id in its response or vLLM's "
        "own, which goes on with more digits.",
    ),
]

_UNKNOWN = """error: no server has decided anything for {!r} lately
  hint: a prompt shorter than one block, and one that the engine found whole in its own device \
memory, are never looked up"""
_REASONS = {
    "all": "{all}",
    "recompute": "the rest is computed sooner than read",
    "too_late": "the rest would come after the load timeout",
    "probe": "{all}, to measure a slow tier again",
    "no_room": "no room for the rest in host memory, or in the model's quota",
    "off": "the rest begins in a tier that is switched off",
}


def show_decisions(socket: Path | None, request: str, *, as_json: bool) -> None:
    """Print the decisions of every server for *request*; raises ``typer.Exit`` if there is none."""
    import msgspec
    from rich.console import Console

    answers = ask(socket, lambda client: client.explain(request))
    if as_json:
        shown = [{"socket": str(path), "decisions": found} for path, found in answers]
        typer.echo(json.dumps({"servers": msgspec.to_builtins(shown)}, indent=2))
    console = Console(highlight=False)
    for path, found in answers:
        if found and not as_json:
            console.print(f"server {path}", style="bold", markup=False, soft_wrap=True)
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


def _print(console: "Console", decisions: list["Decision"]) -> None:
    numbers = ("asked", "host", "disk", "remote", "taken", "load ms", "compute ms")
    table = plain_table("time", "what", *numbers, "why no more", right=numbers)
    for each in decisions:
        computed = each.recompute_seconds
        table.add_row(
            datetime.fromtimestamp(each.at_seconds).astimezone().strftime("%H:%M:%S.%f")[:-3],
            "load" if each.kind == "get" else "save",
            f"{each.asked_blocks:,}",
            f"{each.host_blocks:,}",
            f"{each.disk_blocks:,}",
            f"{each.remote_blocks:,}",
            f"{each.taken_blocks:,}",
            f"{each.load_seconds * 1e3:.1f}" if each.kind == "get" else "",
            "" if computed is None else f"{computed * 1e3:.1f}",
            why_no_more(each),
        )
    console.print(table)
    last = next((each.last_block for each in reversed(decisions) if each.last_block), "")
    if last:
        console.print(f"last block found or saved: {last}", soft_wrap=True)
