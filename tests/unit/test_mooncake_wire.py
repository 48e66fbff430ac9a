"""Frames between the store and the process of the Mooncake library, and batches cut into calls."""

import socket
import struct
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvstrata.storage.remote.mooncake.library import MOST_KEYS, Lane
from kvstrata.storage.remote.mooncake.rounds import rounds
from kvstrata.storage.remote.mooncake.wire import (
    Answer,
    Failed,
    Get,
    Piece,
    Request,
    receive,
    send,
)
from kvstrata.testing.samples import key

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def test_messages_arrive_as_they_were_sent(pair: Pair) -> None:
    request = Get(["a", "b"], [[Piece(0, 1, 2), Piece(1, 2**40, 3)], [Piece(0, 0, 1)]])
    send(pair[0], request, soon())
    send(pair[0], Answer([-704, 1]), soon())
    assert receive(pair[1], Request, soon()) == request
    assert receive(pair[1], Answer | Failed, soon()) == Answer([-704, 1])


def test_the_end_of_the_other_side_is_told(pair: Pair) -> None:
    pair[0].sendall(struct.pack("<I", 100) + b"half")
    pair[0].close()
    with pytest.raises(EOFError):
        receive(pair[1], Answer, soon())


def test_what_does_not_come_is_waited_for_until_the_deadline(pair: Pair) -> None:
    with pytest.raises(TimeoutError):
        receive(pair[1], Answer, soon(0.05))
    with pytest.raises(TimeoutError):
        receive(pair[1], Answer, soon(-1.0))
    send(pair[0], Answer([1]), soon())
    assert receive(pair[1], Answer, soon()) == Answer([1])


def test_a_frame_that_stops_half_way_ends_in_time(pair: Pair) -> None:
    pair[0].sendall(struct.pack("<I", 100) + b"half")
    with pytest.raises(TimeoutError):
        receive(pair[1], Answer, soon(0.05))


def test_nobody_is_made_to_take_a_frame_without_bound(pair: Pair) -> None:
    pair[0].sendall(struct.pack("<I", 2**32 - 1))
    with pytest.raises(EOFError):
        receive(pair[1], Answer, soon())


class Host:
    """The host tier, as the library knows it: where an array is."""

    name = "mooncake://nowhere"

    def __init__(self, array: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> None:
        self._start, self._bytes = int(array.ctypes.data), array.nbytes

    def host_piece(self, address: int, length_bytes: int) -> Piece | None:
        offset = address - self._start
        inside = 0 <= offset <= self._bytes - length_bytes
        return Piece(1, offset, length_bytes) if inside else None


def test_a_batch_is_cut_where_room_keys_or_a_second_of_a_key_demand_it() -> None:
    memory = memoryview(bytearray(64 << 10))
    slots = np.zeros(1 << 20, np.uint8)
    host = Host(slots)
    lane = Lane(host, memory, 0)  # type: ignore[arg-type]  # it needs only a name
    elsewhere = memoryview(bytearray(lane.room.nbytes // 2))
    inside = slots.data[4096:8192]

    def cut(keys: list[bytes], buffers: list[memoryview]) -> list[list[int]]:
        parts = rounds(host, lane, keys, buffers, range(len(keys)))  # type: ignore[arg-type]  # as above
        return [[place.block for place in places] for places in parts]

    assert cut([], []) == []
    assert cut([key(n) for n in range(5)], [elsewhere] * 5) == [[0, 1], [2, 3], [4]]
    assert cut([key(1), key(2), key(1)], [inside] * 3) == [[0, 1], [2]]
    many = MOST_KEYS + 1
    assert [len(p) for p in cut([key(n) for n in range(many)], [inside] * many)] == [MOST_KEYS, 1]
    (places,) = rounds(host, lane, [key(1), key(2)], [inside, elsewhere], [0, 1])  # type: ignore[arg-type]  # as above
    assert places[0].piece == Piece(1, 4096, 4096)
    assert places[0].room is None
    assert places[1].piece.memory == 0
    assert places[1].room is not None
    assert places[1].room.nbytes == elsewhere.nbytes
