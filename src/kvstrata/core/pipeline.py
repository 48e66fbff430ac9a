"""The pipeline string: ``host:8GiB | disk:/nvme0/kv,/nvme1/kv:2TiB | s3://bucket/prefix``.

A parsed tier is the same mapping that the ``tiers`` list of a file holds, so both spellings meet
the same model. Faults point at the character where reading stopped.
"""

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import PurePath
from typing import Final, Literal, NamedTuple, TypeVar
from urllib.parse import quote, unquote

from kvstrata.core.errors import ConfigError
from kvstrata.core.units import exact_bytes, parse_bytes

__all__ = [
    "OrderFault",
    "depth_of",
    "directory_segment",
    "host_segment",
    "order_fault",
    "parse_pipeline",
    "redact",
    "tier_kind",
    "url_scheme",
    "url_segment",
]

Kind = Literal["host", "disk", "shared", "objects", "valkey", "mooncake"]
T = TypeVar("T")

EXAMPLE: Final = "host:8GiB | disk:/var/cache/kv:200GiB"

_KINDS: Final[dict[str, Kind]] = {
    "host": "host",
    "cache": "host",
    "disk": "disk",
    "posix": "disk",
    "shared": "shared",
    "objects": "objects",
    "s3": "objects",
    "gs": "objects",
    "az": "objects",
    "valkey": "valkey",
    "valkeys": "valkey",
    "redis": "valkey",
    "rediss": "valkey",
    "unix": "valkey",
    "mooncake": "mooncake",
}
_DEPTHS: Final[dict[str, int]] = {
    "host": 0,
    "disk": 1,
}  # all others are below, and exclude each other
_LOWEST: Final = 2
_EXAMPLES: Final = {
    "objects": "s3://bucket/prefix",
    "valkey": "valkey://cache:6379",
    "mooncake": "mooncake://master:50051",
}
_WORD: Final = re.compile(r"[A-Za-z][A-Za-z0-9_+.-]*")
# Up to the last @ of all: what is between may hold anything if somebody has not encoded it.
_USERINFO: Final = re.compile(
    r"((?:valkeys?|rediss?|unix|mooncake|s3|gs|az):/{0,2}|://).*@", re.DOTALL | re.IGNORECASE
)
_QUERY: Final = re.compile(r"(://[^|\s?]*\?)[^|\s]+")


class _Segment(NamedTuple):
    """What stands between two bars, without the blanks around it."""

    start: int  # index of its first character in the pipeline string
    text: str


class OrderFault(NamedTuple):
    """Why a list of tiers cannot work, and which tier is to blame."""

    position: int  # in the list of tiers
    message: str
    hint: str


def parse_pipeline(text: str) -> list[dict[str, object]]:
    """Return one mapping per tier of the pipeline string *text*, in order.

    Raises:
        ConfigError: with the string and a caret under the character that is wrong.
    """
    segments = _segments(text)
    tiers = [_parse_segment(text, segment) for segment in segments]
    fault = order_fault([str(tier["kind"]) for tier in tiers])
    if fault is not None:
        raise _error(text, segments[fault.position].start, fault.message, fault.hint)
    return tiers


def tier_kind(word: str) -> Kind:
    """Return the kind of tier that *word* names; ``Cache`` and ``Posix`` are UCM's words."""
    kind = _KINDS.get(word.lower())
    if kind is not None:
        return kind
    close = get_close_matches(word.lower(), _KINDS, n=1, cutoff=0.6)
    known = (
        "a tier is 'host', 'disk', 'shared' or an address that begins with s3://, gs://, az://, "
        "valkey://, rediss://, unix:// or mooncake://"
    )
    hint = f"did you mean {close[0]!r}?" if close else known
    raise ConfigError(f"unknown tier {word!r}", hint=hint)


def depth_of(kind: str) -> int:
    """How far below the top a tier of *kind* stands."""
    return _DEPTHS.get(kind, _LOWEST)


def order_fault(kinds: Sequence[str]) -> OrderFault | None:
    """Return what is wrong with the number and order of tiers, or None.

    A cache has exactly one host tier, first, then at most one disk tier, then at most one that it
    shares with other nodes.
    """
    if not kinds:
        return OrderFault(0, "there is no tier", "give at least a host tier: 'host:auto'")
    if "host" not in kinds:
        return OrderFault(
            0,
            f"{_a(kinds[0])} tier needs a host tier before it: blocks go there through host memory",
            f"put a host tier first, for example 'host:auto | {kinds[0]}:…'",
        )
    depths = [depth_of(kind) for kind in kinds]
    for index, kind in enumerate(kinds):
        if kind in kinds[:index]:
            return OrderFault(index, f"a second {kind} tier", f"give one {kind} tier with it all")
        if depths[index] == _LOWEST and _LOWEST in depths[:index]:
            message = f"{_a(kind)} tier besides the {kinds[depths.index(_LOWEST)]} tier"
            return OrderFault(index, message, "share blocks through one of them")
    for index, (above, below) in enumerate(pairwise(kinds)):
        if depths[index] > depths[index + 1]:
            message = f"the {below} tier comes before the {above} tier"
            return OrderFault(index, message, "swap the two tiers")
    return None


