"""The options of `kvstrata replay`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

__all__ = [
    "MLA",
    "AttentionTokens",
    "BlockTokens",
    "DType",
    "Device",
    "Disk",
    "DiskGBps",
    "DiskWrite",
    "Format",
    "FormatName",
    "Goal",
    "HeadSize",
    "Host",
    "HostGBps",
    "IdTokens",
    "Jobs",
    "KVHeads",
    "Labels",
    "Layers",
    "Plot",
    "Policies",
    "PrefillRate",
    "SecondsPerUnit",
    "Sweep",
    "TokenBytes",
    "TraceArgument",
    "WorkDir",
]

_TRACE: Final = "The trace"
_CACHE: Final = "The cache"
_MODEL: Final = "The model"
_RATES: Final = "The machine (assumptions: replace them by what you have measured)"
_OUTPUT: Final = "Output"


class FormatName(StrEnum):
    """What a trace can be."""

    AUTO = "auto"
    MOONCAKE = "mooncake"
    TIMED = "timed"
    KVSTRATA = "kvstrata"


TraceArgument = Annotated[
    Path | None,
    typer.Argument(
        help="JSON lines, gzip or not. Without it the small synthetic trace that comes with us.",
        show_default=False,
    ),
]
Format = Annotated[
    FormatName, typer.Option("--format", help="Of the trace.", rich_help_panel=_TRACE)
]
IdTokens = Annotated[
    int | None,
    typer.Option(
        "--tokens-per-id",
        min=1,
        help="Tokens that a hash id stands for; unset: 512 (Mooncake) or 16 (timed). With another number "
        "say --format, too, or --seconds-per-unit.",
        rich_help_panel=_TRACE,
    ),
]
SecondsPerUnit = Annotated[
    float | None,
    typer.Option(
        min=1e-9,
        help="Of a timestamp; unset: 0.001 (Mooncake) or 1 (timed).",
        rich_help_panel=_TRACE,
    ),
]
Labels = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        metavar="FIELD=NAME",
        help="What the trace calls a field, for example timestamp=ts. May be repeated.",
        rich_help_panel=_TRACE,
    ),
]
BlockTokens = Annotated[
    int | None,
    typer.Option(
        "--tokens-per-block",
        min=1,
        help="Block of the cache, a multiple of what an id stands for; unset: the same.",
        rich_help_panel=_TRACE,
    ),
]
Host = Annotated[
    str, typer.Option("--host", metavar="SIZE", help="Host memory.", rich_help_panel=_CACHE)
]
Disk = Annotated[
    str | None,
    typer.Option("--disk", metavar="SIZE", help="Disk tier.", rich_help_panel=_CACHE),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="SIZE",
        help="The engine's own KV cache in front; its hits are not ours.",
        rich_help_panel=_CACHE,
    ),
]
Policies = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="NAME[,NAME...]",
        help="Who leaves a full tier: lru, s3fifo, cost. Several are compared.",
        rich_help_panel=_CACHE,
    ),
]
DiskWrite = Annotated[
    str,
    typer.Option(
        "--disk-write",
        metavar="WHEN",
        help="When blocks of host memory go to disk: saved, evicted, reused, or reused:2 for what "
        "is found twice.",
        rich_help_panel=_CACHE,
    ),
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="TIER=FROM..TO[:COUNT]",
        help="Try sizes, for example host=16GiB..512GiB: doubling, or COUNT of them. For host, "
        "disk or both.",
        rich_help_panel=_CACHE,
    ),
]
Goal = Annotated[
    float,
    typer.Option(
        min=0.01,
        max=1.0,
        help="With --sweep: the share of all possible hits to find the size for.",
        rich_help_panel=_CACHE,
    ),
]
TokenBytes = Annotated[
    str | None,
    typer.Option(
        "--kv-bytes-per-token",
        metavar="SIZE",
        help="KV of a token, all layers and ranks; instead of what follows.",
        rich_help_panel=_MODEL,
    ),
]
Layers = Annotated[int, typer.Option("--layers", min=1, rich_help_panel=_MODEL)]
KVHeads = Annotated[int, typer.Option(min=1, help="Of all ranks together.", rich_help_panel=_MODEL)]
HeadSize = Annotated[int, typer.Option(min=1, rich_help_panel=_MODEL)]
DType = Annotated[str, typer.Option(help="Of the KV cache.", rich_help_panel=_MODEL)]
MLA = Annotated[
    bool, typer.Option("--mla", help="One latent serves as K and V.", rich_help_panel=_MODEL)
]
PrefillRate = Annotated[
    float,
    typer.Option(
        "--prefill-tokens-per-second",
        min=1e-3,
        help="Of a short prompt.",
        rich_help_panel=_RATES,
    ),
]
AttentionTokens = Annotated[
    float,
    typer.Option(
        "--attention-tokens",
        min=1,
        help="Context at which attention takes as long as all else of a token.",
        rich_help_panel=_RATES,
    ),
]
HostGBps = Annotated[
    float,
    typer.Option(
        "--host-gbps", min=1e-3, help="Host memory to device, GB/s.", rich_help_panel=_RATES
    ),
]
DiskGBps = Annotated[
    float,
    typer.Option(
        "--disk-gbps", min=1e-3, help="Disk to host memory, GB/s.", rich_help_panel=_RATES
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE.png",
        help="Draw the sweep too (extra 'plot').",
        rich_help_panel=_OUTPUT,
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs", min=1, help="Replays at a time; unset: one a core.", rich_help_panel=_OUTPUT
    ),
]
WorkDir = Annotated[
    Path | None,
    typer.Option(
        "--work-dir",
        metavar="DIR",
        help="Where the trace is kept in compact form meanwhile; unset: the system's directory "
        "for temporary files.",
        rich_help_panel=_OUTPUT,
    ),
]
