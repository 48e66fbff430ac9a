"""The wire protocol: length-prefixed msgpack frames over a unix socket. See docs/wire-protocol.md.

A frame is four bytes of length, little-endian, and that many bytes of one message. Messages are
arrays tagged with their name. A request with a ``seq`` is answered by one message with the same
``seq``; the others are not answered. ``Settled`` and ``Changed`` come unasked.
"""

import struct
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import LimitExceeded, ProtocolError
from kvstrata.core.keys import KeyArray
from kvstrata.core.types import BLOCK_KEY_BYTES, EXACT, NAMESPACE_ID_BYTES, BlockKey, NamespaceId
from kvstrata.manager.report import CacheReport
from kvstrata.manager.tasks import TaskState, TaskStatus
from kvstrata.observe.block_changes import ChangedTier, ChangeKind
from kvstrata.server import operator_messages as o
from kvstrata.server.operator_messages import Count, Text

PROTOCOL_VERSION: Final = 7
MAX_FRAME_BYTES: Final = 8 << 20
MAX_KEYS: Final = 131_072  # in one request
MAX_TASK_IDS: Final = 4096  # in one request
MAX_STATES: Final = 64  # of one prefix
MAX_PARTS_BYTES: Final = 64 << 10  # of a namespace, as text
LENGTH: Final = struct.Struct("<I")

_TaskIds = Annotated[list[int], msgspec.Meta(max_length=MAX_TASK_IDS)]
_Parts = Annotated[dict[str, str], msgspec.Meta(max_length=256)]
_INDEX: Final = "<i"  # formats that struct and numpy read alike
_GENERATION: Final = "<Q"

Explain = o.Explain
Hottest = o.Hottest
Prompt = o.Prompt
Locate = o.Locate
Pin = o.Pin
PinRequest = o.PinRequest
Unpin = o.Unpin
Clear = o.Clear
Drain = o.Drain
Explained = o.Explained
Hot = o.Hot
PromptKeys = o.PromptKeys
Located = o.Located
Pinned = o.Pinned
Cleared = o.Cleared


class Hello(msgspec.Struct, tag=True, array_like=True):
    """First message of a connection.

    *role* is ``engine`` (a scheduler), ``worker`` (maps the host tier) or ``observer``.
    """

    seq: int
    version: int
    role: Text
    session: Text = ""
    block_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)] = 0
    persistent: bool = True  # whether keys mean the same in the next process
    rank: Count = 0
    world_size: Count = 1
    block_format: Text = EXACT
    life: Text = ""  # of a scheduler: the same each time that this process connects
    running: _TaskIds = []  # of its earlier connections: what its workers may still write for


class Mapped(msgspec.Struct, tag=True, array_like=True):
    """A worker has mapped the host tier and can copy from now on."""

    seq: int


class Register(msgspec.Struct, tag=True, array_like=True):
    """*parts* are what the fingerprint *namespace* stands for; ``inspect`` shows them."""

    namespace: bytes
    parts: _Parts


class GetMatch(msgspec.Struct, tag=True, array_like=True):
    seq: int
    namespace: bytes
    keys: bytes  # one after another
    request: Text = ""  # what ``Explain`` will know it by
    states: Annotated[int, msgspec.Meta(ge=0, le=MAX_STATES)] = 0  # recurrent groups of the model


class PutMatch(msgspec.Struct, tag=True, array_like=True):
    seq: int
    namespace: bytes
    keys: bytes
    parent: bytes  # empty before the first block of a prompt
    request: Text = ""
    prompt_blocks: Count = 0  # of the whole prompt; 0: not known


class Launch(msgspec.Struct, tag=True, array_like=True):
    task_ids: _TaskIds


class Complete(msgspec.Struct, tag=True, array_like=True):
    task_ids: _TaskIds


class CompletePart(msgspec.Struct, tag=True, array_like=True):
    """The copies of the task have ended, and only its first *blocks* are whole."""

    task_id: int
    blocks: Count


class Fail(msgspec.Struct, tag=True, array_like=True):
    task_ids: _TaskIds


class Cancel(msgspec.Struct, tag=True, array_like=True):
    task_ids: _TaskIds


class TryWait(msgspec.Struct, tag=True, array_like=True):
    seq: int
    task_ids: _TaskIds


class Prefetch(msgspec.Struct, tag=True, array_like=True):
    seq: int
    namespace: bytes
    keys: bytes


class Reset(msgspec.Struct, tag=True, array_like=True):
    seq: int
    namespace: bytes


class Follow(msgspec.Struct, tag=True, array_like=True):
    """Tell what there is of *namespace* and what happens to it, and of no other from now on."""

    namespace: bytes


class Heard(msgspec.Struct, tag=True, array_like=True):
    """The ``Changed`` before this has been taken in: the next one may come."""


class Stats(msgspec.Struct, tag=True, array_like=True):
    seq: int


