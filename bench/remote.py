"""Remote stores beside the raw path of the same engine, in the same run, on loopback.

    python -m bench.remote [--quick] [--engines NAME ...] [--block-kib N ...] [--json FILE]

The sides take turns, A B C C B A, with the same server, the same bytes and the same slots of host
memory. See bench/README.md for what the raw paths are.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from bench.remote_engines import ENGINES, Engine, library_pids
from bench.remote_raw import RawPath

from kvstrata.core.interpreter import hand_over_sooner
from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage.checksum import digest
from kvstrata.storage.host import HostMemory
from kvstrata.storage.store import Store

__all__ = ["Turn", "failures", "markdown", "measure", "parse"]

MIB: Final = 1 << 20
GB: Final = 10**9
BLOCK_BYTES: Final = (1 * MIB, 4 * MIB)
BATCH_BYTES: Final = 4 * MIB  # what a read thread of the server asks for at once
THREADS: Final = (1, 4)
LOOKED_UP: Final = 256  # keys, in one call
LEAST_RATE: Final = 0.90  # of the raw path's bytes a second, for reads
MOST_CPU: Final = 1.15  # of its CPU seconds, for reads
_WAYS: Final = ("raw", "store")  # which keep blocks under names of their own
_NAMESPACE: Final = b"bench-remote".ljust(16)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What moving a GB takes; of ``exists``, a key."""

    seconds: float
    cpu_seconds: float  # of this process and of what our store runs beside it


@dataclasses.dataclass(frozen=True)
class Turn:
    """A measurement of the raw path, with and without a checksum, and one of the store beside it."""

    engine: str
    block_bytes: int
    threads: int
    operation: str  # read, write; found, not there: of exists, which has no raw path
    repetition: int
    raw: Cost | None
    proved: Cost | None  # the raw path, and the checksum of every block: the least with proof
    store: Cost


class Side(NamedTuple):
    """One way to the engine, with batches of numbered blocks."""

    read: Callable[[Sequence[StoreKey], Sequence[memoryview]], None]
    write: Callable[[Sequence[StoreKey], Sequence[memoryview]], None]
    remove: Callable[[Sequence[StoreKey]], object]


def raw_side(path: RawPath) -> Side:
    return Side(
        lambda keys, buffers: path.read(_names(keys), buffers),
        lambda keys, buffers: path.write(_names(keys), buffers),
        lambda keys: path.remove(_names(keys)),
    )


