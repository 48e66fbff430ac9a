"""When a block of host memory is written to a tier below, as people say it."""

import re
from typing import Final, Literal, NamedTuple

from kvstrata.core.errors import ConfigError

__all__ = ["WriteRule", "WriteWhen", "parse_write_rule"]

WriteWhen = Literal["saved", "reused", "evicted"]

_MOST_REUSES: Final = 100
_REUSED: Final = re.compile(r"reused(?::([0-9]{1,9}))?")


class WriteRule(NamedTuple):
    """*reuses* is how often a block is found in host memory before it is written when ``reused``."""

    when: WriteWhen = "saved"
    reuses: int = 1


_FIXED: Final = {"saved": WriteRule("saved"), "evicted": WriteRule("evicted")}


def parse_write_rule(text: str) -> WriteRule:
    """``saved``, ``evicted``, ``reused`` or ``reused:N``; anything else is a ``ConfigError``.

    >>> parse_write_rule("reused:2")
    WriteRule(when='reused', reuses=2)
    """
    if text in _FIXED:
        return _FIXED[text]
    match = _REUSED.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{text!r} does not say when blocks are written",
            hint="write saved, evicted, reused, or reused:2 for what was found twice",
        )
    reuses = int(match[1] or 1)
    if not 1 <= reuses <= _MOST_REUSES:
        raise ConfigError(
            f"{text!r}: {reuses} is not between 1 and {_MOST_REUSES}",
            hint="write how often a block is found before it is written",
        )
    return WriteRule("reused", reuses)
