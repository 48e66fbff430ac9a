"""Batches cut into calls of the Mooncake library."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from kvstrata.core.types import StoreKey
from kvstrata.storage.remote.mooncake.library import MOST_KEYS, Lane, MooncakeLibrary
from kvstrata.storage.remote.mooncake.wire import Piece

__all__ = ["Place", "rounds"]

_ALIGNMENT: Final = 64


class Place(NamedTuple):
    """Where the library finds or puts the value of one block."""

    block: int  # its index in the batch
    piece: Piece  # as long as the buffer
    room: memoryview | None  # of the lane, that *piece* is of; None: the caller's own slot


def rounds(
    library: MooncakeLibrary,
    lane: Lane,
    keys: Sequence[StoreKey],
    buffers: Sequence[memoryview],
    indexes: Iterable[int],
) -> Iterator[list[Place]]:
    """Places for the blocks *indexes*, in order, as many at a time as one call can take.

    No round has a key twice. Rooms are used again by the next round. A buffer in the host tier
    is its own place; any other one fits into the room of a lane.
    """
    places: list[Place] = []
    taken: set[StoreKey] = set()
    used_bytes = 0
    for index in indexes:
        length = buffers[index].nbytes
        piece = library.host_piece(_address(buffers[index]), length)
        need_bytes = 0 if piece else -(-length // _ALIGNMENT) * _ALIGNMENT
        if (
            len(places) == MOST_KEYS
            or keys[index] in taken
            or (places and used_bytes + need_bytes > lane.room.nbytes)
        ):
            yield places
            places, taken, used_bytes = [], set(), 0
        taken.add(keys[index])
        if piece:
            places.append(Place(index, piece, None))
        else:
            room = lane.room[used_bytes : used_bytes + length]
            places.append(Place(index, lane.room_piece(used_bytes, length), room))
            used_bytes += need_bytes
    if places:
        yield places


def _address(buffer: memoryview) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address
