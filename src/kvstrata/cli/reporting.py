"""What all commands share: errors become a message and an exit code, tables look alike."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from kvstrata.core.errors import ConfigError, KVStrataError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "FAILED",
    "UNREADABLE_HINT",
    "WRONG_INPUT",
    "JsonFlag",
    "ending_in_order",
    "plain_console",
    "plain_table",
    "reported",
    "why_unreadable",
]

FAILED = 1
WRONG_INPUT = 2
UNREADABLE_HINT: Final = "name a text file that exists and that you may read"
_NO_EDGE: Final = 10_000  # columns

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def reported() -> Iterator[None]:
    """End the command with 2 on a ``ConfigError``, with 1 on any other error of ours.

    The message and its hint go to standard error.
    """
    try:
        yield
    except KVStrataError as e:
        typer.echo(f"error: {e}", err=True)
        raise typer.Exit(WRONG_INPUT if isinstance(e, ConfigError) else FAILED) from e


@contextmanager
def ending_in_order() -> Iterator[None]:
    """SIGTERM and the end of a terminal are Ctrl-C: what was started ends, and its files go."""
    asked = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in asked]
    try:
        yield
    finally:
        for number, handler in zip(asked, before, strict=True):
            signal.signal(number, handler)


def plain_console() -> "Console":
    """Return one that shows strings as they are: names and paths may have brackets and colons.

    Only a terminal has an edge at which lines are folded; COLUMNS, if it is set, says where.
    """
    from rich.console import Console

    has_edge = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    width = None if has_edge else _NO_EDGE
    return Console(width=width, highlight=False, markup=False, emoji=False)


def why_unreadable(error: OSError | UnicodeDecodeError) -> str:
    """What is wrong with a file, whose name the caller says."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is no text"


def plain_table(*titles: str, right: tuple[str, ...] = ()) -> "Table":
    """Return an empty table without a frame; columns of *right* hold numbers."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for number, title in enumerate(titles):
        justify: Literal["right", "left"] = "right" if title in right else "left"
        table.add_column(title, justify=justify, overflow="fold", no_wrap=number == 0)
    return table
