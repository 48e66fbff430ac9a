"""`kvstrata drain`: get a server ready to be stopped."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstrata.cli.reporting import FAILED, JsonFlag, reported
from kvstrata.cli.servers import SocketOption, ask, only_server
from kvstrata.core.errors import NoTiers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstrata.manager.report import CacheReport

__all__ = ["drain"]

_LOOK_SECONDS: Final = 0.2


def drain(
    *,
    undo: Annotated[bool, typer.Option("--undo", help="Take saves again.")] = False,
    timeout: Annotated[
        float, typer.Option(min=0, max=1e6, metavar="SECONDS", help="How long to wait for writes.")
    ] = 60.0,
    socket: SocketOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Have a cache server refuse saves, and write to the tiers below what only host memory has.

    Engines go on, and blocks are loaded as before. Says when the server can be stopped and nothing
    is lost that a disk or a remote tier can keep. Without such a tier that is at once, and what is in
    host memory ends with the server. A server that no engine has joined holds nothing: it can be
    stopped, and takes the saves of an engine that joins it meanwhile. kvstrata drain --undo has it
    take saves again.

    Exits with 1 if not all is written in time, a tier is still to be cleared, or no server answers.
    With several servers give the socket.
    """
    with reported():
        path = only_server(socket)
        try:
            ask(path, lambda client: client.drain(not undo), answer_seconds=_LONG_SECONDS)
        except NoTiers:
            _print_without_tiers(path, undo=undo, as_json=as_json)
            return
        report = _report(path)
        deadline = time.monotonic() + timeout
        while not undo and report.drain != "drained" and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)  # writing takes a while
            report = _report(path)
        if as_json:
            below = [tier for tier in report.tiers if tier.tier != "host"]
            shown = {
                "socket": str(path),
                "drain": report.drain,
                "waiting_blocks": {tier.tier: tier.waiting_blocks for tier in below},
                "uncleared_namespaces": {tier.tier: tier.uncleared_namespaces for tier in below},
                "unremoved_blocks": {tier.tier: tier.unremoved_blocks for tier in below},
                "running_saves": report.running_puts,
            }
            typer.echo(json.dumps(shown, indent=2))
        else:
            typer.echo(f"{path}: {_said(report)}")
        if not undo and report.drain != "drained":
            raise typer.Exit(FAILED)


_NOT_JOINED: Final = "safe to stop: no engine has joined, so there is nothing to write"
_LONG_SECONDS: Final = 60.0  # until a large index has been looked through


def _report(path: SocketOption) -> "CacheReport":
    ((_, report),) = ask(path, lambda client: client.stats())
    assert report is not None  # it has drained
    return report


def _print_without_tiers(path: Path, *, undo: bool, as_json: bool) -> None:
    if as_json:
        shown = {
            "socket": str(path),
            "drain": "no tiers",
            "waiting_blocks": {},
            "uncleared_namespaces": {},
            "unremoved_blocks": {},
            "running_saves": 0,
        }
        typer.echo(json.dumps(shown, indent=2))
    else:
        typer.echo(f"{path}: {'saves are taken' if undo else _NOT_JOINED}")


def _said(report: "CacheReport") -> str:
    if report.drain == "off":
        return "saves are taken"
    if report.drain == "draining":
        return f"not safe to stop: {'; '.join(_in_the_way(report))}"
    if len(report.tiers) == 1:
        return "safe to stop; there is no tier below: what is in host memory ends with the server"
    return "safe to stop: all blocks are written; undo with kvstrata drain --undo"


def _in_the_way(report: "CacheReport") -> "Iterator[str]":
    waiting = sum(tier.waiting_blocks for tier in report.tiers)
    if waiting or report.running_puts:
        yield f"{waiting:,} blocks wait, {report.running_puts} saves run"
    off = [tier.tier for tier in report.tiers if tier.switched_off]
    if off:
        yield f"switched off after failures: {', '.join(off)}"
    for tier in report.tiers:
        if tier.uncleared:
            yield (
                f"{tier.tier} is still to be cleared of {tier.uncleared}: that is done as soon as it "
                "answers, and a restart before that can find them again"
            )
