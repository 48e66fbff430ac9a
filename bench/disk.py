"""Throughput of the disk tier beside fio, in the same run on the same file system.

    python bench/disk.py [--quick] [--directory DIR] [--json FILE]

fio and the store take turns, A B A B, at the same block size, queue depth and fsync policy, both
past the page cache. See bench/README.md for what is measured.
"""

import argparse
import dataclasses
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from driven_store import DrivenStore
from rich.console import Console
from rich.progress import Progress

from kvstrata.storage.disk_allocation import slot_path
from kvstrata.transfer.engine import WRITE_BATCH_BYTES

MIB: Final = 1 << 20
BLOCK_BYTES: Final = (1 * MIB, 2 * MIB, 4 * MIB)
WRITE_NICENESS: Final = 10  # of the server's writers
LIMIT: Final = 0.9  # of fio's figure
OPERATIONS: Final = ("read", "write")


@dataclasses.dataclass(frozen=True)
class Turn:
    """One measurement of fio and, right after it, one of the store."""

    block_bytes: int
    operation: str
    repetition: int
    fio: float  # bytes a second
    kvstrata: float


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
            f"--fdatasync={WRITE_BATCH_BYTES // block_bytes}",
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
            store = DrivenStore(
                path,
                block_bytes=block_bytes,
                file_bytes=file_bytes,
                turn_bytes=turn_bytes,
                depth=options.depth,
            )
            fio = Fio(Path(folder), path, file_bytes, options.depth)
            for repetition in range(options.repetitions + 1):
                for operation in OPERATIONS:
                    turn = Turn(
                        block_bytes,
                        operation,
                        repetition,
                        fio.measure(operation, block_bytes, turn_bytes),
                        store.read() if operation == "read" else store.write(),
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
    record = {"turns": [dataclasses.asdict(turn) for turn in turns]}
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
