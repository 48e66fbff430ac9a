"""Byte sizes as people write them."""

import re
from fractions import Fraction
from typing import Final

from kvstrata.core.errors import ConfigError

__all__ = ["exact_bytes", "human_bytes", "parse_bytes"]

_BINARY: Final = ("KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL: Final = ("KB", "MB", "GB", "TB", "PB")
_FACTORS: Final[dict[str, int]] = (
    {"": 1, "b": 1}
    | {unit.lower(): 1024 ** (i + 1) for i, unit in enumerate(_BINARY)}
    | {unit.lower(): 1000 ** (i + 1) for i, unit in enumerate(_DECIMAL)}
)
_NUMBER: Final = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?)\s*([A-Za-z]*)")
_LARGEST_BYTES: Final = 2**63 - 1
_REMEDY: Final = "write a number and a unit, for example 512MiB, 8GiB or 1.5TiB"


def parse_bytes(value: object) -> int:
    """Return the whole number of bytes that *value* says, more than 0 and less than 2**63.

    A number counts bytes. ``KiB MiB GiB TiB PiB`` are powers of 1024, ``KB MB GB TB PB`` of 1000;
    case and the space before the unit do not matter. Anything else is a ``ConfigError``.

    >>> parse_bytes("8GiB"), parse_bytes("1.5 kb"), parse_bytes(4096)
    (8589934592, 1500, 4096)
    """
    if isinstance(value, str):
        count = _parse_text(value.strip())
    elif isinstance(value, int) and not isinstance(value, bool):
        count = value
    else:
        raise ConfigError(f"{value!r} is not a number of bytes", hint=_REMEDY)
    if not 0 < count <= _LARGEST_BYTES:
        raise ConfigError(f"{value!r} is not between 1 byte and 2**63 - 1 bytes", hint=_REMEDY)
    return count


def _parse_text(text: str) -> int:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a number of bytes", hint=_REMEDY)
    number, unit = match.groups()
    factor = _FACTORS.get(unit.lower())
    if factor is None:
        letter = unit[0].upper()
        hint = (
            f"write {number}{letter}iB (powers of 1024) or {number}{letter}B (powers of 1000)"
            if letter in "KMGTP"
            else _REMEDY
        )
        raise ConfigError(f"{text!r} has an unknown unit {unit!r}", hint=hint)
    return int(Fraction(number) * factor)


def exact_bytes(count: int) -> str:
    """Return the shortest spelling of *count* that ``parse_bytes`` reads back unchanged.

    >>> exact_bytes(8 * 2**30), exact_bytes(1500)
    ('8GiB', '1500B')
    """
    for power in range(len(_BINARY), 0, -1):
        if count and count % 1024**power == 0:
            return f"{count // 1024**power}{_BINARY[power - 1]}"
    return f"{count}B"


def human_bytes(count: int) -> str:
    """Return *count* for a reader, to one decimal.

    >>> human_bytes(25_123_456_789), human_bytes(700)
    ('23.4 GiB', '700 B')
    """
    for power in range(len(_BINARY), 0, -1):
        if count >= 1024**power:
            return f"{count / 1024**power:.1f} {_BINARY[power - 1]}"
    return f"{count} B"
