"""Throughput of the disk tier beside fio, in the same run on the same file system.

    python bench/disk.py [--quick] [--directory DIR] [--json FILE]

fio and the store take turns, A B A B, at the same block size, queue depth and fsync policy, both
past the page cache. See bench/README.md for what is measured.
"""

import argparse
import dataclasses
import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from rich.console import Console
from rich.progress import Progress

from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage.disk import DiskStore
from kvstrata.storage.disk_allocation import slot_path
from kvstrata.storage.disk_system import FileSystem
from kvstrata.storage.journal import HAS_PARENT, PUT, RECORD, Journal, Replay
from kvstrata.storage.superblock import load_superblock
from kvstrata.transfer.engine import TransferEngine, TransferLimits

MIB: Final = 1 << 20
BLOCK_BYTES: Final = (1 * MIB, 2 * MIB, 4 * MIB)
WRITE_BATCH_BYTES: Final = 32 * MIB  # of the server
WRITE_PART_BYTES: Final = 4 * MIB  # of a batch; a thread ends each with an fdatasync
WRITE_NICENESS: Final = 10  # of the server's writers
LIMIT: Final = 0.9  # of fio's figure
OPERATIONS: Final = ("read", "write")
NAMESPACE: Final = b"bench-disk".ljust(16)


@dataclasses.dataclass(frozen=True)
class Turn:
    """One measurement of fio and, right after it, one of the store."""

    block_bytes: int
    operation: str
    repetition: int
    fio: float  # bytes a second
    kvstrata: float


# -- the two sides ---------------------------------------------------------------------------


