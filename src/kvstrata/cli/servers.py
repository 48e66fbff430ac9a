"""Asks running cache servers what they hold, for `stats` and `inspect`."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeVar

import typer

from kvstrata.core.errors import ServerUnavailable

if TYPE_CHECKING:
    from rich.console import Console

    from kvstrata.manager.report import CacheReport
    from kvstrata.server.client import ManagerClient

__all__ = ["ServerView", "SocketOption", "as_plain", "ask", "look_at", "print_views"]

_ANSWER_SECONDS: Final = 3.0

T = TypeVar("T")

SocketOption = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        envvar="KVSTRATA_SOCKET",
        help="Socket of one server; unset: KVSTRATA_SOCKET, or without that every server of this "
        "user's engines.",
    ),
]


class ServerView(NamedTuple):
    """A server that answered. *report* is None until an engine has told it the block size."""

    socket: Path
    report: "CacheReport | None"


def look_at(socket: Path | None) -> list[ServerView]:
    """Return what the server at *socket* reports, or all live ones of the runtime directory.

    Raises ``ServerUnavailable`` if there is none.
    """
    return [ServerView(path, report) for path, report in ask(socket, lambda c: c.stats())]


def ask(socket: Path | None, question: Callable[["ManagerClient"], T]) -> list[tuple[Path, T]]:
    """Return the answers of the server at *socket*, or of all live ones; raises as ``look_at``."""
    from kvstrata.server.sockets import runtime_directory

    if socket is not None:
        return [(socket, _ask(socket, question))]
    directory = runtime_directory()
    found = []
    for path in sorted(directory.glob("*.sock")):
        try:
            found.append((path, _ask(path, question)))
        except ServerUnavailable:  # its server was killed
            continue
    if not found:
        raise ServerUnavailable(
            f"no cache server is running in {directory}",
            hint="start an engine with 'kvstrata serve', or name the socket of a server: --socket or "
            "KVSTRATA_SOCKET",
        )
    return found


def as_plain(views: list[ServerView]) -> dict[str, Any]:
    """Return *views* as values that JSON has."""
    import msgspec

    return {
        "servers": [
            {"socket": str(view.socket), "report": msgspec.to_builtins(view.report)}
            for view in views
        ]
    }


def print_views(
    views: list[ServerView], print_report: Callable[["Console", "CacheReport"], None]
) -> None:
    """Print a heading for each server, and *print_report* of those that have an engine."""
    from rich.console import Console

    console = Console(highlight=False)
    for number, (socket, report) in enumerate(views):
        if number:
            console.print()
        console.print(f"server {socket}", style="bold", markup=False, soft_wrap=True)
        if report is None:
            console.print("waits for its first engine")
        else:
            print_report(console, report)


def _ask(socket: Path, question: Callable[["ManagerClient"], T]) -> T:
    from kvstrata.server.client import observe

    with closing(observe(socket, timeout_seconds=_ANSWER_SECONDS)) as client:
        return question(client)
