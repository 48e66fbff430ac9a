"""`kvstrata clear`: give up blocks, of a namespace or of a tier."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstrata.cli.reporting import FAILED, JsonFlag, plain_console, plain_table, reported
from kvstrata.cli.servers import SocketOption, ask, namespace_as_given
from kvstrata.core.errors import ConfigError, NoTiers
from kvstrata.core.units import human_bytes

if TYPE_CHECKING:
    from kvstrata.core.types import NamespaceId
    from kvstrata.manager.report import CacheReport, ClearReport
    from kvstrata.server.client import ManagerClient

__all__ = ["clear"]


def clear(
    *,
    namespace: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="Only blocks of this namespace, as inspect shows it."),
    ] = None,
    tier: Annotated[
        str | None, typer.Option(metavar="TIER", help="Only in host, disk or remote.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every namespace in every tier, if neither is named.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and keep it.")
    ] = False,
    socket: SocketOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Give up blocks of running cache servers, at once and for good.

    In one tier, blocks that engines are reading or writing stay, and pinned ones. Without --tier
    nothing of the namespace is found any more, and its pins end; engines go on and save anew. A tier
    that nodes share loses the blocks for all of them, also of a namespace that only they know.

    Exits with 1 if no server answers or knows the namespace.
    """
    with reported():
        if namespace is None and tier is None and not everything:
            raise ConfigError(
                "nothing says what to clear",
                hint="name a --namespace or a --tier, or give --all; try it with --dry-run",
            )
        if everything and (namespace is not None or tier is not None):
            raise ConfigError(
                "--all is every namespace in every tier", hint="leave out --all or the others"
            )
        where = namespace_as_given(namespace) if namespace else None

        def one(client: "ManagerClient") -> "_Answer | NoTiers":
            stats = client.stats()  # of before: what it clears it forgets
            try:
                return client.clear(where, tier, dry_run=dry_run), stats
            except NoTiers as e:
                return e

        answers = _cleared(ask(socket, one, answer_seconds=_CLEAR_SECONDS))
        if where is not None and not any(_may_have(where, *answer) for _, answer in answers):
            hint = "kvstrata inspect shows those that there are"
            typer.echo(f"error: no server knows a namespace {namespace}\n  hint: {hint}", err=True)
            raise typer.Exit(FAILED)
        if as_json:
            _print_json(answers, dry_run=dry_run)
        else:
            _print(answers, dry_run=dry_run)


_CLEAR_SECONDS = 300.0  # a large disk forgets as fast as its journal is written


def _may_have(where: "NamespaceId", report: "ClearReport", stats: "CacheReport | None") -> bool:
    """Whether the server had anything of the namespace, or a tier in which others may have it."""
    named = stats.namespaces if stats is not None else []
    is_named = any(each.namespace == where.hex() for each in named)
    return is_named or any(report.blocks.values()) or "remote" in report.blocks


def _cleared(answers: "list[tuple[Path, _Answer | NoTiers]]") -> "_Answers":
    """Those of servers with tiers, and of none that has none, unless all are so: raises that."""
    cleared = [(path, answer) for path, answer in answers if not isinstance(answer, NoTiers)]
    for _, answer in answers:
        if isinstance(answer, NoTiers) and not cleared:
            raise answer
    return cleared


_Answer = tuple["ClearReport", "CacheReport | None"]
_Answers = list[tuple[Path, _Answer]]


def _print(answers: _Answers, *, dry_run: bool) -> None:
    console = plain_console()
    title = "would be cleared" if dry_run else "cleared"
    for path, (report, stats) in answers:
        console.print(f"server {path}", style="bold", soft_wrap=True)
        table = plain_table("tier", title, "bytes", right=(title, "bytes"))
        for tier, blocks in report.blocks.items():
            table.add_row(tier, f"{blocks:,}", human_bytes(blocks * _block_bytes(stats, tier)))
        console.print(table)
        console.print(f"in no other tier: {report.lost_blocks:,} blocks")
        if report.in_use_blocks:
            console.print(f"in use or pinned, and kept: {report.in_use_blocks:,} blocks")


def _print_json(answers: _Answers, *, dry_run: bool) -> None:
    rows = [
        {
            "socket": str(path),
            "dry_run": dry_run,
            "tiers": [
                {"tier": tier, "blocks": blocks, "bytes": blocks * _block_bytes(stats, tier)}
                for tier, blocks in report.blocks.items()
            ],
            "in_use_blocks": report.in_use_blocks,
            "lost_blocks": report.lost_blocks,
        }
        for path, (report, stats) in answers
    ]
    typer.echo(json.dumps({"servers": rows}, indent=2))


def _block_bytes(stats: "CacheReport | None", tier: str) -> int:
    tiers = stats.tiers if stats is not None else []
    return next((each.block_bytes for each in tiers if each.tier == tier), 0)
