"""What a trace says: requests, one after the other, whatever its format."""

import enum
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from kvstrata.replay.hashing import Identities
from kvstrata.replay.lines import OnRead

__all__ = ["NO_PARENT", "Kind", "Request", "Trace"]

NO_PARENT = 0


class Kind(enum.IntEnum):
    """What a request does to the cache."""

    PROMPT = 0  # looks its blocks up, and saves those that were not found
    LOOKUP = 1  # looks up; a put of what the cache of the trace did not find may follow
    PUT = 2  # only saves


class Request(NamedTuple):
    """One prompt of a trace, as far as it fills whole blocks."""

    arrival_seconds: float
    input_tokens: int  # of the whole prompt
    blocks: Identities  # in prompt order
    kind: Kind = Kind.PROMPT
    first_block: int = 0  # blocks of the prompt before ``blocks``
    parent: int = NO_PARENT  # identity of the block before ``blocks``
    found_blocks: int = 0  # of a lookup: leading ones of which no put follows
    prompt_blocks: int = 0  # of a put: those of the whole prompt, if the trace says so
    output_tokens: int = 0  # of the answer, if the trace says so


class Trace(Protocol):
    """A file of requests. Reading it again gives the same ones."""

    @property
    def path(self) -> Path: ...

    @property
    def format(self) -> str:
        """For a reader: mooncake, timed or kvstrata."""
        ...

    @property
    def tokens_per_block(self) -> int: ...

    @property
    def block_bytes(self) -> int | None:
        """None if the trace does not say it."""
        ...

    @property
    def behind_device(self) -> bool:
        """Whether it holds only what a device cache has left over."""
        ...

    def read(self, on_read: OnRead | None = None) -> Iterator[Request]:
        """The requests in order of arrival; ``ConfigError`` at the first line that is wrong."""
        ...