class Fio:
    """fio: writes to a file of its own, reads from the store's, so that neither is cached more."""

    def __init__(self, folder: Path, store: Path, file_bytes: int, depth: int) -> None:
        self._own = folder / "fio.bin"
        self._slots = slot_path(store, 0)
        self._file_bytes = file_bytes
        self._depth = depth
        # Every extent is written before it counts.
        self._call(f"--filename={self._own}", "--rw=write", f"--bs={4 * MIB}")

    def measure(self, operation: str, block_bytes: int, turn_bytes: int) -> float:
        """Bytes a second in random block order."""
        common = (f"--rw=rand{operation}", f"--bs={block_bytes}")
        if operation == "read":
            return self._call(
                f"--filename={self._slots}",
                "--readonly",
                "--ioengine=io_uring",
                f"--iodepth={self._depth}",
                f"--io_size={turn_bytes}",
                *common,
            )
        return self._call(
            f"--filename={self._own}",
            "--ioengine=psync",  # threads, because those wait for their fdatasync
            "--thread",
            f"--numjobs={self._depth}",
            f"--io_size={turn_bytes // self._depth}",
            f"--fdatasync={WRITE_PART_BYTES // block_bytes}",
            f"--nice={WRITE_NICENESS}",
            *common,
        )

    def close(self) -> None:
        self._own.unlink(missing_ok=True)

    def _call(self, *options: str) -> float:
        command = [
            "fio",
            "--name=bench",
            f"--size={self._file_bytes}",
            "--direct=1",
            f"--randseed={random.randrange(1 << 30)}",
            "--group_reporting",
            "--output-format=json",
            *options,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"fio failed:\n{done.stderr}{done.stdout}")
        (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        return float(max(job[direction]["bw_bytes"] for direction in OPERATIONS))


class Kvstrata:
    """A full disk store behind the I/O threads of the server."""

    def __init__(
        self, folder: Path, block_bytes: int, file_bytes: int, turn_bytes: int, depth: int
    ) -> None:
        self._folder = folder
        self._block_bytes = block_bytes
        self._count = file_bytes // block_bytes
        self._batch_blocks = WRITE_BATCH_BYTES // block_bytes
        self._store = DiskStore(
            [self._folder],
            block_bytes=block_bytes,
            capacity_bytes=self._count * (block_bytes + 4096),
        )
        if not self._store.direct:
            raise SystemExit(f"{folder} is on a file system without O_DIRECT: choose another")
        self._random = np.frombuffer(random.randbytes(block_bytes), np.uint64)
        self._digests: dict[StoreKey, bytes] = {}
        memory = memoryview(mmap.mmap(-1, turn_bytes))
        self._buffers = [
            memory[start : start + block_bytes] for start in range(0, turn_bytes, block_bytes)
        ]
        self._next = 0
        self._to_write: list[StoreKey] = []
        self._written = threading.Event()
        self._engine = TransferEngine(
            self._store,
            self._write_some,
            block_bytes=block_bytes,
            limits=TransferLimits(read_threads=depth, write_threads=depth),
        )
        while len(self._digests) < self._count:
            self._write(min(len(self._buffers), self._count - len(self._digests)))

    def measure(self, operation: str) -> float:
        """Bytes a second in random block order; raises if a byte is wrong."""
        if operation == "read":
            return self._read()
        victims = random.sample(list(self._digests), len(self._buffers))
        for key in victims:
            del self._digests[key]
        self._victims = victims
        return self._write(len(victims))

    def close(self) -> None:
        self._engine.close(10)
        self._store.close()
        shutil.rmtree(self._folder)

    def _read(self) -> float:
        keys = random.sample(list(self._digests), len(self._buffers))
        for buffer in self._buffers:
            np.frombuffer(buffer, np.uint8).fill(0xEE)
        fates: dict[int, Read | None] = {}
        ended = threading.Event()
        lock = threading.Lock()

        def done(start: int, reads: Sequence[Read | None]) -> None:
            with lock:
                fates.update(enumerate(reads, start))
                if len(fates) == len(keys):
                    ended.set()

        started = time.perf_counter()
        self._engine.read(keys, self._buffers, done)
        if not ended.wait(600):
            raise SystemExit("the reads do not end")
        seconds = time.perf_counter() - started
        assert set(fates.values()) == {Read.HIT}
        for key, buffer in zip(keys, self._buffers, strict=True):
            if xxhash.xxh3_128_digest(buffer) != self._digests[key]:
                raise SystemExit(f"WRONG BYTES for key {key.hex()}")
        return len(keys) * self._block_bytes / seconds

    def _write(self, count: int) -> float:
        keys = []
        for buffer in self._buffers[:count]:
            self._next += 1
            np.add(self._random, np.uint64(self._next), out=np.frombuffer(buffer, np.uint64))
            keys.append(NAMESPACE + self._next.to_bytes(32, "big"))
            self._digests[keys[-1]] = xxhash.xxh3_128_digest(buffer)
        self._keys = keys
        self._done = 0
        self._written.clear()
        started = time.perf_counter()
        self._engine.wake()
        if not self._written.wait(600):
            raise SystemExit("the writes do not end")
        return count * self._block_bytes / (time.perf_counter() - started)

    def _write_some(self) -> int:
        """As the server does it: make room for a batch, then write it."""
        part = slice(self._done, self._done + self._batch_blocks)
        keys = self._keys[part]
        if not keys:
            return 0
        if self._victims:
            self._store.remove(self._victims[part])
        fates = self._engine.write(keys, [None] * len(keys), self._buffers[part])
        assert set(fates) == {Write.STORED}, fates
        self._done += len(keys)
        if self._done == len(self._keys):
            self._keys, self._victims = [], []
            self._written.set()
        return len(keys) * self._block_bytes

    _keys: Sequence[StoreKey] = ()
    _victims: Sequence[StoreKey] = ()
    _done = 0


# -- a restart -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Restart:
    """What a store with many blocks costs before it serves the first one."""

    blocks: int
    open_seconds: float
    list_seconds: float
    bytes_per_block: float


def restart(directory: Path | None, blocks: int) -> Restart:
    """Open a store of *blocks* blocks that a first process has left behind."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-", dir=directory) as folder:
        store = Path(folder, "store")
        shape = {"block_bytes": 4096, "capacity_bytes": blocks * 8192}
        DiskStore([store], **shape).close()
        superblock, _ = load_superblock(FileSystem(), store)
        puts = np.zeros(blocks, RECORD)
        puts["kind"], puts["flags"] = PUT, HAS_PARENT
        puts["slot"], puts["generation"] = np.arange(blocks), np.arange(blocks) + 1
        puts["key"] = np.frombuffer(random.randbytes(48 * blocks), "V48")
        puts["parent"][1:] = puts["key"][:-1]
        left = Replay(puts=puts, generation=blocks + 1)
        Journal(FileSystem(), store, superblock.store_id, left).close()
        del puts, left
        before_bytes = resident_bytes()
        times = [time.perf_counter()]
        opened = DiskStore([store], **shape)
        times.append(time.perf_counter())
        taken_bytes = resident_bytes() - before_bytes
        listed = sum(1 for _ in opened.blocks())
        times.append(time.perf_counter())
        opened.close()
        assert listed == blocks
        return Restart(blocks, times[1] - times[0], times[2] - times[1], taken_bytes / blocks)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


# -- the run ---------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> list[Turn]:
    """Every turn of the run, in the order in which they were taken."""
    turns: list[Turn] = []
    file_bytes, turn_bytes = options.file_mib * MIB, options.turn_mib * MIB
    total = len(BLOCK_BYTES) * len(OPERATIONS) * (options.repetitions + 1)
    with (
        tempfile.TemporaryDirectory(prefix="kvstrata-bench-", dir=options.directory) as folder,
        progress(total) as advance,
    ):
        for block_bytes in BLOCK_BYTES:
            path = Path(folder, "store")
            store = Kvstrata(path, block_bytes, file_bytes, turn_bytes, options.depth)
            fio = Fio(Path(folder), path, file_bytes, options.depth)
            for repetition in range(options.repetitions + 1):
                for operation in OPERATIONS:
                    turn = Turn(
                        block_bytes,
                        operation,
                        repetition,
                        fio.measure(operation, block_bytes, turn_bytes),
                        store.measure(operation),
                    )
                    if repetition:  # the first warms up
                        turns.append(turn)
                    advance(f"{block_bytes // MIB} MiB {operation}")
            store.close()
            fio.close()
    return turns


@contextmanager
def progress(total: int) -> Iterator[Any]:
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("laying out files", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


def rows(turns: Iterable[Turn]) -> list[tuple[int, str, list[Turn]]]:
    """The turns by block size and operation."""
    cells: dict[tuple[int, str], list[Turn]] = {}
    for turn in turns:
        cells.setdefault((turn.block_bytes, turn.operation), []).append(turn)
    return [(*cell, found) for cell, found in sorted(cells.items())]


def ratio(turns: Sequence[Turn]) -> float:
    """Median of the store's figure over fio's, of turns taken one after the other."""
    return statistics.median(turn.kvstrata / turn.fio for turn in turns)


def markdown(turns: Iterable[Turn]) -> str:
    """The table, in MB/s."""
    lines = [
        "| block | operation | fio median | best | KVStrata median | best | ratio | of bests |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for block_bytes, operation, found in rows(turns):
        fio, ours = [t.fio for t in found], [t.kvstrata for t in found]
        figures = [statistics.median(fio), max(fio), statistics.median(ours), max(ours)]
        lines.append(
            f"| {block_bytes // MIB} MiB | {operation} | "
            + " | ".join(f"{figure / 1e6:.0f}" for figure in figures)
            + f" | {ratio(found):.2f} | {max(ours) / max(fio):.2f} |"
        )
    return "\n".join(lines)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Throughput of the disk tier beside fio.")
    parser.add_argument("--directory", type=Path, help="where the files go; default /tmp")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="3 repetitions, small files")
    parser.add_argument("--depth", type=int, default=4, help="queue depth; default 4")
    parser.add_argument("--file-mib", type=int, default=4096, help="size of the files; 4096")
    parser.add_argument("--turn-mib", type=int, default=1024, help="moved in each turn; 1024")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repetitions, options.file_mib, options.turn_mib = 3, 1024, 256
    return options


def main() -> int:
    options = parse(sys.argv[1:])
    if shutil.which("fio") is None:
        print("fio is missing: apt-get install fio", file=sys.stderr)
        return 2
    turns = measure(options)
    print(f"queue depth {options.depth}, {os.cpu_count()} cores, MB/s:\n")
    print(markdown(turns))
    for block_bytes, operation, found in rows(turns):
        word = "met    " if ratio(found) >= LIMIT else "NOT met"
        print(f"{word} {block_bytes // MIB} MiB {operation}: {ratio(found):.2f} of fio >= {LIMIT}")
    record: dict[str, Any] = {"turns": [dataclasses.asdict(turn) for turn in turns]}
    if not options.quick:
        found = min(
            (restart(options.directory, 1_000_000) for _ in range(3)),
            key=attrgetter("open_seconds"),
        )
        print(
            f"restart with {found.blocks} blocks, best of 3: open {found.open_seconds:.2f} s, "
            f"list {found.list_seconds:.2f} s, {found.bytes_per_block:.0f} bytes a block"
        )
        record["restart"] = dataclasses.asdict(found)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
