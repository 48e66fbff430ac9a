"""When each block of a trace is looked up next: what an optimal cache would have to know.

The sort by block is done piece by piece on the disk, so memory does not grow with the trace.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from kvstrata.replay.hashing import Identities
from kvstrata.replay.spool import Numbers, Spool
from kvstrata.replay.trace import Kind

__all__ = ["NEVER", "Reuse", "find_reuse"]

NEVER: Final = -1

_USE: Final = np.dtype([("block", "<u8"), ("use", "<i8")])
_USES_A_PART: Final = 1 << 19  # sorted in memory at once
_MOST_PARTS: Final = 512  # files that are open at once
_USES_A_PIECE: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class Reuse:
    """Of each use of a block, the place in the trace at which it is needed next.

    A use is a block of a request. It is *needed* where it is looked up and the device does not
    have it: only there a cache below the device can have a hit.
    """

    path: Path  # an int64 for each use: the use that needs the block next, or NEVER
    distinct_blocks: int
    possible_hits: int  # needed blocks that were used before

    def open(self) -> Numbers:
        return Numbers(self.path, np.int64)


def find_reuse(spool: Spool) -> Reuse:
    """Write the next need of every use beside *spool*."""
    parts = _part(spool)
    distinct = sum(_link(part) for part in parts)
    path = spool.directory / "next"
    possible = 0
    with ExitStack() as stack:
        out = stack.enter_context(path.open("wb"))
        sources = [stack.enter_context(part.open("rb")) for part in parts]
        for next_needs in _in_order(sources, spool.blocks):
            possible += int(np.count_nonzero(next_needs != NEVER))
            out.write(next_needs.tobytes())
    for part in parts:
        part.unlink()
    return Reuse(path, distinct, possible)


def _part(spool: Spool) -> list[Path]:
    """All uses in files of which each has all uses of its blocks, in order.

    The number of a use is doubled, and one is added if it is a need.
    """
    count = min(_MOST_PARTS, 1 + spool.blocks // _USES_A_PART)
    paths = [spool.directory / f"part-{number}" for number in range(count)]
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("wb")) for path in paths]
        for uses in _uses(spool):
            owner = uses["block"] % np.uint64(count)
            order = np.argsort(owner, kind="stable")
            ends = np.cumsum(np.bincount(owner.astype(np.int64), minlength=count)).tolist()
            start = 0
            for file, end in zip(files, ends, strict=True):
                file.write(uses[order[start:end]].tobytes())
                start = end
    return paths


def _uses(spool: Spool) -> Iterator[NDArray[np.void]]:
    blocks: list[Identities] = []
    needed: list[NDArray[np.bool_]] = []
    first = waiting = 0
    for request, device_blocks in spool:
        count = len(request.blocks)
        is_need = np.full(count, request.kind is not Kind.PUT)
        is_need[:device_blocks] = False
        blocks.append(request.blocks)
        needed.append(is_need)
        waiting += count
        if waiting >= _USES_A_PIECE:
            yield _piece(first, blocks, needed)
            first, waiting, blocks, needed = first + waiting, 0, [], []
    if waiting:
        yield _piece(first, blocks, needed)


def _piece(
    first: int, blocks: list[Identities], needed: list[NDArray[np.bool_]]
) -> NDArray[np.void]:
    block = np.concatenate(blocks)
    uses = np.empty(len(block), _USE)
    uses["block"] = block
    uses["use"] = (np.arange(first, first + len(block)) << 1) | np.concatenate(needed)
    return uses


def _link(path: Path) -> int:
    """Replace the uses in *path* by (use, next need), in order; returns how many blocks it had."""
    uses = np.fromfile(path, _USE)
    order = np.argsort(uses["block"], kind="stable")
    block, use = uses["block"][order], uses["use"][order]
    again = block[1:] == block[:-1]
    next_need = np.full(len(use), NEVER, np.int64)
    next_need[:-1] = np.where(again & (use[1:] & 1 == 1), use[1:] >> 1, NEVER)
    links = np.empty((len(use), 2), np.int64)
    links[order, 0] = use >> 1
    links[order, 1] = next_need
    path.write_bytes(links.tobytes())
    return len(use) - int(np.count_nonzero(again))


def _in_order(sources: Sequence[BinaryIO], uses: int) -> Iterator[NDArray[np.int64]]:
    """The next needs of all uses, in pieces; each of *sources* holds some of the uses in order."""
    ahead = [np.empty((0, 2), np.int64) for _ in sources]
    for start in range(0, uses, _USES_A_PIECE):
        end = min(uses, start + _USES_A_PIECE)
        piece = np.empty(end - start, np.int64)
        for number, source in enumerate(sources):
            held = ahead[number]
            while not len(held) or held[-1, 0] < end:
                more = np.fromfile(source, np.int64, 2 * (1 + _USES_A_PIECE // len(sources)))
                if not len(more):
                    break
                held = np.concatenate([held, more.reshape(-1, 2)])
            here = int(np.searchsorted(held[:, 0], end))
            piece[held[:here, 0] - start] = held[:here, 1]
            ahead[number] = held[here:]
        yield piece
