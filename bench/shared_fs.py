"""Throughput of the shared store beside bare files, in the same run on the same file system.

    python bench/shared_fs.py [--directory DIR] [--rounds N] [--total MIB]

Bare files are the limit: one file a block, written past the page cache where that is possible,
synced and closed, read back into the same buffers; no header, no checksum, no rename, no check
whether the block is there. Both sides take turns within a round, and who begins alternates. CPU
is the user and system time of this process.
"""

import argparse
import mmap
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage.shared_fs import SharedFsStore

MIB: Final = 1 << 20
GB: Final = 10**9
BLOCK_BYTES: Final = (1 * MIB, 4 * MIB)
LOOKED_UP: Final = 2048


class Cost(NamedTuple):
    """What moving some bytes took."""

    seconds: float
    cpu_seconds: float


class Bare:
    """One file a block and nothing else."""

    def __init__(self, directory: Path, *, direct: bool) -> None:
        directory.mkdir()
        self._directory = directory
        self._direct = os.O_DIRECT if direct else 0

    def write(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._direct
        for key, buffer in zip(keys, buffers, strict=True):
            fd = os.open(self._directory / key.hex(), flags, 0o600)
            if os.pwritev(fd, [buffer], 0) != buffer.nbytes:
                raise SystemExit("a short write: is the file system full?")
            os.fdatasync(fd)
            os.close(fd)

    def read(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> None:
        for key, buffer in zip(keys, buffers, strict=True):
            fd = os.open(self._directory / key.hex(), os.O_RDONLY | self._direct)
            if os.preadv(fd, [buffer], 0) != buffer.nbytes:
                raise SystemExit("a short read")
            os.close(fd)

    def remove(self, keys: Sequence[StoreKey]) -> None:
        for key in keys:
            os.unlink(self._directory / key.hex())


class Shared:
    """The store, told to behave like ``Bare``."""

    def __init__(self, directory: Path, block_bytes: int) -> None:
        self.store = SharedFsStore(directory, block_bytes=block_bytes)

    def write(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> None:
        fates = self.store.write(keys, [None] * len(keys), buffers)
        if set(fates) != {Write.STORED}:
            raise SystemExit("not every block was stored: is the file system full?")

    def read(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> None:
        if set(self.store.read_into(keys, buffers)) != {Read.HIT}:
            raise SystemExit("a block was not found")

    def remove(self, keys: Sequence[StoreKey]) -> None:
        self.store.remove(keys)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="on the file system to measure")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--total", type=int, default=256, help="MiB moved in each measurement")
    arguments = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="kvstrata-bench-", dir=arguments.directory))
    print(f"{scratch.parent}: {_file_system(scratch)}; medians of {arguments.rounds} rounds")
    print("blocks   operation    bare files          store               store/bare")
    try:
        for block_bytes in BLOCK_BYTES:
            _throughput(scratch, block_bytes, arguments.total * MIB, arguments.rounds)
        _lookups(scratch, arguments.rounds)
    finally:
        shutil.rmtree(scratch)


def _throughput(scratch: Path, block_bytes: int, total_bytes: int, rounds: int) -> None:
    count = max(1, total_bytes // block_bytes)
    shared = Shared(scratch / f"shared-{block_bytes}", block_bytes)
    bare = Bare(scratch / f"bare-{block_bytes}", direct=shared.store.direct)
    buffers = [memoryview(mmap.mmap(-1, block_bytes)) for _ in range(count)]
    for buffer in buffers:
        buffer[:] = os.urandom(block_bytes)
    costs: dict[tuple[str, str], list[Cost]] = {}
    for turn in range(rounds):
        sides = [("bare", bare), ("store", shared)]
        keys = _keys(count)
        for operation in ("write", "read", "remove"):
            for name, side in sides if turn % 2 else sides[::-1]:
                call: Callable[..., None] = getattr(side, operation)
                arguments = (keys,) if operation == "remove" else (keys, buffers)
                costs.setdefault((operation, name), []).append(_cost(call, *arguments))
    for operation in ("write", "read"):
        _print_row(block_bytes, operation, count * block_bytes, costs)


def _print_row(
    block_bytes: int,
    operation: str,
    moved_bytes: int,
    costs: dict[tuple[str, str], list[Cost]],
) -> None:
    row = []
    for name in ("bare", "store"):
        found = costs[operation, name]
        rate = moved_bytes / GB / statistics.median(cost.seconds for cost in found)
        cpu = statistics.median(cost.cpu_seconds for cost in found) * GB / moved_bytes
        row.append(f"{rate:5.2f} GB/s {cpu:5.3f} s/GB")
    ratio = statistics.median(
        bare.seconds / store.seconds
        for bare, store in zip(costs[operation, "bare"], costs[operation, "store"], strict=True)
    )
    print(f"{block_bytes // MIB} MiB    {operation:<9} {row[0]}   {row[1]}   {ratio:.2f}")


def _lookups(scratch: Path, rounds: int) -> None:
    """Microseconds a key of ``exists`` beside a bare ``stat`` of the same files."""
    shared = Shared(scratch / "lookups", 4096)
    present, absent = _keys(LOOKED_UP), _keys(LOOKED_UP)
    shared.write(present, [memoryview(bytes(4096))] * LOOKED_UP)
    files = [file for file in (scratch / "lookups" / "blocks").rglob("*") if file.is_file()]
    paths = [str(file) for file in files]
    calls: dict[str, Callable[[], object]] = {
        "stat": lambda: [os.stat(path) for path in paths],
        "exists, there": lambda: shared.store.exists(present),
        "exists, not there": lambda: shared.store.exists(absent),
    }
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            took[name].append(_cost(call).seconds)
    for name, seconds in took.items():
        print(f"{name}: {statistics.median(seconds) / LOOKED_UP * 1e6:.1f} us a key")


def _keys(count: int) -> list[StoreKey]:
    return [b"bench-shared".ljust(16) + os.urandom(32) for _ in range(count)]


def _cost(call: Callable[..., object], *arguments: object) -> Cost:
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    call(*arguments)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    return Cost(seconds, user + system)


def _file_system(path: Path) -> str:
    """Type and options of the mount that holds *path*."""
    best, found = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, options, *_ = line.split()
        if path.is_relative_to(mount) and len(mount) >= len(best):
            best, found = mount, f"{kind} {options}"
    return found


if __name__ == "__main__":
    main()
