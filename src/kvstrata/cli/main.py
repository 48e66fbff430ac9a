"""The program `kvstrata`. Commands import what they need when they run, so that help is quick."""

from functools import partial
from typing import Annotated

import typer

from kvstrata import __version__
from kvstrata.cli.bench import bench
from kvstrata.cli.check import check
from kvstrata.cli.clear import clear
from kvstrata.cli.demo import demo
from kvstrata.cli.doctor import doctor
from kvstrata.cli.drain import drain
from kvstrata.cli.gc import gc
from kvstrata.cli.inspect import inspect
from kvstrata.cli.make_trace import make_trace
from kvstrata.cli.once import OnceCommand
from kvstrata.cli.page import page
from kvstrata.cli.pin import pin, unpin
from kvstrata.cli.replay import replay
from kvstrata.cli.serve import serve
from kvstrata.cli.server import server
from kvstrata.cli.stats import stats
from kvstrata.cli.top import top
from kvstrata.cli.warm import warm

__all__ = ["app"]

app = typer.Typer(
    name="kvstrata",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # paragraphs of help are filled
)
command = partial(app.command, cls=OnceCommand)
command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
command()(server)
command()(stats)
command()(inspect)
command()(top)
command()(page)
command()(pin)
command()(unpin)
command()(clear)
command()(drain)
command()(warm)
command()(doctor)
command()(check)
command()(gc)
command()(replay)
command()(make_trace)
command()(demo)
command()(bench)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvstrata {__version__}")
        raise typer.Exit


@app.callback()
def _kvstrata(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Keep the KV cache of LLM inference alive below device memory and give it back."""
