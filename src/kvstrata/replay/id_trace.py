"""Traces of block ids: Mooncake's open traces, and what vLLM calls a timed trace.

Both are JSON lines with ``timestamp, input_length, output_length, hash_ids``. An id stands for
``tokens_per_id`` tokens *and all before them*; a prompt that ends within a block may have an id for
that part. The part is left out here: a cache holds whole blocks only.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, cast, get_type_hints

import msgspec
import numpy as np

from kvstrata.core.errors import ConfigError
from kvstrata.replay.hashing import chain
from kvstrata.replay.lines import OnRead, bad_line, read_lines
from kvstrata.replay.trace import Request

__all__ = ["FIELDS", "MOONCAKE", "TIMED", "IdFormat", "IdTrace", "infer_format"]

FIELDS: Final = ("timestamp", "input_length", "output_length", "hash_ids")
_MOST_TOKENS: Final = 2**31 - 1
_LINES_TO_INFER: Final = 1000


@dataclass(frozen=True, slots=True)
class IdFormat:
    """How the numbers of a trace are meant."""

    name: str
    tokens_per_id: int
    seconds_per_unit: float  # of ``timestamp``
    labels: Mapping[str, str] = field(default_factory=dict)  # of those of FIELDS named otherwise


MOONCAKE: Final = IdFormat("mooncake", 512, 0.001)
TIMED: Final = IdFormat("timed", 16, 1.0)


class _Row(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=_MOST_TOKENS)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=_MOST_TOKENS)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]]


@dataclass(frozen=True, slots=True)
class IdTrace:
    """A trace of block ids, with *tokens_per_block* a multiple of what an id stands for."""

    path: Path
    numbers: IdFormat
    tokens_per_block: int
    block_bytes: None = None
    behind_device: bool = False

    def __post_init__(self) -> None:
        if self.tokens_per_block % self.numbers.tokens_per_id:
            raise ConfigError(
                f"blocks of {self.tokens_per_block} tokens: an id of {self.path} stands for "
                f"{self.numbers.tokens_per_id} tokens",
                hint="give a multiple of that as --tokens-per-block",
            )

    @property
    def format(self) -> str:
        return self.numbers.name

    def read(self, on_read: OnRead | None = None) -> Iterator[Request]:
        """The requests in order; ``ConfigError`` at the first line that is not as it should be."""
        numbers = self.numbers
        ids_per_block = self.tokens_per_block // numbers.tokens_per_id
        latest = 0.0
        for number, row in _rows(self.path, numbers.labels, on_read):
            whole = row.input_length // numbers.tokens_per_id
            if len(row.hash_ids) - whole not in _tails(row.input_length, numbers.tokens_per_id):
                raise self._wrong_ids(number, row)
            if row.timestamp < latest:
                raise bad_line(
                    self.path,
                    number,
                    f"`{numbers.labels.get('timestamp', 'timestamp')}` is {row.timestamp:g}, "
                    f"less than {latest:g} before",
                    hint="sort the trace by time",
                )
            latest = row.timestamp
            blocks = chain(np.array(row.hash_ids[:whole], np.uint64))
            yield Request(
                row.timestamp * numbers.seconds_per_unit,
                row.input_length,
                blocks[ids_per_block - 1 :: ids_per_block],
                output_tokens=row.output_length,
            )

    def _wrong_ids(self, number: int, row: _Row) -> ConfigError:
        tokens_per_id = self.numbers.tokens_per_id
        label = self.numbers.labels.get("hash_ids", "hash_ids")
        return bad_line(
            self.path,
            number,
            f"`{label}` has {len(row.hash_ids)} ids for {row.input_length} tokens, which are "
            f"{row.input_length / tokens_per_id:.1f} times {tokens_per_id}",
            hint="say with --tokens-per-id how many tokens an id stands for",
        )


def infer_format(path: Path, labels: Mapping[str, str]) -> IdFormat:
    """Mooncake's format or vLLM's, by the number of tokens that an id of *path* stands for.

    Prompts too short to tell are taken for Mooncake's.
    """
    found = None
    for number, row in _rows(path, labels):
        fitting = [
            each
            for each in (MOONCAKE, TIMED)
            if len(row.hash_ids) - row.input_length // each.tokens_per_id
            in _tails(row.input_length, each.tokens_per_id)
        ]
        if not fitting:
            raise bad_line(
                path,
                number,
                f"{len(row.hash_ids)} ids for {row.input_length} tokens: an id stands neither for "
                f"{MOONCAKE.tokens_per_id} nor for {TIMED.tokens_per_id} tokens",
                hint="say with --tokens-per-id how many it stands for",
            )
        found = fitting[0]
        if len(fitting) == 1 or number >= _LINES_TO_INFER:
            break
    if found is None:
        raise ConfigError(f"{path} holds no request", hint="give a trace with at least one line")
    return found


def _tails(input_tokens: int, tokens_per_id: int) -> range:
    """How many ids a prompt may have more than whole blocks: one if it ends within a block."""
    return range(1 + (input_tokens % tokens_per_id > 0))


def _rows(
    path: Path, labels: Mapping[str, str], on_read: OnRead | None = None
) -> Iterator[tuple[int, _Row]]:
    fields = list(get_type_hints(_Row, include_extras=True).items())
    row_type = cast("type[_Row]", msgspec.defstruct("_Row", fields, rename=dict(labels)))
    decoder = msgspec.json.Decoder(row_type)
    for number, line in read_lines(path, on_read):
        try:
            yield number, decoder.decode(line)
        except msgspec.DecodeError as e:
            raise bad_line(path, number, str(e), hint=_remedy(labels)) from e


def _remedy(labels: Mapping[str, str]) -> str:
    names = ", ".join(f"`{labels.get(each, each)}`" for each in FIELDS)
    return f"every line is a JSON object with {names}; --label says how they are called"
