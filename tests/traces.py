"""Small traces for the tests of the replay."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvstrata.replay.lines import OnRead
from kvstrata.replay.scan import scan
from kvstrata.replay.spool import Spool
from kvstrata.replay.trace import Kind, Request

ID_BLOCK = 512


def id_line(
    ids: Sequence[int], *, timestamp: float = 0, tail: int = 0, tokens_per_id: int = ID_BLOCK
) -> str:
    """A line of a trace: a prompt of as many whole blocks as there are *ids*, and *tail* tokens."""
    return json.dumps(
        {
            "timestamp": timestamp,
            "input_length": len(ids) * tokens_per_id + tail,
            "output_length": 1,
            "hash_ids": [*ids, 999] if tail else list(ids),
        }
    )


def write_ids(path: Path, prompts: Sequence[Sequence[int]]) -> Path:
    """A trace in Mooncake's format, a request a second."""
    lines = [id_line(ids, timestamp=1000 * second) for second, ids in enumerate(prompts)]
    path.write_text("\n".join(lines) + "\n")
    return path


class ListedTrace:
    """Requests that are at hand."""

    path = Path("listed")
    format = "listed"
    tokens_per_block = 10
    block_bytes = None
    behind_device = False

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests

    def read(self, on_read: OnRead | None = None) -> Iterator[Request]:
        if on_read is not None:
            on_read(1, 1)
        yield from self._requests


def prompt(*blocks: int, at_seconds: float = 0.0, kind: Kind = Kind.PROMPT) -> Request:
    """A request for blocks of 10 tokens with these identities."""
    return Request(at_seconds, len(blocks) * 10 + 1, np.array(blocks, np.uint64), kind)


def spool(
    directory: Path, prompts: Sequence[Sequence[int] | Request], *, device_blocks: int = 0
) -> Spool:
    """A spool of these prompts, a second apart."""
    requests = [
        each if isinstance(each, Request) else prompt(*each, at_seconds=float(second))
        for second, each in enumerate(prompts)
    ]
    directory.mkdir(parents=True, exist_ok=True)
    return scan(ListedTrace(requests), directory, device_blocks=device_blocks)
