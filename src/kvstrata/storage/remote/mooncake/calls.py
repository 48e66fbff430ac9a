"""One call of the store: requests to the library with one deadline, and what their codes mean."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from kvstrata.core.errors import FaultCause, TierUnavailable
from kvstrata.core.types import NAMESPACE_ID_BYTES, NamespaceId, StoreKey
from kvstrata.storage.remote.mooncake.codes import MASTER_FAULTS, WRONG_LENGTH, fault_of, has_failed
from kvstrata.storage.remote.mooncake.faults import unavailable
from kvstrata.storage.remote.mooncake.library import MOST_KEYS, Lane
from kvstrata.storage.remote.mooncake.rounds import Place
from kvstrata.storage.remote.mooncake.wire import (
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

    Every method raises ``TierUnavailable`` at *deadline* at the latest, and where the master fails;
    those that move no values also where all keys fail. ``failures`` counts the values that could
    not be moved so far, and ``causes`` says of each why.
    """

    def __init__(self, lane: Lane, deadline: float, *, prefix: str, silence_seconds: float) -> None:
        """*silence_seconds*: what takes that long has waited for a node that says nothing."""
        self.lane = lane
        self._deadline = deadline
        self._prefix = prefix
        self._silence_seconds = silence_seconds
        self._failed: list[int] = []  # codes
        self._moving_seconds = 0.0  # of the longest move that failed

    @property
    def failures(self) -> int:
        return len(self._failed)

    def causes(self) -> list[FaultCause]:
        stalled = self._is_stalled(self._moving_seconds)
        return [fault_of([code], stalled=stalled)[0] for code in self._failed]

    def fault(self) -> TierUnavailable:
        """Why all of them could not be moved."""
        return self._fault(self._failed, self._moving_seconds)

    def exist(self, keys: Sequence[StoreKey]) -> list[bool | None]:
        """Whether each of *keys* is there; None where the library cannot tell."""
        there: list[bool | None] = []
        for part in _parts(keys, _EXIST_KEYS):
            codes = self._call(Exist(self._names(part)))
            there += [None if has_failed(code) else code == 1 for code in codes]
        return there

    def get(self, keys: Sequence[StoreKey], places: Sequence[Place]) -> list[int]:
        """Read values into *places*; of each the bytes it has with its header, or an error.

        Of a value that is longer than its place only the header is read. Values for slots of the
        host tier are taken to fill them: of others the length is asked first.
        """
        started_at = time.monotonic()
        self.lane.clear_headers(len(places))
        names = dict(enumerate(self._names(keys)))
        room = {n: HEADER_BYTES + place.piece.length_bytes for n, place in enumerate(places)}
        whole = {n: room[n] for n, place in enumerate(places) if place.room is None}
        codes = self._get(names, whole, places)
        unsure = [n for n in names if codes.get(n, WRONG_LENGTH[0]) in WRONG_LENGTH]
        if unsure:
            sizes = dict(zip(unsure, self._call(Sizes([names[n] for n in unsure])), strict=True))
            changed = {n: size for n, size in sizes.items() if size != whole.get(n)}
            codes |= changed
            fitting = {n: size for n, size in changed.items() if 0 < size <= room[n]}
            codes |= self._get(names, fitting, places)
            for n, size in changed.items():
                if size > room[n]:
                    (code,) = self._call(Head(names[n], self.lane.header_pieces[n]))
                    codes[n] = min(code, 0) or size
        return self._moved([codes[n] for n in names], started_at)

    def put(self, keys: Sequence[StoreKey], places: Sequence[Place]) -> list[int]:
        """Store values that are in *places*, with headers in the lane. Zero: it is there now.

        A key that is there, or is just being written by somebody, keeps its value.
        """
        started_at = time.monotonic()
        request = Put(self._names(keys), self._pieces(places))
        return self._moved(self.lane.call(request, self._deadline), started_at)

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

    def _get(
        self, names: Mapping[int, str], sizes: Mapping[int, int], places: Sequence[Place]
    ) -> dict[int, int]:
        """The library's answers for values of known *sizes*, header included, by number."""
        if not sizes:
            return {}
        pieces = [self._exactly(size, n, places[n]) for n, size in sizes.items()]
        codes = self.lane.call(Get([names[n] for n in sizes], pieces), self._deadline)
        return dict(zip(sizes, codes, strict=True))

    def _call(self, request: Request) -> list[int]:
        codes = self.lane.call(request, self._deadline)
        if codes and all(map(has_failed, codes)):
            raise self._fault(codes, 0.0)
        return codes

    def _moved(self, codes: list[int], started_at: float) -> list[int]:
        failed = list(filter(has_failed, codes))
        if failed:
            self._failed += failed
            self._moving_seconds = max(self._moving_seconds, time.monotonic() - started_at)
        if not MASTER_FAULTS.isdisjoint(failed):
            raise self.fault()
        return codes

    def _fault(self, codes: Sequence[int], seconds: float) -> TierUnavailable:
        cause, reason = fault_of(codes, stalled=self._is_stalled(seconds))
        return unavailable(self.lane.name, reason, cause)

    def _is_stalled(self, seconds: float) -> bool:
        return seconds >= self._silence_seconds

    def _names(self, keys: Sequence[StoreKey]) -> list[str]:
        """Of objects: prefix, namespace and block key, so that a namespace can be found."""
        return [
            f"{self._prefix}/{key[:NAMESPACE_ID_BYTES].hex()}/{key[NAMESPACE_ID_BYTES:].hex()}"
            for key in keys
        ]

    def _exactly(self, size: int, number: int, place: Place) -> list[Piece]:
        """Where *size* bytes go, header first."""
        header, value_bytes = self.lane.header_pieces[number], size - HEADER_BYTES
        if value_bytes <= 0:
            return [header._replace(length_bytes=size)]
        if value_bytes == place.piece.length_bytes:
            return [header, place.piece]
        return [header, place.piece._replace(length_bytes=value_bytes)]

    def _pieces(self, places: Sequence[Place]) -> list[list[Piece]]:
        headers = self.lane.header_pieces
        return [[headers[number], place.piece] for number, place in enumerate(places)]


def _parts(keys: Sequence[StoreKey], most: int) -> Iterator[Sequence[StoreKey]]:
    for start in range(0, len(keys), most):
        yield keys[start : start + most]
