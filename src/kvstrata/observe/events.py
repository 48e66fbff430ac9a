"""The event log: what engines asked a cache for, and offered it, one JSON object a line.

The first line is a ``LogHeader``, every other one a ``LookupEvent`` or a ``PutEvent``, in the order
in which they happened. Keys are those of the index, so a log says nothing of tokens or texts.
``kvstrata replay`` reads it.
"""

from typing import Annotated, Final

import msgspec

from kvstrata.core.types import BLOCK_KEY_BYTES, NAMESPACE_ID_BYTES

__all__ = [
    "LOG_VERSION",
    "Event",
    "LogHeader",
    "LookupEvent",
    "PutEvent",
    "decode_event",
    "encode_event",
]

LOG_VERSION: Final = 2

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
_Namespace = Annotated[
    str, msgspec.Meta(min_length=2 * NAMESPACE_ID_BYTES, max_length=2 * NAMESPACE_ID_BYTES)
]
_Key = Annotated[str, msgspec.Meta(min_length=2 * BLOCK_KEY_BYTES, max_length=2 * BLOCK_KEY_BYTES)]


class _Line(msgspec.Struct, frozen=True, tag_field="event", forbid_unknown_fields=True):
    """What every line is."""


class LogHeader(_Line, frozen=True, tag="log"):
    """What the blocks of a log are."""

    version: int
    tokens_per_block: _Positive
    block_bytes: _Positive


class LookupEvent(_Line, frozen=True, tag="lookup"):
    """A request asked for ``keys``, which follow each other in its prompt."""

    t: float  # seconds since the epoch
    namespace: _Namespace  # hex
    keys: list[_Key]  # hex
    found_blocks: _Count = 0  # leading ones that the cache had: no put of them follows
    parent: _Key | None = None  # hex; the block before them, if it was known here
    first_block: _Count = 0  # blocks before them in the prompt: those that the device had


class PutEvent(_Line, frozen=True, tag="put"):
    """An engine offered ``keys``, which follow each other in a prompt, for saving.

    Or a tier that nodes share was found to have them, which the lookup before did not know.
    """

    t: float  # seconds since the epoch
    namespace: _Namespace  # hex
    keys: list[_Key]  # hex
    parent: _Key | None = None  # hex; the block before them; None for those that begin a prompt
    first_block: _Count = 0  # blocks before them in the prompt
    prompt_blocks: _Count = 0  # of the whole prompt, as far as that is known


Event = LogHeader | LookupEvent | PutEvent

_decoder: Final[msgspec.json.Decoder[Event]] = msgspec.json.Decoder(Event)
_encoder: Final = msgspec.json.Encoder()


def encode_event(event: Event) -> bytes:
    """One line of a log, its end included."""
    return _encoder.encode(event) + b"\n"


def decode_event(line: bytes) -> Event:
    """The event of *line*; raises ``msgspec.DecodeError``, naming the field, if it is none."""
    return _decoder.decode(line)
