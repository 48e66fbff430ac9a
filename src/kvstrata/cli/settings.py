"""Options of the command line that stand for settings, and the checks before anything starts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from kvstrata.cli.sizes import size_of
from kvstrata.core.errors import ConfigError

if TYPE_CHECKING:
    from kvstrata.core.config import Config

__all__ = [
    "COMMAND_LINE",
    "ConfigOption",
    "DiskOption",
    "HostSizeOption",
    "RemoteOption",
    "SharedOption",
    "TierOptions",
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
    typer.Option(
        "--host-size",
        metavar="SIZE",
        help="Host memory, for example 8GiB, or auto. Wins over the capacity in the settings.",
    ),
]
DiskOption = Annotated[
    str | None,
    typer.Option(
        "--disk",
        metavar="PATH[,PATH…]:SIZE",
        help="Disk tier, for example /var/cache/kv:200GiB; of several devices the size of all. "
        "Wins over the disk tier of the settings, whose other values are dropped with it.",
    ),
]
SharedOption = Annotated[
    str | None,
    typer.Option(
        "--shared",
        metavar="PATH:SIZE",
        help="Shared tier on a file system that other nodes mount too, for example /mnt/kv:2TiB. "
        "Wins over the shared tier of the settings, as --disk does.",
    ),
]
RemoteOption = Annotated[
    str | None,
    typer.Option(
        "--remote",
        metavar="URL",
        help="Tier on an engine that other nodes use too: s3://BUCKET/PREFIX, gs://, az://, "
        "valkey://HOST:PORT, rediss://, unix:///PATH or mooncake://HOST:PORT, with settings as "
        "?NAME=VALUE&…. Wins over the lowest tier of the settings, as --disk does.",
    ),
]


class TierOptions(NamedTuple):
    """What the command line says of tiers; None where it says nothing."""

    host_size: str | None = None
    disk: str | None = None
    shared: str | None = None
    remote: str | None = None


def overrides_of(
    *,
    config: Path | None = None,
    tiers: TierOptions = TierOptions(),  # noqa: B008 - immutable
    socket: Path | None = None,
    is_server: bool = False,
) -> dict[str, object]:
    """Return the settings that these options say, for ``load_config`` or the engine.

    A tier that no option names stays as environment and file have it. Paths become absolute. What
    environment and file say of a server to join does not concern a command that *is_server*.
    """
    overrides: dict[str, object] = {"server": "embedded", "socket": None} if is_server else {}
    if config is not None:
        overrides["config_file"] = str(_absolute(config))
    if socket is not None:
        overrides |= {"server": "attached", "socket": str(_absolute(socket))}
    if any(option is not None for option in tiers):
        overrides["tiers"] = _tiers(overrides, tiers)
    return overrides


def check_machine(config: "Config", tiers: TierOptions, *, asks_others: bool = True) -> list[str]:
    """Raise ConfigError unless this machine can hold the tiers of *config*; return warnings.

    A tier that *tiers* names is called by its option. An engine that nodes share is asked for
    something, if it is wanted (*asks_others*), which takes seconds where it does not answer.
    """
    from kvstrata.cli.diagnosis import (
        check_answer,
        check_disk,
        check_host,
        check_log,
        check_lowest,
    )
    from kvstrata.core.remote_tiers import RemoteTier

    host = {} if tiers.host_size is None else {"setting": "--host-size"}
    disk = {} if tiers.disk is None else {"setting": "--disk"}
    shared = {} if tiers.shared is None else {"setting": "--shared"}
    findings = list(check_host(config.host_tier, **host))
    if config.disk_tier is not None:
        findings += check_disk(config.disk_tier, **disk)
    if config.lowest_tier is not None:
        findings += check_lowest(config.lowest_tier, **shared)
    if config.event_log is not None:
        findings.append(check_log(config.event_log))
    for finding in findings:
        if finding.level == "problem":
            said = _said(tiers, finding.subject)
            raise ConfigError(f"{said}{finding.message}", hint=finding.remedy or None)
    if asks_others and isinstance(config.lowest_tier, RemoteTier):
        findings += check_answer(config.lowest_tier)
    return [
        f"{finding.message} ({finding.remedy})" if finding.remedy else finding.message
        for finding in findings
        if finding.level == "warning"
    ]


def _said(tiers: TierOptions, subject: str) -> str:
    """The option that a finding on *subject* is about, with its value, if it was given."""
    from kvstrata.core.pipeline import redact

    options = {
        "memory": ("--host-size", tiers.host_size),
        "disk": ("--disk", tiers.disk),
        "shared": ("--shared", tiers.shared),
        "remote": ("--remote", tiers.remote),
    }
    option, value = options.get(subject, ("", None))
    return "" if value is None else f"{option} {redact(value)}: "


def _tiers(overrides: dict[str, object], options: TierOptions) -> list[dict[str, object]]:
    from kvstrata.core.load import load_config
    from kvstrata.core.pipeline import depth_of

    base = load_config(overrides, overrides_name=COMMAND_LINE)
    found: dict[str, dict[str, object]] = {
        tier.kind: {"kind": tier.kind, **tier.model_dump(mode="json", exclude_defaults=True)}
        for tier in base.tiers
    }
    if options.host_size is not None:
        found["host"]["capacity"] = _capacity("--host-size", options.host_size)
    if options.disk is not None:
        paths, capacity = _directories("--disk", options.disk)
        found["disk"] = {"kind": "disk", "paths": paths, "capacity": capacity}
    if options.shared is not None or options.remote is not None:
        found = {kind: tier for kind, tier in found.items() if kind in {"host", "disk"}}
    if options.shared is not None:
        paths, capacity = _directories("--shared", options.shared)
        found["shared"] = {"kind": "shared", "path": ",".join(paths), "capacity": capacity}
    if options.remote is not None:
        tier = _remote(options.remote)
        found[str(tier["kind"])] = tier
    return sorted(found.values(), key=lambda tier: depth_of(str(tier["kind"])))


def _remote(text: str) -> dict[str, object]:
    """The tier at the address *text*, whose faults are told with the option."""
    from kvstrata.core.load import load_config
    from kvstrata.core.pipeline import parse_pipeline, redact
    from kvstrata.core.remote_tiers import RemoteTier

    pipeline = f"host | {text}"
    config = load_config({"tiers": pipeline}, environ={}, overrides_name="--remote")
    if not isinstance(config.lowest_tier, RemoteTier) or len(config.tiers) > 2:
        raise ConfigError(
            f"--remote {redact(text)!r} is not the address of one tier",
            hint="give one such as s3://BUCKET/PREFIX; directories are for --disk and --shared",
        )
    return parse_pipeline(pipeline)[1]


def _directories(option: str, text: str) -> tuple[list[str], int | Literal["auto"]]:
    paths, colon, capacity = text.rpartition(":")
    if not colon or not paths or not capacity.strip():
        raise ConfigError(
            f"{option} {text!r} is not a path and a size",
            hint=f"write them with a colon between, for example {option} /var/cache/kv:200GiB",
        )
    absolute = [str(_absolute(Path(path.strip()))) for path in paths.split(",")]
    return absolute, _capacity(option, capacity, may_be_auto=False)


def _capacity(option: str, text: str, *, may_be_auto: bool = True) -> int | Literal["auto"]:
    return "auto" if may_be_auto and text.strip().lower() == "auto" else size_of(option, text)


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()
