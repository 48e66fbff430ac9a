"""`kvstrata server`: a cache server for engines to attach to."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from kvstrata.cli.logs import LogFormat, log_to_stderr
from kvstrata.cli.reporting import reported
from kvstrata.cli.settings import (
    COMMAND_LINE,
    ConfigOption,
    DiskOption,
    HostSizeOption,
    RemoteOption,
    SharedOption,
    TierOptions,
    check_machine,
    overrides_of,
)
from kvstrata.cli.sizes import size_of
from kvstrata.core.errors import InvariantViolated

__all__ = ["server"]

_log = logging.getLogger(__name__)


def server(  # noqa: PLR0913, PLR0917 - each is an option
    socket: Annotated[
        Path, typer.Option(metavar="PATH", help="Unix socket to listen at, for this user only.")
    ],
    host_size: HostSizeOption = None,
    disk: DiskOption = None,
    shared: SharedOption = None,
    remote: RemoteOption = None,
    config: ConfigOption = None,
    block_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes of a block; unset: as the first engine says."),
    ] = None,
    kv_events: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Publish KV events for routers, for example at tcp://127.0.0.1:5557.",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Answer GET /metrics for Prometheus, for example at 127.0.0.1:9464.",
        ),
    ] = None,
    log_format: Annotated[
        LogFormat, typer.Option(help="Lines of text, or one JSON object a line.")
    ] = LogFormat.TEXT,
) -> None:
    """Run a cache server that outlives the engines that share it, until SIGTERM or Ctrl-C.

    Engines join it with 'kvstrata serve MODEL --attach PATH'. What is not on disk yet when it is
    told to stop is written first.

    Exits with 0 when it was told to stop, and with 2 if it cannot start with these settings.
    """
    from kvstrata.core.load import load_config
    from kvstrata.server.main import run_server

    log_to_stderr(log_format)
    with reported():
        path = _socket_path(socket)
        tiers = TierOptions(host_size, disk, shared, remote)
        overrides = overrides_of(config=config, tiers=tiers, is_server=True)
        chosen = {"kv_events": kv_events, "metrics": metrics}
        overrides |= {name: value for name, value in chosen.items() if value is not None}
        settings = load_config(overrides, overrides_name=COMMAND_LINE)
        for warning in check_machine(settings, tiers):
            _log.warning("%s", warning)
        size_bytes = None if block_bytes is None else size_of("--block-bytes", block_bytes)
        on_prefault = _progress_bar() if sys.stderr.isatty() else None
        run_server(settings, path, block_bytes=size_bytes, on_prefault=on_prefault)


def _progress_bar() -> Callable[[int, int], None]:
    """Draws on the terminal how much of host memory is there."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("host memory"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task("")

    def advance(done_bytes: int, total_bytes: int) -> None:
        bar.update(task, completed=done_bytes, total=total_bytes)
        bar.start()
        if done_bytes >= total_bytes:
            bar.stop()

    return advance


def _socket_path(socket: Path) -> Path:
    """Return *socket* as an absolute path that a socket can have; else a ConfigError."""
    from kvstrata.core.load import load_config

    attached = overrides_of(socket=socket)
    engine = load_config(attached, environ={}, overrides_name=COMMAND_LINE)
    if engine.socket is None:
        raise InvariantViolated("an attached engine has no socket")
    return engine.socket
