"""Sizes to try: ``host=16GiB..512GiB`` and what becomes of it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from kvstrata.core.errors import ConfigError
from kvstrata.core.units import parse_bytes

__all__ = ["Axis", "Sizes", "parse_axis", "sizes_of"]

_MOST_SIZES: Final = 64
_AXIS: Final = re.compile(r"(host|disk)=(.+?)\.\.(.+?)(?::(\d+))?")
_EXAMPLE: Final = "write for example host=16GiB..512GiB, or host=16GiB..512GiB:9 for nine sizes"


@dataclass(frozen=True, slots=True, order=True)
class Sizes:
    """Bytes of each tier."""

    host_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class Axis:
    """A tier and the sizes it is to be tried with, ascending."""

    tier: str
    sizes_bytes: tuple[int, ...]


def parse_axis(text: str) -> Axis:
    """The sizes of ``TIER=FROM..TO[:COUNT]``, each the same factor from the one before.

    Without a count each is twice the one before, but for the last.

    >>> parse_axis("host=1GiB..4GiB:3").sizes_bytes
    (1073741824, 2147483648, 4294967296)
    """
    match = _AXIS.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--sweep {text}: not TIER=FROM..TO[:COUNT]", hint=_EXAMPLE)
    tier, least, most, count = match.groups()
    first, last = parse_bytes(least), parse_bytes(most)
    if first >= last:
        raise ConfigError(f"--sweep {text}: {least} is not less than {most}", hint=_EXAMPLE)
    if count is None:
        sizes = [
            first << step for step in range((last // first).bit_length()) if first << step < last
        ]
    elif 2 <= int(count) <= _MOST_SIZES:
        factor = (last / first) ** (1 / (int(count) - 1))
        sizes = [round(first * factor**step) for step in range(int(count) - 1)]
    else:
        raise ConfigError(
            f"--sweep {text}: {count} sizes", hint=f"give 2 to {_MOST_SIZES} as the count"
        )
    return Axis(tier, (*sizes, last))


def sizes_of(host_bytes: int, disk_bytes: int, axes: Sequence[Axis]) -> list[Sizes]:
    """Every combination of the sizes of *axes*; a tier without an axis has the size given."""
    if len({axis.tier for axis in axes}) != len(axes):
        raise ConfigError("--sweep names a tier twice", hint=_EXAMPLE)
    tried: dict[str, tuple[int, ...]] = {"host": (host_bytes,), "disk": (disk_bytes,)}
    tried |= {axis.tier: axis.sizes_bytes for axis in axes}
    return [Sizes(host, disk) for disk, host in product(tried["disk"], tried["host"])]
