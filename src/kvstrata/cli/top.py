"""`kvstrata top`: a cache server in the terminal, live."""

import json
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstrata.cli.reporting import FAILED, JsonFlag, plain_console, reported
from kvstrata.cli.servers import SocketOption, ask, only_server
from kvstrata.core.errors import ConfigError, ServerUnavailable

if TYPE_CHECKING:
    from kvstrata.server.page.sampler import Sampler

__all__ = ["top"]

_KEYS_BYTES: Final = 256  # of a paste, too
_PAUSE_SECONDS: Final = 0.2  # at most, until a signal is seen


def top(
    *,
    socket: SocketOption = None,
    interval: Annotated[
        float, typer.Option(min=0.2, max=3600, metavar="SECONDS", help="Between two looks.")
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look for one interval, print, end.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show a cache server live: tiers, hit rate, traffic, hottest prompts; q quits.

    The keys c, p, u, w and d begin a command on this server: clear, pin, unpin, warm and drain. Type
    its options, Enter runs it.

    --once prints one picture, also where there is no terminal; with --json as JSON. With several
    servers give the socket.

    Exits with 1 if no server answers, at the start or with --once.
    """
    with reported():
        if as_json and not once:
            raise ConfigError("--json prints once", hint="give --once, too")
        if not once and not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise ConfigError("this is no terminal", hint="give --once")
        from kvstrata.server.page.sampler import Sampler

        path = only_server(socket)
        ((_, report),) = ask(path, lambda client: client.stats())
        if report is None:
            raise ServerUnavailable(
                f"the server at {path} waits for its first engine, and has nothing to show yet",
                hint=f"start one with 'kvstrata serve MODEL --attach {path}'",
            )
        sampler = Sampler(path, always_hottest=True)
        try:
            sampler.look()
            if once:
                time.sleep(interval)  # what happens in it is shown
                sampler.look()
                _print_once(sampler, as_json=as_json)
            else:
                _live(sampler, interval, path)
        finally:
            sampler.close()


def _print_once(sampler: "Sampler", *, as_json: bool) -> None:
    import msgspec

    from kvstrata.cli.top_view import picture
    from kvstrata.server.page.samples import activity

    seen = sampler.seen()
    if as_json:
        summary = activity(seen.samples)
        shown = msgspec.to_builtins(seen) | {
            "activity": msgspec.to_builtins(summary) | {"hit_rate": summary.hit_rate}
        }
        del shown["samples"], shown["latest"]
        typer.echo(json.dumps(shown, indent=2))
    else:
        plain_console().print(picture(seen))
    if seen.problem:
        raise typer.Exit(FAILED)


def _live(sampler: "Sampler", interval: float, path: Path) -> None:
    """Until q, Ctrl-C, SIGTERM or the end of the terminal; a command has the terminal while it runs."""
    from kvstrata.cli.top_verbs import run

    with _signals() as caught:
        while (arguments := _watch(sampler, interval, caught)) is not None:
            run(arguments, path, is_over=lambda: bool(caught))
            if caught:
                return
            with _keys() as keyboard:
                typer.echo("\nany key goes back", nl=False)
                while not caught and not select.select([keyboard], [], [], _PAUSE_SECONDS)[0]:
                    pass
                if not caught and not os.read(keyboard, _KEYS_BYTES):
                    return
            typer.echo()


def _watch(sampler: "Sampler", interval: float, caught: list[int]) -> list[str] | None:
    """Draw until a command is given, and return its arguments; None at the end."""
    from rich.live import Live

    from kvstrata.cli.top_verbs import Line
    from kvstrata.cli.top_view import picture

    console = plain_console()
    line = Line()
    with (
        _keys() as keyboard,
        Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live,
    ):
        size, due, is_typed = os.terminal_size((0, 0)), 0.0, False
        while not caught:
            now = time.monotonic()
            is_due, drawn, size = now >= due, size, _size()
            if is_due:
                sampler.look()
                due = now + interval
            if is_due or is_typed or size != drawn:  # what else has changed is drawn at once
                console.size = size
                seen = sampler.seen()
                live.update(picture(seen, height=size.lines, line=line), refresh=True)
            ready, _, _ = select.select(
                [keyboard], [], [], min(_PAUSE_SECONDS, max(0.0, due - now))
            )
            is_typed = bool(ready)
            if ready:
                said = os.read(keyboard, _KEYS_BYTES)
                arguments = line.feed(said.decode(errors="ignore"))
                if arguments is not None or line.quits or not said:
                    return arguments
    return None


def _size() -> os.terminal_size:
    """The terminal's own, whatever COLUMNS and LINES say: readline leaves them to its children."""
    size = os.get_terminal_size(sys.stdout.fileno())
    return size if all(size) else os.terminal_size((80, 24))


@contextmanager
def _signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM that have come. As exceptions they are lost where none may be raised."""
    caught: list[int] = []
    asked = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(each, lambda number, _: caught.append(number)) for each in asked]
    try:
        yield caught
    finally:
        for each, handler in zip(asked, before, strict=True):
            signal.signal(each, handler)


@contextmanager
def _keys() -> Iterator[int]:
    """Standard input, key by key and unseen; as it was at the end."""
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard)
        yield keyboard
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
