"""One call of the store: requests to the library with one deadline, and what their codes mean."""

import time
from collections.abc import Iterator, Sequence
from typing import Final

from kvstrata.core.errors import TierUnavailable
from kvstrata.core.types import NAMESPACE_ID_BYTES, NamespaceId, StoreKey
from kvstrata.storage.remote.mooncake_codes import fault_of, has_failed
from kvstrata.storage.remote.mooncake_library import MOST_KEYS, Lane
from kvstrata.storage.remote.mooncake_rounds import Place
from kvstrata.storage.remote.mooncake_wire import (
    Drop,
    Exist,
    Get,
    Head,
    Piece,
    Put,
    Remove,
    Request,
    Sizes,
)
from kvstrata.storage.remote.value import HEADER_BYTES

__all__ = ["Calls"]

_EXIST_KEYS: Final = 4096


class Calls:
    """On a lane that is the caller's.

    Every method raises ``TierUnavailable`` at *deadline* at the latest, and where all keys fail.
    """

    def __init__(self, lane: Lane, deadline: float, *, prefix: str, silence_seconds: float) -> None:
        """*silence_seconds*: what takes that long has waited for a node that says nothing."""
        self.lane = lane
        self._deadline = deadline
        self._prefix = prefix
        self._silence_seconds = silence_seconds

    def exist(self, keys: Sequence[StoreKey]) -> set[StoreKey]:
        """Those of *keys* that are there."""
        there: set[StoreKey] = set()
        for part in _parts(keys, _EXIST_KEYS):
            codes = self._call(Exist(self._names(part)))
            there.update(key for key, code in zip(part, codes, strict=True) if code == 1)
        return there

    def get(self, keys: Sequence[StoreKey], places: Sequence[Place]) -> list[int]:
        """Read values into *places*; of each the bytes it has with its header, or an error.

        Of a value that is longer than its place only the header is read.
        """
        names = self._names(keys)
        codes = self._call(Sizes(names))
        self.lane.clear_headers(len(places))
        wanted = [
            number
            for number, (place, size) in enumerate(zip(places, codes, strict=True))
            if 0 < size <= HEADER_BYTES + place.piece.length_bytes
        ]
        pieces = [self._exactly(codes[number], number, places[number]) for number in wanted]
        got = self._call(Get([names[number] for number in wanted], pieces)) if wanted else []
        for number, code in zip(wanted, got, strict=True):
            codes[number] = code
        for number, size in enumerate(codes):
            if size > HEADER_BYTES + places[number].piece.length_bytes:
                (code,) = self._call(Head(names[number], self.lane.header_piece(number)))
                codes[number] = min(code, 0) or size
        return codes

    def put(self, keys: Sequence[StoreKey], places: Sequence[Place]) -> list[int]:
        """Store values that are in *places*, with headers in the lane. Zero: it is under way.

        A key that is there, or is just being written by somebody, is left alone, and zero too.
        """
        return self._call(Put(self._names(keys), self._pieces(places)))

    def remove(self, keys: Sequence[StoreKey]) -> set[StoreKey]:
        """Those of *keys*, which are pairwise different, that were there."""
        gone: set[StoreKey] = set()
        for part in _parts(keys, MOST_KEYS):
            codes = self._call(Remove(self._names(part)))
            stuck = list(filter(has_failed, codes))
            if stuck:
                raise self._fault(stuck, 0.0)
            gone.update(key for key, code in zip(part, codes, strict=True) if code == 0)
        return gone

    def drop(self, namespace_id: NamespaceId) -> int:
        """Remove every key of a namespace; how many there were."""
        prefix = self._prefix.replace(".", "[.]")
        (code,) = self._call(Drop(f"^{prefix}/{namespace_id.hex()}/"))
        return code

    def _call(self, request: Request) -> list[int]:
        started_at = time.monotonic()
        codes = self.lane.call(request, self._deadline)
        if codes and all(map(has_failed, codes)):
            raise self._fault(codes, time.monotonic() - started_at)
        return codes

    def _fault(self, codes: Sequence[int], seconds: float) -> TierUnavailable:
        cause, reason = fault_of(codes, stalled=seconds >= self._silence_seconds)
        return TierUnavailable(f"{self.lane.name}: {reason}", cause=cause)

    def _names(self, keys: Sequence[StoreKey]) -> list[str]:
        """Of objects: prefix, namespace and block key, so that a namespace can be found."""
        return [
            f"{self._prefix}/{key[:NAMESPACE_ID_BYTES].hex()}/{key[NAMESPACE_ID_BYTES:].hex()}"
            for key in keys
        ]

    def _exactly(self, size: int, number: int, place: Place) -> list[Piece]:
        """Where *size* bytes go, header first."""
        header = self.lane.header_piece(number)
        if size <= HEADER_BYTES:
            return [header._replace(length_bytes=size)]
        return [header, place.piece._replace(length_bytes=size - HEADER_BYTES)]

    def _pieces(self, places: Sequence[Place]) -> list[list[Piece]]:
        headers = map(self.lane.header_piece, range(len(places)))
        return [[header, place.piece] for header, place in zip(headers, places, strict=True)]


def _parts(keys: Sequence[StoreKey], most: int) -> Iterator[Sequence[StoreKey]]:
    for start in range(0, len(keys), most):
        yield keys[start : start + most]
