"""`kvstrata make-trace`: a synthetic trace, to try sizes and policies on before there is a real one."""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from kvstrata.cli.reporting import reported
from kvstrata.core.errors import ConfigError

if TYPE_CHECKING:
    from kvstrata.replay.generate import Kind

__all__ = ["make_trace"]


def make_trace(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="File to write; packed if it ends in .gz. It must not exist."
        ),
    ],
    *,
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 10_000,
    hours: Annotated[
        float, typer.Option(min=0.01, help="Time over which they arrive, about.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same trace.")] = 0,
    mix: Annotated[
        str | None,
        typer.Option(
            metavar="KIND=SHARE,...",
            help="Shares of the requests; default chat=0.5,document=0.15,agent=0.2,single=0.15.",
        ),
    ] = None,
) -> None:
    """Write a synthetic trace in Mooncake's format: multi-turn chats behind shared system prompts,
    questions about documents of which some are popular, agents at work, single prompts.

    A kind that MIX leaves out does not occur. Exits with 2 if the file exists or cannot be made.
    """
    with reported():
        import msgspec

        from kvstrata.replay.generate import generate

        shares = None if mix is None else _parse_mix(mix)
        encoder = msgspec.json.Encoder()
        with _created(file) as out:
            for request in generate(requests, seconds=hours * 3600, seed=seed, mix=shares):
                out.write(encoder.encode(request) + b"\n")


def _parse_mix(text: str) -> "dict[Kind, float]":
    from kvstrata.replay.generate import MIX

    mix: dict[Kind, float] = {}
    for part in text.split(","):
        name, _, share = part.strip().partition("=")
        kind = next((kind for kind in MIX if kind == name), None)
        number = share.replace(".", "", 1)
        if kind is None or kind in mix or not number.isdecimal() or not float(share):
            raise ConfigError(
                f"--mix {text}: {part.strip()!r} is not KIND=SHARE",
                hint=f"each of {', '.join(MIX)} at most once, with a share above 0",
            )
        mix[kind] = float(share)
    return mix


@contextmanager
def _created(path: Path) -> Iterator[BinaryIO | gzip.GzipFile]:
    """A new file; one that could not be written to its end is removed."""
    try:
        raw = path.open("xb")
    except OSError as e:
        raise ConfigError(
            f"{path} cannot be made: {e.strerror}", hint="name a file that does not exist yet"
        ) from e
    try:
        with raw:
            if path.suffix != ".gz":
                yield raw
                return
            # No name and time inside: the same trace gives the same file.
            with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
                yield packed
    except BaseException:
        path.unlink(missing_ok=True)
        raise
