"""A trace in compact form on the disk, so that it is parsed once and replayed many times.

Two files: a record for each request, and eight bytes for each block. Whatever the length of the
trace, reading it takes memory for a piece of it only.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvstrata.replay.hashing import Identities
from kvstrata.replay.trace import Kind, Request

__all__ = ["Numbers", "Spool", "SpoolWriter", "Spooled"]

_RECORD: Final = np.dtype(
    [
        ("arrival_seconds", "<f8"),
        ("parent", "<u8"),
        ("input_tokens", "<u8"),
        ("blocks", "<u4"),
        ("device_blocks", "<u4"),
        ("first_block", "<u4"),
        ("found_blocks", "<u4"),
        ("prompt_blocks", "<u4"),
        ("kind", "u1"),
    ]
)
_RECORDS_A_PIECE: Final = 256
_NUMBERS_A_PIECE: Final = 1 << 16
_STARTS_A_PIECE: Final = 1 << 14


class Spooled(NamedTuple):
    """A request and what the device cache has of it."""

    request: Request
    device_blocks: int  # leading blocks that the device has, for which we are not asked


@dataclass(frozen=True, slots=True)
class Spool:
    """A trace in a directory, and what is known of it as a whole."""

    directory: Path
    tokens_per_block: int
    events: int = 0  # requests, and puts of a trace that has them apart
    requests: int = 0  # those that look something up
    blocks: int = 0  # of all events
    lookup_blocks: int = 0  # looked up, whether the device has them or not
    device_blocks: int = 0  # of those, found on the device
    input_tokens: int = 0
    began_seconds: float = 0.0
    ended_seconds: float = 0.0

    @property
    def records(self) -> Path:
        return self.directory / "requests"

    @property
    def identities(self) -> Path:
        return self.directory / "blocks"

    @property
    def span_seconds(self) -> float:
        return self.ended_seconds - self.began_seconds

    def __iter__(self) -> Iterator[Spooled]:
        """Every event, in the order of the trace."""
        with self.records.open("rb") as records, self.identities.open("rb") as identities:
            while len(piece := np.fromfile(records, _RECORD, _RECORDS_A_PIECE)):
                blocks = np.fromfile(identities, np.uint64, int(piece["blocks"].sum()))
                yield from _unpack(piece, blocks)

    def starts(self) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Of each event the blocks of all events before it, and its ``first_block``."""
        pieces = []
        with self.records.open("rb") as records:
            while len(piece := np.fromfile(records, _RECORD, _STARTS_A_PIECE)):
                pieces.append(piece[["blocks", "first_block"]].copy())
        counts = np.concatenate([piece["blocks"] for piece in pieces], dtype=np.int64)
        return np.cumsum(counts) - counts, np.concatenate([p["first_block"] for p in pieces])


def _unpack(piece: NDArray[Any], blocks: Identities) -> Iterator[Spooled]:
    start = 0
    for arrival, parent, tokens, count, device, first, found, whole, kind in piece.tolist():
        end = start + count
        here = blocks[start:end]
        request = Request(
            arrival,
            tokens,
            here,
            Kind(kind),
            first_block=first,
            parent=parent,
            found_blocks=found,
            prompt_blocks=whole,
        )
        yield Spooled(request, device)
        start = end


class SpoolWriter:
    """Writes a spool into an empty *directory*; ``finish`` gives it, once all is added."""

    def __init__(self, directory: Path, tokens_per_block: int) -> None:
        self._spool = Spool(directory, tokens_per_block)
        self._records: BinaryIO = self._spool.records.open("wb")
        self._identities: BinaryIO = self._spool.identities.open("wb")
        self._waiting: list[tuple[float, int, int, int, int, int, int, int, int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._records.close()
        self._identities.close()

    def add(self, request: Request, device_blocks: int) -> None:
        self._waiting.append(
            (
                request.arrival_seconds,
                request.parent,
                request.input_tokens,
                len(request.blocks),
                device_blocks,
                request.first_block,
                request.found_blocks,
                request.prompt_blocks,
                request.kind,
            )
        )
        self._identities.write(request.blocks.tobytes())
        if len(self._waiting) == _RECORDS_A_PIECE:
            self._flush()

    def finish(self) -> Spool:
        """The spool; nothing can be added any more."""
        self._flush()
        self._records.close()
        self._identities.close()
        return self._spool

    def _flush(self) -> None:
        if not self._waiting:
            return
        piece = np.array(self._waiting, _RECORD)
        self._records.write(piece.tobytes())
        self._waiting.clear()
        lookups = piece[piece["kind"] != Kind.PUT]
        arrivals = piece["arrival_seconds"]
        spool = self._spool
        self._spool = replace(
            spool,
            events=spool.events + len(piece),
            requests=spool.requests + len(lookups),
            blocks=spool.blocks + int(piece["blocks"].sum()),
            lookup_blocks=spool.lookup_blocks + int(lookups["blocks"].sum()),
            device_blocks=spool.device_blocks + int(lookups["device_blocks"].sum()),
            input_tokens=spool.input_tokens + int(lookups["input_tokens"].sum()),
            began_seconds=spool.began_seconds if spool.events else float(arrivals[0]),
            ended_seconds=float(arrivals[-1]),
        )


class Numbers:
    """Reads the numbers of a file one after the other."""

    def __init__(self, path: Path, dtype: type[np.generic]) -> None:
        self._file = path.open("rb")
        self._dtype = dtype
        self._ahead: NDArray[Any] = np.empty(0, dtype)

    def take(self, count: int) -> NDArray[Any]:
        """The next *count* numbers; fewer at the end of the file."""
        if count > len(self._ahead):
            more = np.fromfile(self._file, self._dtype, max(count, _NUMBERS_A_PIECE))
            self._ahead = np.concatenate([self._ahead, more])
        taken, self._ahead = self._ahead[:count], self._ahead[count:]
        return taken

    def close(self) -> None:
        self._file.close()