def _a(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def host_segment(capacity: int | Literal["auto"]) -> str:
    """Return the spelling of a host tier in a pipeline string."""
    return f"host:{capacity if capacity == 'auto' else exact_bytes(capacity)}"


def directory_segment(
    kind: Literal["disk", "shared"], paths: Sequence[PurePath], capacity: int
) -> str:
    """Return the spelling of a tier in directories.

    A path that the string cannot hold is a ConfigError.
    """
    spelled = [str(path) for path in paths]
    for path in spelled:
        if "|" in path or "," in path or path != path.strip():
            raise ConfigError(
                f"the path {path!r} cannot be written in a pipeline string",
                hint="give the tiers as a list of mappings",
            )
    return f"{kind}:{','.join(spelled)}:{exact_bytes(capacity)}"


def url_segment(url: str, settings: dict[str, object]) -> str:
    """Return the spelling of a tier at an address: its other settings are the query."""
    pairs = [f"{name}={quote(_spelled(value), safe='/:,')}" for name, value in settings.items()]
    return f"{url}?{'&'.join(pairs)}" if pairs else url


def url_scheme(url: str) -> str | None:
    """Return what stands before ``://`` in *url*, if that is a word and something follows."""
    match = _WORD.match(url)
    rest = url[match.end() :] if match else ""
    is_address = rest.startswith("://") and len(rest) > 3 and not re.search(r"[\s|?#]", rest)
    return match[0] if match and is_address else None


def redact(text: str) -> str:
    """Return *text* without the user, password and query of any address in it.

    >>> redact("host | valkey://me:secret@cache:6379?token=x")
    'host | valkey://***@cache:6379?***'
    """
    return _QUERY.sub(r"\1***", _USERINFO.sub(r"\1***@", text))


def _segments(text: str) -> list[_Segment]:
    segments: list[_Segment] = []
    start = 0
    for piece in text.split("|"):
        stripped = piece.strip()
        position = start + len(piece) - len(piece.lstrip())
        if not stripped:
            raise _error(text, position, "a tier is missing here", f"for example {EXAMPLE!r}")
        segments.append(_Segment(position, stripped))
        start += len(piece) + 1
    return segments


def _parse_segment(text: str, segment: _Segment) -> dict[str, object]:
    match = _WORD.match(segment.text)
    if match is None:
        message = "a tier starts with 'host', 'disk', 'shared' or the scheme of an address"
        raise _error(text, segment.start, message, None)
    word = match[0]
    kind = _locate(text, segment.start, tier_kind, word)
    colon = segment.start + len(word)
    rest = segment.text[len(word) :]
    if rest and not rest.lstrip().startswith(":"):
        raise _error(text, colon, f"expected ':' or '|' after {word!r}", None)
    arguments = rest.lstrip()[1:]
    start = segment.start + len(segment.text) - len(arguments)
    if kind == "host":
        return _parse_host(text, start, arguments)
    if kind == "disk" or kind == "shared":  # noqa: PLR1714 - mypy narrows no set
        return _parse_directories(text, start, kind, arguments)
    return _parse_url(text, segment, kind)


def _parse_host(text: str, start: int, arguments: str) -> dict[str, object]:
    spelled = arguments.strip()
    if spelled.lower() in {"", "auto"}:
        return {"kind": "host", "capacity": "auto"}
    position = start + len(arguments) - len(arguments.lstrip())
    return {"kind": "host", "capacity": _locate(text, position, parse_bytes, spelled)}


def _parse_url(text: str, segment: _Segment, kind: Kind) -> dict[str, object]:
    url, _, query = segment.text.partition("?")
    if url_scheme(url) is None:
        message = f"{_a(kind)} tier needs an address"
        raise _error(text, segment.start, message, f"for example {_EXAMPLES[kind]}")
    tier: dict[str, object] = {"kind": kind, "url": url}
    position = segment.start + len(url) + 1
    for pair in query.split("&") if query else []:
        name, equals, value = pair.partition("=")
        if not equals or not name or name in tier:
            message = "expected NAME=VALUE, each name once, with '&' between"
            raise _error(text, position, message, "for example s3://bucket/a?timeout_seconds=1")
        tier[name] = unquote(value)
        position += len(pair) + 1
    return tier


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parse_directories(
    text: str, start: int, kind: Literal["disk", "shared"], arguments: str
) -> dict[str, object]:
    listed, colon, capacity = arguments.rpartition(":")
    example = f"for example {kind}:/var/cache/kv:200GiB"
    if not colon or not capacity.strip() or not listed.strip():
        missing = "a capacity after its path" if arguments.strip() else "an absolute path"
        raise _error(text, start + len(arguments), f"a {kind} tier needs {missing}", example)
    paths = []
    position = start
    for piece in listed.split(","):
        path = piece.strip()
        if not path.startswith("/"):
            position += len(piece) - len(piece.lstrip())
            raise _error(text, position, f"a {kind} tier needs absolute paths", example)
        paths.append(path)
        position += len(piece) + 1
    size_start = start + len(arguments) - len(capacity.lstrip())
    count = _locate(text, size_start, parse_bytes, capacity.strip())
    if kind == "disk":
        return {"kind": kind, "paths": paths, "capacity": count}
    if len(paths) > 1:
        comma = start + listed.index(",")
        message = "a shared tier has one directory"
        raise _error(text, comma, message, "mount one file system that all nodes see")
    return {"kind": kind, "path": paths[0], "capacity": count}


def _locate(text: str, position: int, parse: Callable[[str], T], word: str) -> T:
    try:
        return parse(word)
    except ConfigError as e:
        raise _error(text, position, str(e.args[0]), e.hint) from None


def _error(text: str, position: int, message: str, hint: str | None) -> ConfigError:
    shown = re.sub(r"\s", " ", redact(text))
    caret = " " * len(redact(text[:position])) + "^"
    return ConfigError(f"{message}\n  {shown}\n  {caret}", hint=hint)
