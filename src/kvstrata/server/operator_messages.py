"""Messages of those who run a cache: `kvstrata stats` and its kin, and the page. See protocol.py."""

from typing import Annotated

import msgspec

from kvstrata.manager.decisions import Decision
from kvstrata.manager.report import ClearReport, RunReport

Text = Annotated[str, msgspec.Meta(max_length=256)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class Explain(msgspec.Struct, tag=True, array_like=True):
    """What was decided lately for *request*."""

    seq: int
    request: Text


class Hottest(msgspec.Struct, tag=True, array_like=True):
    """The runs of blocks that lookups found most often lately, at most so many."""

    seq: int
    runs: Annotated[int, msgspec.Meta(ge=1, le=64)]


class Prompt(msgspec.Struct, tag=True, array_like=True):
    """The keys of the prompt that the block *last* ends."""

    seq: int
    namespace: bytes
    last: bytes


class Locate(msgspec.Struct, tag=True, array_like=True):
    """How many of the leading *keys* there are."""

    seq: int
    namespace: bytes
    keys: bytes


class Pin(msgspec.Struct, tag=True, array_like=True):
    """Keep the leading *keys* that are there from leaving."""

    seq: int
    namespace: bytes
    keys: bytes
    ttl_seconds: _Seconds


class PinRequest(msgspec.Struct, tag=True, array_like=True):
    """Keep the blocks of the prompt of *request* from leaving."""

    seq: int
    request: Text
    ttl_seconds: _Seconds


class Unpin(msgspec.Struct, tag=True, array_like=True):
    seq: int
    number: Count


class Clear(msgspec.Struct, tag=True, array_like=True):
    """Give up the blocks of *namespace* in *tier*; empty stands for all."""

    seq: int
    namespace: bytes
    tier: Text
    dry_run: bool


class Drain(msgspec.Struct, tag=True, array_like=True):
    """Refuse saves and write what no tier below has; not *wanted*: accept them again."""

    seq: int
    wanted: bool


class Explained(msgspec.Struct, tag=True, array_like=True):
    seq: int
    decisions: list[Decision]


class Hot(msgspec.Struct, tag=True, array_like=True):
    """Answers ``Hottest``."""

    seq: int
    runs: list[RunReport]


class PromptKeys(msgspec.Struct, tag=True, array_like=True):
    """Answers ``Prompt``."""

    seq: int
    keys: bytes  # one after another; none if the block is unknown


class Located(msgspec.Struct, tag=True, array_like=True):
    seq: int
    host_blocks: int
    local_blocks: int  # in host memory or on disk


class Pinned(msgspec.Struct, tag=True, array_like=True):
    """Answers ``Pin`` and ``PinRequest``."""

    seq: int
    number: int  # for ``Unpin``; 0 if nothing was pinned
    blocks: int


class Cleared(msgspec.Struct, tag=True, array_like=True):
    seq: int
    report: ClearReport
