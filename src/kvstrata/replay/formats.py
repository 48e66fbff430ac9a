"""From a file to a trace: which format it has, and what its numbers mean."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Final, Literal

from kvstrata.core.errors import ConfigError
from kvstrata.replay.event_trace import EventTrace, read_header
from kvstrata.replay.id_trace import FIELDS, MOONCAKE, TIMED, IdFormat, IdTrace, infer_format

__all__ = ["FORMATS", "Reading", "TraceFormat", "open_trace", "parse_labels", "sample_path"]

TraceFormat = Literal["auto", "mooncake", "timed", "kvstrata"]
FORMATS: Final[tuple[TraceFormat, ...]] = ("auto", "mooncake", "timed", "kvstrata")


@dataclass(frozen=True, slots=True)
class Reading:
    """What the caller says about a trace; None where the trace itself is to say it."""

    format: TraceFormat = "auto"
    tokens_per_id: int | None = None
    seconds_per_unit: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    tokens_per_block: int | None = None


def sample_path() -> Path:
    """A small synthetic trace that comes with the package."""
    return Path(str(files("kvstrata.replay") / "data" / "sample.jsonl.gz"))


def parse_labels(texts: list[str]) -> dict[str, str]:
    """``FIELD=NAME`` each: what a trace calls one of the usual fields."""
    labels = {}
    for text in texts:
        name, _, label = text.partition("=")
        if name not in FIELDS or not label:
            raise ConfigError(
                f"--label {text}: not FIELD=NAME", hint=f"FIELD is one of {', '.join(FIELDS)}"
            )
        labels[name] = label
    return labels


def open_trace(path: Path, reading: Reading) -> IdTrace | EventTrace:
    """The trace in *path*; ``ConfigError`` if its format is not known or does not fit *reading*.

    So is what can be read only once.
    """
    _check_kind(path)
    if reading.format in {"auto", "kvstrata"}:
        header = read_header(path)
        if header is not None:
            return _as_event_trace(EventTrace(path, header), reading)
        if reading.format == "kvstrata":
            raise ConfigError(
                f"{path} is no event log: its first line is not a header",
                hint="leave --format away to have it found out",
            )
    numbers = _numbers(path, reading)
    if reading.seconds_per_unit is not None:
        numbers = replace(numbers, seconds_per_unit=reading.seconds_per_unit)
    return IdTrace(path, numbers, reading.tokens_per_block or numbers.tokens_per_id)


def _check_kind(path: Path) -> None:
    """Refuse what is no file; one that is not there is refused by who reads it."""
    if path.is_dir():
        raise ConfigError(f"{path} is a directory", hint="name a file in it")
    if path.exists() and not path.is_file():
        raise ConfigError(
            f"{path} is not a regular file, and a trace is read more than once",
            hint="save it to a file first",
        )


def _as_event_trace(trace: EventTrace, reading: Reading) -> EventTrace:
    if reading.tokens_per_block not in {None, trace.tokens_per_block}:
        raise ConfigError(
            f"{trace.path} is an event log of blocks of {trace.tokens_per_block} tokens",
            hint="leave --tokens-per-block away: its blocks cannot be made anew",
        )
    return trace


def _numbers(path: Path, reading: Reading) -> IdFormat:
    by_name = {each.name: each for each in (MOONCAKE, TIMED)}
    by_tokens = {each.tokens_per_id: each for each in by_name.values()}
    if reading.format in by_name:
        numbers = by_name[reading.format]
    elif reading.tokens_per_id is None:
        numbers = infer_format(path, reading.labels)
    elif reading.tokens_per_id in by_tokens:
        numbers = by_tokens[reading.tokens_per_id]
    elif reading.seconds_per_unit is not None:
        numbers = TIMED
    else:
        raise ConfigError(
            f"--tokens-per-id {reading.tokens_per_id} does not say what the times of {path} are",
            hint="add --format mooncake if they are milliseconds, --format timed if they are seconds, "
            "or --seconds-per-unit",
        )
    return replace(
        numbers,
        labels=reading.labels,
        tokens_per_id=reading.tokens_per_id or numbers.tokens_per_id,
    )