class Measured(msgspec.Struct, tag=True, array_like=True):
    """How fast this engine computes prompts."""

    blocks_per_second: Annotated[float, msgspec.Meta(gt=0, le=1e9)]


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
    | CompletePart
    | Fail
    | Cancel
    | TryWait
    | Prefetch
    | Reset
    | Follow
    | Heard
    | Stats
    | Measured
    | Explain
    | Hottest
    | Prompt
    | Locate
    | Pin
    | PinRequest
    | Unpin
    | Clear
    | Drain
    | Workers
    | Ping
)


class Welcome(msgspec.Struct, tag=True, array_like=True):
    """Answers ``Hello``; a worker's comes with the descriptor of the host tier."""

    seq: int
    server_id: bytes
    slots: int
    slot_bytes: int


class Status(msgspec.Struct, array_like=True, frozen=True):
    """``TaskStatus`` with its numbers packed: ``pack`` and ``unpack``."""

    task_id: int
    state: TaskState
    slots: bytes  # int32, little-endian, one after another
    generations: bytes  # uint64
    missing: bytes  # int32
    matched_blocks: int
    disk_blocks: int
    remote_blocks: int
    declined_blocks: int
    untold_blocks: int


class Task(msgspec.Struct, tag=True, array_like=True):
    seq: int
    status: Status


class Tasks(msgspec.Struct, tag=True, array_like=True):
    seq: int
    statuses: list[Status]


class Settled(msgspec.Struct, tag=True, array_like=True):
    """The promotions of a get task of this connection have all ended; never before its ``Task``."""

    status: Status


class BlockChange(msgspec.Struct, array_like=True, frozen=True):
    """A ``Change`` without its namespace."""

    kind: ChangeKind
    tier: ChangedTier
    keys: bytes  # one after another
    parent: bytes  # empty where it is not known, or there is none


class Changed(msgspec.Struct, tag=True, array_like=True):
    """What has happened to blocks of the namespace of ``Follow``, in order."""

    namespace: bytes
    changes: list[BlockChange]


class Number(msgspec.Struct, tag=True, array_like=True):
    """Answers ``Prefetch`` (task id), ``Reset`` (blocks), ``Workers``, ``Unpin`` (1 if there was
    one), ``Mapped``, ``Drain`` and ``Ping`` (0).
    """

    seq: int
    value: int


class Report(msgspec.Struct, tag=True, array_like=True):
    seq: int
    report: CacheReport | None  # None while no engine has told the block size yet


class Refused(msgspec.Struct, tag=True, array_like=True):
    """The request of *seq* was not carried out; ``code`` is that of the error.

    A client that is not even let in is told so with *seq* 0.
    """

    seq: int
    code: str
    message: str
    hint: str | None


Reply = (
    Welcome
    | Task
    | Tasks
    | Settled
    | Changed
    | Number
    | Report
    | Explained
    | Hot
    | PromptKeys
    | Located
    | Pinned
    | Cleared
    | Refused
)

_UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """The frame of *message*; raises ``LimitExceeded`` if it is too long for one."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise LimitExceeded(f"a frame of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
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


def split_keys(keys: bytes) -> KeyArray:
    """The keys that were joined, not copied.

    Raises ``ProtocolError`` if there is a piece left, ``LimitExceeded`` if they are too many.
    """
    if len(keys) % BLOCK_KEY_BYTES:
        raise ProtocolError(f"{len(keys)} bytes are no whole number of keys")
    count = len(keys) // BLOCK_KEY_BYTES
    if count > MAX_KEYS:
        raise LimitExceeded(f"{count} keys in one request exceed {MAX_KEYS}")
    return np.frombuffer(keys, np.uint8).reshape(count, BLOCK_KEY_BYTES)


def join_keys(keys: Sequence[BlockKey] | KeyArray) -> bytes:
    """*keys* as a request has them."""
    return keys.tobytes() if isinstance(keys, np.ndarray) else b"".join(keys)


def pack(status: TaskStatus) -> Status:
    return Status(
        status.task_id,
        status.state,
        _packed(status.slots, _INDEX),
        _packed(status.generations, _GENERATION),
        _packed(status.missing, _INDEX),
        status.matched_blocks,
        status.disk_blocks,
        status.remote_blocks,
        status.declined_blocks,
        status.untold_blocks,
    )


def unpack(status: Status) -> TaskStatus:
    """What ``pack`` was given; raises ``ProtocolError`` if bytes are left over."""
    return TaskStatus(
        status.task_id,
        status.state,
        _unpacked(status.slots, _INDEX),
        _unpacked(status.generations, _GENERATION),
        _unpacked(status.missing, _INDEX),
        status.matched_blocks,
        status.disk_blocks,
        status.remote_blocks,
        status.declined_blocks,
        status.untold_blocks,
    )


def _packed(numbers: Sequence[int] | NDArray[np.integer[Any]], number: str) -> bytes:
    if isinstance(numbers, np.ndarray):
        return numbers.astype(number, copy=False).tobytes()
    return struct.pack(f"<{len(numbers)}{number[1]}", *numbers)  # thrice as fast as by an array


def _unpacked(data: bytes, number: str) -> list[int]:
    if len(data) % struct.calcsize(number):
        raise ProtocolError(f"{len(data)} bytes are no whole number of {number!r}")
    found: list[int] = np.frombuffer(data, number).tolist()
    return found
