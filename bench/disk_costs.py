"""What a disk tier costs besides its throughput: restarts, checks, a busy process, discarding.

    python bench/disk_costs.py [restart] [check] [busy] [discard] [--directory DIR] [--json FILE]

Without a name, all of them. See bench/README.md for what is measured.
"""

import argparse
import dataclasses
import gc
import json
import mmap
import multiprocessing
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from driven_store import DrivenStore

from kvstrata.core.config import Config
from kvstrata.core.interpreter import SWITCH_SECONDS
from kvstrata.core.tiers import DiskTier, HostTier
from kvstrata.manager.manager import KVManager
from kvstrata.storage.disk import DiskStore
from kvstrata.storage.disk_check import check_store
from kvstrata.storage.disk_system import FileSystem
from kvstrata.storage.journal import HAS_PARENT, PUT, RECORD, Journal, Replay
from kvstrata.storage.superblock import load_superblock

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
RESTART_BLOCKS: Final = 1_000_000
RESTART_NAMESPACES: Final = 10
BUSY_BLOCK_BYTES: Final = (256 * KIB, 1 * MIB, 2 * MIB, 4 * MIB)
DEPTH: Final = 4


# -- a restart -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Restart:
    """What a store with many blocks costs before it serves the first one."""

    blocks: int
    open_seconds: float
    list_seconds: float
    manager_seconds: float  # to open a cache on it: host memory, the store, list and index
    bytes_per_block: float