def proved_side(path: RawPath) -> Side:
    raw = raw_side(path)

    def prove(buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            digest(buffer)

    def read(keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> None:
        raw.read(keys, buffers)
        prove(buffers)

    def write(keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> None:
        prove(buffers)
        raw.write(keys, buffers)

    return Side(read, write, raw.remove)


def store_side(store: Store) -> Side:
    def read(keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> None:
        fates = store.read_into(keys, buffers)
        if set(fates) != {Read.HIT}:
            raise SystemExit(f"reading: {fates}")

    def write(keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> None:
        fates = store.write(keys, [None] * len(keys), buffers)
        if set(fates) != {Write.STORED}:
            raise SystemExit(f"writing: {fates}")

    return Side(read, write, store.remove)


class Bench:
    """One engine, blocks of one length, and as many slots as are moved in a turn."""

    def __init__(self, name: str, engine: Engine, block_bytes: int, turn_bytes: int) -> None:
        self._name = name
        self._block_bytes = block_bytes
        count = max(1, turn_bytes // block_bytes)
        self._stack = ExitStack()
        slots_bytes = count * block_bytes
        memory = HostMemory(
            capacity_bytes=slots_bytes, block_bytes=block_bytes, server_id=bytes(16)
        )
        self._stack.callback(memory.close)
        memory.prefault()
        self._slots = [memory.view(slot) for slot in range(count)]
        random = np.frombuffer(os.urandom(block_bytes), np.uint64)
        for number, slot in enumerate(self._slots):
            np.add(random, np.uint64(number), out=np.frombuffer(slot, np.uint64))
        self._digests = [digest(slot) for slot in self._slots]
        self._made = 0  # keys
        self._store = self._stack.enter_context(
            closing(engine.open_store(block_bytes, memory.mapping))
        )
        raw = self._stack.enter_context(closing(engine.open_raw(memory.mapping)))
        self._sides = {
            "raw": raw_side(raw),
            "proved": proved_side(raw),
            "store": store_side(self._store),
        }
        self._pids = library_pids()
        self._pools = {
            threads: self._stack.enter_context(ThreadPoolExecutor(threads)) for threads in THREADS
        }
        self._keys = self._fresh(count)
        for way in _WAYS:
            # The first alone: rclone fails writes that both make the folder.
            self._sides[way].write(self._fresh(1), self._slots[:1])
            self._move(self._sides[way].write, self._keys, 1)

    def reads(self, repetition: int, threads: int) -> Turn:
        costs = {}
        for name in _order(repetition):
            for slot in self._slots:
                np.frombuffer(slot, np.uint8).fill(0xEE)
            costs[name] = self._move(self._sides[name].read, self._keys, threads)
            if [digest(slot) for slot in self._slots] != self._digests:
                raise SystemExit(f"{self._name}: WRONG BYTES")
        return self._turn("read", repetition, threads, costs)

    def writes(self, repetition: int, threads: int) -> Turn:
        costs = {}
        for name in _order(repetition):
            side, keys = self._sides[name], self._fresh(len(self._slots))
            costs[name] = self._move(side.write, keys, threads)
            for start in range(0, len(keys), 4):
                side.remove(keys[start : start + 4])
        return self._turn("write", repetition, threads, costs)

    def lookups(self, repetition: int) -> Iterator[Turn]:
        """Of blocks that are there, and of others."""
        there = (self._keys * LOOKED_UP)[:LOOKED_UP]
        for operation, keys in (("found", there), ("not there", self._fresh(LOOKED_UP))):
            cost = self._cost(partial(self._store.exists, keys), LOOKED_UP)
            yield self._turn(operation, repetition, 1, {"store": cost})

    def close(self) -> None:
        for way in _WAYS:
            self._sides[way].remove(self._keys)
        self._stack.close()

    def _move(
        self,
        call: Callable[[Sequence[StoreKey], Sequence[memoryview]], None],
        keys: Sequence[StoreKey],
        threads: int,
    ) -> Cost:
        """Move all slots, batch after batch."""
        step = max(1, BATCH_BYTES // self._block_bytes)
        parts = [slice(start, start + step) for start in range(0, len(keys), step)]
        pool = self._pools[threads]

        def move(part: slice) -> None:
            call(keys[part], self._slots[part])

        def run() -> None:
            list(pool.map(move, parts))

        return self._cost(run, len(keys) * self._block_bytes / GB)

    def _cost(self, call: Callable[[], object], amount: float) -> Cost:
        before, started = self._cpu_seconds(), time.perf_counter()
        call()
        seconds = time.perf_counter() - started
        return Cost(seconds / amount, (self._cpu_seconds() - before) / amount)

    def _cpu_seconds(self) -> float:
        own = time.process_time()
        return own + sum(time.clock_gettime(_clock_of(pid)) for pid in self._pids)

    def _turn(self, operation: str, repetition: int, threads: int, costs: dict[str, Cost]) -> Turn:
        return Turn(
            self._name,
            self._block_bytes,
            threads,
            operation,
            repetition,
            costs.get("raw"),
            costs.get("proved"),
            costs["store"],
        )

    def _fresh(self, count: int) -> list[StoreKey]:
        first, self._made = self._made, self._made + count
        return [
            _NAMESPACE + self._block_bytes.to_bytes(4, "big") + number.to_bytes(28, "big")
            for number in range(first, self._made)
        ]


def measure(options: argparse.Namespace) -> list[Turn]:
    """Every turn of the run."""
    turns: list[Turn] = []
    for name in options.engines:
        with (
            tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as folder,
            ENGINES[name](Path(folder)) as engine,
        ):
            for block_bytes in [kib << 10 for kib in options.block_kib]:
                with closing(Bench(name, engine, block_bytes, options.turn_mib * MIB)) as bench:
                    turns += _turns(bench, options)
    return turns


def _turns(bench: Bench, options: argparse.Namespace) -> Iterator[Turn]:
    for repetition in range(options.repetitions + 1):
        for threads in THREADS:
            turns = [bench.reads(repetition, threads)]
            if repetition <= options.writes:
                turns.append(bench.writes(repetition, threads))
            if repetition:  # the first warms up
                yield from turns
        if repetition:
            yield from bench.lookups(repetition)


# -- what is printed ---------------------------------------------------------------------------


class Row(NamedTuple):
    """Medians of the turns of one kind; ratios are medians of the ratios of each turn."""

    engine: str
    block_bytes: int
    operation: str
    threads: int
    raw: Cost | None
    proved: Cost | None
    store: Cost
    rate: float  # the store's bytes a second by the raw path's
    rate_proved: float  # and by those of the raw path with a checksum
    cpu: float  # the same of CPU seconds
    cpu_proved: float

    @property
    def title(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.engine}, {_size(self.block_bytes)}, {self.operation}, {threads}"


def rows(turns: Sequence[Turn]) -> list[Row]:
    cells: dict[tuple[str, int, str, int], list[Turn]] = {}
    for turn in turns:
        cell = (turn.engine, turn.block_bytes, turn.operation, turn.threads)
        cells.setdefault(cell, []).append(turn)
    return [_row(cell, found) for cell, found in cells.items()]


def _row(cell: tuple[str, int, str, int], turns: Sequence[Turn]) -> Row:
    raws = [turn.raw for turn in turns if turn.raw is not None]
    proved = [turn.proved for turn in turns if turn.proved is not None]
    stores = [turn.store for turn in turns]
    if not raws:
        return Row(*cell, None, None, _median(stores), 1.0, 1.0, 1.0, 1.0)
    return Row(
        *cell,
        _median(raws),
        _median(proved),
        _median(stores),
        *(
            1 / _ratio([cost.seconds for cost in stores], [cost.seconds for cost in others])
            for others in (raws, proved)
        ),
        *(
            _ratio([cost.cpu_seconds for cost in stores], [cost.cpu_seconds for cost in others])
            for others in (raws, proved)
        ),
    )


def _size(block_bytes: int) -> str:
    return f"{block_bytes >> 10} KiB" if block_bytes % MIB else f"{block_bytes // MIB} MiB"


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _median(costs: Sequence[Cost]) -> Cost:
    return Cost(
        statistics.median(cost.seconds for cost in costs),
        statistics.median(cost.cpu_seconds for cost in costs),
    )


def markdown(turns: Sequence[Turn]) -> str:
    """What is moved, in GB/s and CPU seconds for each GB, and what is asked for."""
    return f"{_moved(rows(turns))}\n\n{_asked(rows(turns))}"


def _moved(found: Sequence[Row]) -> str:
    rates = "raw, GB/s | with checksum | KVStrata | ratio to raw | ratio to both"
    cpu = "raw, CPU s/GB | with checksum | KVStrata | ratio to raw | ratio to both"
    lines = [
        f"| engine | blocks | | threads | {rates} | {cpu} |",
        "|---|---|---|" + 11 * "---:|",
    ]
    for row in found:
        if row.raw is None or row.proved is None:
            continue
        lines.append(
            f"| {row.engine} | {_size(row.block_bytes)} | {row.operation} "
            f"| {row.threads} | {1 / row.raw.seconds:.2f} | {1 / row.proved.seconds:.2f} "
            f"| {1 / row.store.seconds:.2f} | {row.rate:.2f} | {row.rate_proved:.2f} "
            f"| {row.raw.cpu_seconds:.3f} | {row.proved.cpu_seconds:.3f} "
            f"| {row.store.cpu_seconds:.3f} | {row.cpu:.2f} | {row.cpu_proved:.2f} |"
        )
    return "\n".join(lines)


def _asked(found: Sequence[Row]) -> str:
    lines = ["| engine | exists | µs a key | CPU µs a key |", "|---|---|---:|---:|"]
    least_bytes = min((row.block_bytes for row in found), default=0)
    for row in found:
        if row.raw is None and row.block_bytes == least_bytes:
            seconds, cpu_seconds = dataclasses.astuple(row.store)
            lines.append(
                f"| {row.engine} | {row.operation} | {1e6 * seconds:.0f} | {1e6 * cpu_seconds:.0f} |"
            )
    return "\n".join(lines)


def failures(turns: Sequence[Turn]) -> list[str]:
    """A sentence for each bound of reads that is not met."""
    sentences = []
    for row in rows(turns):
        if row.operation != "read":
            continue
        if row.rate < LEAST_RATE:
            sentences.append(f"{row.title}: {row.rate:.2f} of the raw rate, at least {LEAST_RATE}")
        if row.cpu > MOST_CPU:
            sentences.append(f"{row.title}: {row.cpu:.2f} of the raw CPU, at most {MOST_CPU}")
    return sentences


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Remote stores beside the engines' raw paths.")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--repetitions", type=int, default=15, help="of reads; default 15")
    parser.add_argument("--writes", type=int, default=5, help="repetitions with writes; default 5")
    parser.add_argument("--turn-mib", type=int, default=128, help="moved in each turn; 128")
    kib = [block_bytes >> 10 for block_bytes in BLOCK_BYTES]
    parser.add_argument("--block-kib", type=int, nargs="+", default=kib, help="default 1024 4096")
    parser.add_argument("--quick", action="store_true", help="5 repetitions, 2 with writes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repetitions, options.writes = 5, 2
    if options.repetitions < 1 or options.turn_mib < 1:
        parser.error("at least one repetition of at least one MiB")
    if min(options.block_kib) < 1:
        parser.error("blocks of at least one KiB")
    return options


def main() -> int:
    options = parse(sys.argv[1:])
    hand_over_sooner()  # as the server does
    turns = measure(options)
    if options.json:
        record = {"turns": [dataclasses.asdict(turn) for turn in turns]}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{os.cpu_count()} cores, medians of {options.repetitions} repetitions:\n")
    print(markdown(turns))
    missed = failures(turns)
    print("\nreads: " + ("all bounds met" if not missed else "bounds NOT met:"))
    print("\n".join(missed))
    return 1 if missed else 0


def _names(keys: Sequence[StoreKey]) -> list[str]:
    return [f"raw-{key.hex()}" for key in keys]


def _order(repetition: int) -> tuple[str, ...]:
    order = ("raw", "proved", "store")
    return order if repetition % 2 else order[::-1]


def _clock_of(pid: int) -> int:
    """The CPU clock of a process: what ``clock_getcpuclockid`` gives."""
    return (~pid << 3) | 2


if __name__ == "__main__":
    sys.exit(main())
