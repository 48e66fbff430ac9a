"""Options of the command line that stand for settings, and the checks before anything starts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvstrata.core.errors import ConfigError

if TYPE_CHECKING:
    from kvstrata.core.config import Config

__all__ = [
    "COMMAND_LINE",
    "ConfigOption",
    "DiskOption",
    "HostSizeOption",
    "check_machine",
    "overrides_of",
]

COMMAND_LINE = "command line"  # what errors call the source

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="YAML or JSON file with the settings."),
]
HostSizeOption = Annotated[
    str | None,
    typer.Option("--host-size", metavar="SIZE", help="Host memory, for example 8GiB, or auto."),
]
DiskOption = Annotated[
    str | None,
    typer.Option(
        "--disk", metavar="PATH:SIZE", help="Disk tier, for example /var/cache/kv:200GiB."
    ),
]


def overrides_of(
    *, config: Path | None, host_size: str | None, disk: str | None, socket: Path | None = None
) -> dict[str, object]:
    """Return the settings that these options say, for ``load_config`` or the engine.

    A tier that no option names stays as environment and file have it. Paths become absolute.
    """
    overrides: dict[str, object] = {}
    if config is not None:
        overrides["config_file"] = str(_absolute(config))
    if socket is not None:
        overrides |= {"server": "attached", "socket": str(_absolute(socket))}
    if host_size is not None or disk is not None:
        overrides["tiers"] = _tiers(overrides, host_size, disk)
    return overrides


def check_machine(config: "Config") -> list[str]:
    """Raise ConfigError unless this machine can hold the tiers of *config*; return warnings."""
    from kvstrata.cli.diagnosis import check_disk, check_host

    findings = list(check_host(config.host_tier))
    if config.disk_tier is not None:
        findings += check_disk(config.disk_tier)
    for finding in findings:
        if finding.level == "problem":
            raise ConfigError(finding.message, hint=finding.remedy or None)
    return [finding.message for finding in findings if finding.level == "warning"]


def _tiers(
    overrides: dict[str, object], host_size: str | None, disk: str | None
) -> list[dict[str, object]]:
    from kvstrata.core.load import load_config

    base = load_config(overrides, overrides_name=COMMAND_LINE)
    host: dict[str, object] = {"kind": "host", "capacity": base.host_tier.capacity}
    if host_size is not None:
        host["capacity"] = _capacity("--host-size", host_size)
    tiers = [host]
    if disk is not None:
        tiers.append(_disk(disk))
    elif base.disk_tier is not None:
        tiers.append(base.disk_tier.model_dump(mode="json"))
    return tiers


def _disk(text: str) -> dict[str, object]:
    path, colon, capacity = text.rpartition(":")
    if not colon or not path or not capacity.strip():
        raise ConfigError(
            f"--disk {text!r} is not a path and a size",
            hint="write them with a colon between, for example --disk /var/cache/kv:200GiB",
        )
    return {
        "kind": "disk",
        "path": str(_absolute(Path(path))),
        "capacity": _capacity("--disk", capacity, may_be_auto=False),
    }


def _capacity(option: str, text: str, *, may_be_auto: bool = True) -> int | Literal["auto"]:
    from kvstrata.core.units import parse_bytes

    if may_be_auto and text.strip().lower() == "auto":
        return "auto"
    try:
        return parse_bytes(text)
    except ConfigError as e:
        raise ConfigError(f"{option}: {e.args[0]}", hint=e.hint) from None


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()
