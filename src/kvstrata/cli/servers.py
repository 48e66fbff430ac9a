"""Asks running cache servers what they hold, for `stats` and `inspect`."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeVar

import typer

from kvstrata.cli.reporting import plain_console
from kvstrata.core.errors import ConfigError, ServerUnavailable
from kvstrata.core.types import BLOCK_KEY_BYTES, NAMESPACE_ID_BYTES, BlockKey, NamespaceId

if TYPE_CHECKING:
    from rich.console import Console

    from kvstrata.manager.report import CacheReport
    from kvstrata.server.client import ManagerClient

__all__ = [
    "KNOWN_REQUESTS",
    "ServerView",
    "SocketOption",
    "as_plain",
    "ask",
    "key_as_given",
    "look_at",
    "namespace_as_given",
    "only_server",
    "print_views",
]

_ANSWER_SECONDS: Final = 3.0
KNOWN_REQUESTS: Final = (
    "known are those of the last 4,096 lookups and saves. A prompt shorter than one block, and one "
    "that the engine found whole in its own device memory, are never looked up"
)

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


def ask(
    socket: Path | None,
    question: Callable[["ManagerClient"], T],
    *,
    answer_seconds: float = _ANSWER_SECONDS,
) -> list[tuple[Path, T]]:
    """Return the answers of the server at *socket*, or of all live ones; raises as ``look_at``."""
    from kvstrata.server.sockets import runtime_directory

    if socket is not None:
        return [(socket, _ask(socket, question, answer_seconds))]
    directory = runtime_directory()
    found = []
    for path in sorted(directory.glob("*.sock")):
        try:
            found.append((path, _ask(path, question, answer_seconds)))
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
    console = plain_console()
    for number, (socket, report) in enumerate(views):
        if number:
            console.print()
        console.print(f"server {socket}", style="bold", soft_wrap=True)
        if report is None:
            console.print("waits for its first engine")
        else:
            print_report(console, report)


def only_server(socket: Path | None) -> Path:
    """Return *socket*, or that of the only live server; a ``ConfigError`` if there are several."""
    if socket is not None:
        return socket
    answers = ask(None, lambda client: client.ping())
    if len(answers) > 1:
        raise ConfigError(
            f"{len(answers)} servers are running: {', '.join(str(path) for path, _ in answers)}",
            hint="name one of them: --socket",
        )
    return answers[0][0]


def namespace_as_given(text: str) -> NamespaceId:
    """Return the namespace that *text* says as hex; else a ``ConfigError``."""
    hint = "kvstrata inspect shows namespaces in full"
    return _bytes_as_given(text, NAMESPACE_ID_BYTES, "a namespace", hint)


def key_as_given(text: str) -> BlockKey:
    """Return the key of a block that *text* says as hex; else a ``ConfigError``."""
    hint = "name the prompt of a recent request instead: --request"
    return _bytes_as_given(text, BLOCK_KEY_BYTES, "a key", hint)


def _bytes_as_given(text: str, length: int, what: str, hint: str) -> bytes:
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != length:
        raise ConfigError(f"{text!r} is not {what}: {2 * length} hexadecimal digits", hint=hint)
    return value


def _ask(socket: Path, question: Callable[["ManagerClient"], T], answer_seconds: float) -> T:
    from kvstrata.server.client import observe

    with closing(observe(socket, timeout_seconds=answer_seconds)) as client:
        return question(client)
