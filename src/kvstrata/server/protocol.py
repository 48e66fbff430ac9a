"""The wire protocol: length-prefixed msgpack frames over a unix socket. See docs/wire-protocol.md.

A frame is four bytes of length, little-endian, and that many bytes of one message. Messages are
arrays tagged with their name. A request with a ``seq`` is answered by one message with the same
``seq``; the others are not answered. ``Settled`` comes unasked.
"""

import struct
from typing import Final

import msgspec

from kvstrata.core.errors import ProtocolError
from kvstrata.core.types import BLOCK_KEY_BYTES, EXACT, NAMESPACE_ID_BYTES, BlockKey, NamespaceId
from kvstrata.manager.report import CacheReport
from kvstrata.manager.tasks import TaskStatus

PROTOCOL_VERSION: Final = 1
MAX_FRAME_BYTES: Final = 16 << 20
LENGTH: Final = struct.Struct("<I")


class Hello(msgspec.Struct, tag=True, array_like=True):
    """First message of a connection.

    *role* is ``engine`` (a scheduler), ``worker`` (maps the host tier) or ``observer``.
    """

    seq: int
    version: int
    role: str
    session: str = ""
    block_bytes: int = 0
    persistent: bool = True  # whether keys mean the same in the next process
    rank: int = 0
    world_size: int = 1
    block_format: str = EXACT


class Mapped(msgspec.Struct, tag=True, array_like=True):
    """A worker has mapped the host tier and can copy from now on."""

    seq: int


class Register(msgspec.Struct, tag=True, array_like=True):
    """*parts* are what the fingerprint *namespace* stands for; ``inspect`` shows them."""

    namespace: bytes
    parts: dict[str, str]


class GetMatch(msgspec.Struct, tag=True, array_like=True):
    seq: int
    namespace: bytes
    keys: bytes  # one after another


class PutMatch(msgspec.Struct, tag=True, array_like=True):
    seq: int
    namespace: bytes
    keys: bytes
    parent: bytes  # empty before the first block of a prompt


class Launch(msgspec.Struct, tag=True, array_like=True):
    task_ids: list[int]


class Complete(msgspec.Struct, tag=True, array_like=True):
    task_ids: list[int]


class Fail(msgspec.Struct, tag=True, array_like=True):
    task_ids: list[int]


class Cancel(msgspec.Struct, tag=True, array_like=True):
    task_ids: list[int]


class TryWait(msgspec.Struct, tag=True, array_like=True):
    seq: int
    task_ids: list[int]


class Prefetch(msgspec.Struct, tag=True, array_like=True):
    seq: int
    namespace: bytes
    keys: bytes


class Reset(msgspec.Struct, tag=True, array_like=True):
    seq: int
    namespace: bytes


class Stats(msgspec.Struct, tag=True, array_like=True):
    seq: int


class Workers(msgspec.Struct, tag=True, array_like=True):
    """How many workers of this engine have mapped the host tier."""

    seq: int


class Ping(msgspec.Struct, tag=True, array_like=True):
    seq: int


Request = (
    Hello
    | Mapped
    | Register
    | GetMatch
    | PutMatch
    | Launch
    | Complete
    | Fail
    | Cancel
    | TryWait
    | Prefetch
    | Reset
    | Stats
    | Workers
    | Ping
)


class Welcome(msgspec.Struct, tag=True, array_like=True):
    """Answers ``Hello``; a worker's comes with the descriptor of the host tier."""

    seq: int
    server_id: bytes
    slots: int
    slot_bytes: int


class Task(msgspec.Struct, tag=True, array_like=True):
    seq: int
    status: TaskStatus


class Tasks(msgspec.Struct, tag=True, array_like=True):
    seq: int
    statuses: list[TaskStatus]


class Settled(msgspec.Struct, tag=True, array_like=True):
    """The promotions of a get task of this connection have all ended."""

    status: TaskStatus


class Number(msgspec.Struct, tag=True, array_like=True):
    """Answers ``Prefetch`` (task id), ``Reset`` (blocks), ``Workers``, ``Mapped`` and ``Ping`` (0)."""

    seq: int
    value: int


class Report(msgspec.Struct, tag=True, array_like=True):
    seq: int
    report: CacheReport | None  # None while no engine has told the block size yet


class Refused(msgspec.Struct, tag=True, array_like=True):
    """The request of *seq* was not carried out; ``code`` is that of the error."""

    seq: int
    code: str
    message: str
    hint: str | None


Reply = Welcome | Task | Tasks | Settled | Number | Report | Refused

_UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """The frame of *message*; raises ``ProtocolError`` if it is over the limit."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(body)) + body


def decode_request(body: bytes | memoryview) -> Request:
    try:
        return _requests.decode(body)
    except _UNDECODABLE as e:
        raise ProtocolError(f"not a request: {e}") from e


def decode_reply(body: bytes | memoryview) -> Reply:
    try:
        return _replies.decode(body)
    except _UNDECODABLE as e:
        raise ProtocolError(f"not a reply: {e}") from e


def frame_length(header: bytes | bytearray | memoryview) -> int:
    """Bytes of the body that follows *header*; raises ``ProtocolError`` over the limit."""
    length: int = LENGTH.unpack(header)[0]
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
    return length


def checked_namespace(namespace: bytes) -> NamespaceId:
    if len(namespace) != NAMESPACE_ID_BYTES:
        raise ProtocolError(f"a namespace of {len(namespace)} bytes")
    return namespace


def checked_parent(parent: bytes) -> BlockKey | None:
    if len(parent) not in {0, BLOCK_KEY_BYTES}:
        raise ProtocolError(f"a parent of {len(parent)} bytes")
    return parent or None


def split_keys(keys: bytes) -> list[BlockKey]:
    """The keys that were joined; raises ``ProtocolError`` if there is a piece left."""
    if len(keys) % BLOCK_KEY_BYTES:
        raise ProtocolError(f"{len(keys)} bytes are no whole number of keys")
    return [keys[i : i + BLOCK_KEY_BYTES] for i in range(0, len(keys), BLOCK_KEY_BYTES)]
