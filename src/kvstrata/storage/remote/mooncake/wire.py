"""What the store and the process that hosts the Mooncake library say to each other.

A frame is its length as u32, little-endian, and one MessagePack message. It goes over socket pairs
that nobody else has: one for the life of the process, and a lane for each call that runs.
"""

import socket
import struct
import time
from typing import Any, Final, NamedTuple

import msgspec

from kvstrata.core.errors import FaultCause

__all__ = [
    "Answer",
    "Drop",
    "Exist",
    "Failed",
    "Get",
    "Head",
    "Joined",
    "Loaded",
    "Orders",
    "Piece",
    "Put",
    "Remove",
    "Request",
    "Setup",
    "Sizes",
    "receive",
    "send",
]

_LENGTH: Final = struct.Struct("<I")
_MOST_BYTES: Final = 16 << 20
_FRAME_SECONDS: Final = 0.5  # from its first byte to its last


class Piece(NamedTuple):
    """Some bytes of shared memory."""

    memory: int  # 0: the buffers of the store, 1: the host tier
    offset: int
    length_bytes: int


class Orders(msgspec.Struct, frozen=True):
    """What the process is started with, as its argument."""

    host: str
    port: int
    master: str
    local_host: str | None
    segment_bytes: int
    protocol: str
    devices: str
    metadata: str
    environment: dict[str, str]
    connect_seconds: float
    memories: list[tuple[int, int]]  # descriptor and bytes, by ``Piece.memory``


class Setup(msgspec.Struct, tag=True, frozen=True):
    """Join the pool."""


class Exist(msgspec.Struct, tag=True, frozen=True):
    keys: list[str]


class Sizes(msgspec.Struct, tag=True, frozen=True):
    """How many bytes each object has."""

    keys: list[str]


class Get(msgspec.Struct, tag=True, frozen=True):
    keys: list[str]  # pairwise different: the library mixes up equal ones
    # Of each exactly as many bytes as it has: to the library more are a failed transfer.
    pieces: list[list[Piece]]


class Put(msgspec.Struct, tag=True, frozen=True):
    keys: list[str]
    pieces: list[list[Piece]]


class Head(msgspec.Struct, tag=True, frozen=True):
    """The beginning of one object."""

    key: str
    piece: Piece


class Remove(msgspec.Struct, tag=True, frozen=True):
    keys: list[str]


class Drop(msgspec.Struct, tag=True, frozen=True):
    """Remove every key that *pattern* matches; the answer is how many."""

    pattern: str


Request = Setup | Exist | Sizes | Get | Put | Head | Remove | Drop


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """The library is loaded; nothing has gone to the network."""


class Joined(msgspec.Struct, tag=True, frozen=True):
    address: str  # of the master, in numbers


class Answer(msgspec.Struct, tag=True, frozen=True):
    codes: list[int]  # as the library returns them, below zero for errors


class Failed(msgspec.Struct, tag=True, frozen=True):
    cause: FaultCause
    message: str


def send(channel: socket.socket, message: msgspec.Struct, deadline: float | None = None) -> None:
    """Raises ``OSError`` if the other end is gone, ``TimeoutError`` at *deadline* (monotonic)."""
    body = msgspec.msgpack.encode(message)
    channel.settimeout(_left(deadline))
    channel.sendall(_LENGTH.pack(len(body)) + body)


def receive(channel: socket.socket, kind: Any, deadline: float | None = None) -> Any:
    """One message of type *kind*.

    Raises ``EOFError`` or ``OSError`` if the other end is gone, ``TimeoutError`` at *deadline*:
    what has come by then is lost, and with it the channel, unless it is nothing.
    """
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size, deadline))
    if length > _MOST_BYTES:
        raise EOFError(f"a message of {length} bytes")
    end = deadline and deadline + _FRAME_SECONDS
    return msgspec.msgpack.decode(_exactly(channel, length, end), type=kind)


def _exactly(channel: socket.socket, length: int, deadline: float | None) -> bytearray:
    data = bytearray(length)
    view, done = memoryview(data), 0
    while done < length:
        channel.settimeout(_left(deadline))
        got = channel.recv_into(view[done:])
        if not got:
            raise EOFError
        done += got
    return data


def _left(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