def restart(folder: Path, blocks: int) -> Restart:
    """Open a store of *blocks* blocks that a first process has left behind."""
    store = folder / "restart"
    shape: dict[str, Any] = {"block_bytes": 4096, "capacity_bytes": blocks * 8192}
    DiskStore([store], **shape).close()
    superblock, _ = load_superblock(FileSystem(), store)
    puts = np.zeros(blocks, RECORD)
    puts["kind"], puts["flags"] = PUT, HAS_PARENT
    puts["slot"], puts["generation"] = np.arange(blocks), np.arange(blocks) + 1
    keys = np.frombuffer(random.randbytes(48 * blocks), np.uint8).reshape(blocks, 48).copy()
    keys[:, :16] = np.arange(blocks)[:, None] // -(-blocks // RESTART_NAMESPACES)
    puts["key"] = keys.view("V48").ravel()
    puts["parent"][1:] = puts["key"][:-1]
    left = Replay(puts=puts, generation=blocks + 1)
    Journal(FileSystem(), store, superblock.store_id, left).close()
    del puts, left
    gc.collect()
    before_bytes = resident_bytes()
    times = [time.perf_counter()]
    opened = DiskStore([store], **shape)
    times.append(time.perf_counter())
    gc.collect()
    taken_bytes = resident_bytes() - before_bytes
    times.append(time.perf_counter())
    listed = len(opened.stored().keys)
    times.append(time.perf_counter())
    opened.close()
    tiers = HostTier(capacity=MIB), DiskTier(paths=(store,), capacity=blocks * 8192)
    config = Config(tiers=tiers, prefault=False)
    times.append(time.perf_counter())
    manager = KVManager(config, block_bytes=4096)
    times.append(time.perf_counter())
    indexed = sum(namespace.blocks for namespace in manager.stats().namespaces)
    manager.close()
    assert indexed == listed == blocks
    return Restart(
        blocks,
        times[1] - times[0],
        times[3] - times[2],
        times[5] - times[4],
        taken_bytes / blocks,
    )


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def restarts(options: argparse.Namespace) -> dict[str, Any]:
    """Some, each in a process of its own: nothing of one is left for the next."""
    runs = []
    for _ in range(options.repetitions):
        with folder_of(options) as folder, multiprocessing.get_context("spawn").Pool(1) as pool:
            runs.append(pool.apply(restart, [folder, RESTART_BLOCKS]))
    middle = sorted(runs, key=lambda run: run.manager_seconds)[len(runs) // 2]
    print(
        f"restart with {middle.blocks} blocks, median of {len(runs)}: {middle.manager_seconds:.2f} s; "
        f"the store alone opens in {middle.open_seconds:.2f} s, lists in {middle.list_seconds:.2f} s, "
        f"has {middle.bytes_per_block:.0f} bytes a block in memory"
    )
    return {"restarts": [dataclasses.asdict(run) for run in runs]}


# -- a check ---------------------------------------------------------------------------------


def checks(options: argparse.Namespace) -> dict[str, Any]:
    """How fast ``kvstrata check`` reads a full store."""
    speeds = []
    with folder_of(options) as folder:
        path = folder / "check"
        store = driven(path, MIB, options.file_mib * MIB)
        store.close(delete=False)
        for _ in range(options.repetitions):
            started = time.perf_counter()
            report = check_store([path])
            seconds = time.perf_counter() - started
            assert report.sound
            (blocks,) = report.good_blocks.values()
            speeds.append(blocks * MIB / seconds)
    print(
        f"check of {options.file_mib} MiB in blocks of 1 MiB: median "
        f"{statistics.median(speeds) / 1e9:.2f} GB/s, best {max(speeds) / 1e9:.2f}"
    )
    return {"check_bytes_per_second": speeds}


# -- a busy process --------------------------------------------------------------------------


def busy(options: argparse.Namespace) -> dict[str, Any]:
    """Reads beside a thread that never waits, over reads alone right before."""
    default = sys.getswitchinterval()
    cases: list[tuple[str, Callable[[], Any], float]] = [
        (f"a thread, interval {default * 1e3:g} ms", spinning_thread, default),
        (
            f"a thread, interval {SWITCH_SECONDS * 1e3:g} ms, as in the server",
            spinning_thread,
            SWITCH_SECONDS,
        ),
        ("another process", spinning_process, default),
    ]
    ratios: dict[str, dict[int, list[float]]] = {name: {} for name, _, _ in cases}
    for block_bytes in BUSY_BLOCK_BYTES:
        with folder_of(options) as folder:
            store = driven(folder / "busy", block_bytes, GIB)
            for _ in range(options.repetitions + 1):  # the first warms up
                for name, beside, seconds in cases:
                    alone = store.read()
                    sys.setswitchinterval(seconds)
                    with beside():
                        ratio = store.read() / alone
                    sys.setswitchinterval(default)
                    ratios[name].setdefault(block_bytes, []).append(ratio)
            store.close()
    print("\nreads beside a busy one, over reads alone:\n")
    print("| busy is | " + " | ".join(f"{n // KIB} KiB" for n in BUSY_BLOCK_BYTES) + " |")
    print("|---|" + "---:|" * len(BUSY_BLOCK_BYTES))
    for name, found in ratios.items():
        medians = [statistics.median(each[1:]) for each in found.values()]
        print(f"| {name} | " + " | ".join(f"{median:.2f}" for median in medians) + " |")
    return {"busy": {name: {str(n): r for n, r in each.items()} for name, each in ratios.items()}}


@contextmanager
def spinning_thread() -> Iterator[None]:
    """Compute in Python, as a control thread with too much to do does."""
    ended = threading.Event()

    def spin() -> None:
        while not ended.is_set():
            sum(range(500))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def spinning_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: sum(range(500))"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


# -- discarding ------------------------------------------------------------------------------


def discards(options: argparse.Namespace) -> dict[str, Any]:
    """Writes in the place of old blocks, their room given back before or kept; in turns."""
    speeds: dict[bool, list[float]] = {False: [], True: []}
    with folder_of(options) as folder:
        stores = {
            discard: driven(folder / str(discard), MIB, GIB, discard=discard) for discard in speeds
        }
        for _ in range(options.repetitions + 1):
            for discard, store in stores.items():
                speeds[discard].append(store.write())
        for store in stores.values():
            store.close()
    ratio = statistics.median(
        gone / kept for gone, kept in zip(speeds[True][1:], speeds[False][1:], strict=True)
    )
    print(
        f"\nwrites of blocks of 1 MiB: {statistics.median(speeds[False][1:]) / 1e6:.0f} MB/s, "
        f"with discard {ratio:.2f} of that"
    )
    return {"discard": {str(discard): found for discard, found in speeds.items()}}


# -- the run ---------------------------------------------------------------------------------


def driven(
    folder: Path, block_bytes: int, file_bytes: int, *, discard: bool = False
) -> DrivenStore:
    return DrivenStore(
        folder,
        block_bytes=block_bytes,
        file_bytes=file_bytes,
        turn_bytes=256 * MIB,
        depth=DEPTH,
        discard=discard,
    )


@contextmanager
def folder_of(options: argparse.Namespace) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-", dir=options.directory) as folder:
        yield Path(folder)


MODES: Final[dict[str, Callable[[argparse.Namespace], dict[str, Any]]]] = {
    "restart": restarts,
    "check": checks,
    "busy": busy,
    "discard": discards,
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What a disk tier costs besides its throughput.")
    parser.add_argument("modes", nargs="*", metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--directory", type=Path, help="where the files go; default /tmp")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--file-mib", type=int, default=4096, help="store to check; 4096")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement")
    options = parser.parse_args(arguments)
    if unknown := set(options.modes) - set(MODES):
        parser.error(f"no such mode: {', '.join(sorted(unknown))}; there are {', '.join(MODES)}")
    return options


def main() -> int:
    options = parse(sys.argv[1:])
    record: dict[str, Any] = {}
    for mode in options.modes or MODES:
        record |= MODES[mode](options)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
