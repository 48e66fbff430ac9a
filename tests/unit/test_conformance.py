"""Every store of ours keeps the rules of ``kvstrata.testing``, bare and wrapped.

Stores with needs of their own, such as a server, run the suite in their own test files.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstrata.core.types import StoreKey
from kvstrata.storage.compress import FRAME_OVERHEAD_BYTES, CompressedStore
from kvstrata.storage.disk import DiskStore
from kvstrata.storage.quantize import QuantizedStore, quantized_bytes
from kvstrata.storage.store import Store
from kvstrata.storage.wrap import (
    BreakerStore,
    LeadingStore,
    RetryStore,
    TimedStore,
    WrappedStore,
)
from kvstrata.testing import Fault, FlakyStore, MemoryStore, SlowStore, StoreConformance, Traits
from kvstrata.testing.memory import Value

BLOCK_BYTES = 4096
SLOTS = 8
VARIABLE = Traits(variable=True)


@pytest.fixture(autouse=True)
def _no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rule cuts the power: syncing would only be slow here."""
    monkeypatch.setattr(os, "fdatasync", lambda _: None)
    monkeypatch.setattr(os, "fsync", lambda _: None)


class OverMemory(StoreConformance):
    """A wrapper around the reference; ``wrap`` says which."""

    variable = False  # the reference, inside
    inner_bytes = BLOCK_BYTES

    def open_store(self, place: Path) -> Store:
        self.memory = MemoryStore(
            block_bytes=self.inner_bytes, capacity_blocks=SLOTS, variable=self.variable
        )
        self.flaky = FlakyStore(self.memory)
        return self.wrap(self.flaky)

    def wrap(self, inner: Store) -> Store:
        return inner

    def damage(self, store: Store, place: Path, wanted: StoreKey) -> None:
        self.memory.damage(wanted)

    @contextmanager
    def outage(self, store: Store, place: Path) -> Iterator[None]:
        self.flaky.plan = itertools.repeat(Fault.BEFORE)
        yield
        self.flaky.plan = iter(())


class OverDisk(StoreConformance):
    """A wrapper around a disk store; ``wrap`` says which."""

    traits = Traits(persistent=True)
    inner_bytes = BLOCK_BYTES

    def open_store(self, place: Path) -> Store:
        self.disk = open_disk(place, self.inner_bytes)
        return self.wrap(self.disk)

    def wrap(self, inner: Store) -> Store:
        return inner

    def damage(self, store: Store, place: Path, wanted: StoreKey) -> None:
        flip_a_bit_of(self.disk, wanted, place)

    def outage(self, store: Store, place: Path) -> AbstractContextManager[object]:
        return broken_disk()


def open_disk(place: Path, block_bytes: int) -> DiskStore:
    slot_bytes = -(-block_bytes // 4096) * 4096 + 4096
    return DiskStore([place / "disk"], block_bytes=block_bytes, capacity_bytes=SLOTS * slot_bytes)


def flip_a_bit_of(store: Store, wanted: StoreKey, place: Path) -> None:
    """Find the value of *wanted* in the files under *place* and change it there."""
    buffer = memoryview(bytearray(store.statistics().block_bytes))
    store.read_into([wanted], [buffer])
    for path in place.rglob("*"):
        position = path.read_bytes().find(buffer[:64]) if path.is_file() else -1
        if position >= 0:
            with path.open("r+b") as file:
                file.seek(position)
                file.write(bytes([buffer[0] ^ 0x10]))
            return
    raise AssertionError(f"the value of {wanted!r} is in no file")


@contextmanager
def broken_disk() -> Iterator[None]:
    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        for call in ("preadv", "pread", "pwritev", "pwrite"):
            patch.setattr(os, call, broken)
        yield


class TestMemoryStore(OverMemory):
    pass


class TestVariableMemoryStore(OverMemory):
    traits = VARIABLE
    variable = True


class TestMemoryStoreThatIsOpenedAgain(StoreConformance):
    traits = Traits(persistent=True)

    def open_store(self, place: Path) -> Store:
        values = DISKS.setdefault(place, {})
        return MemoryStore(block_bytes=BLOCK_BYTES, capacity_blocks=SLOTS, values=values)


DISKS: dict[Path, dict[StoreKey, Value]] = {}


class TestDiskStore(OverDisk):
    pass


class TestForwardOverMemory(OverMemory):
    def wrap(self, inner: Store) -> Store:
        return WrappedStore(inner)


class Breaker:
    """One failure opens it, and the next call may probe."""

    def wrap(self, inner: Store) -> Store:
        return BreakerStore(inner, failures=1, retry_seconds=0)


class TestBreakerOverMemory(Breaker, OverMemory):
    pass


class TestBreakerOverDisk(Breaker, OverDisk):
    pass


class Retry:
    def wrap(self, inner: Store) -> Store:
        return RetryStore(inner, backoff_seconds=0.001)


class TestRetryOverMemory(Retry, OverMemory):
    pass


class TestRetryOverDisk(Retry, OverDisk):
    pass


class TestRetryOfEveryThirdCall(OverMemory):
    """A store that fails now and then looks like one that does not.

    No rule on what a write or a removal reports: the first attempt may have done it.
    """

    def wrap(self, inner: Store) -> Store:
        faults = itertools.cycle([Fault.NONE, Fault.NONE, Fault.BEFORE])
        flaky = FlakyStore(inner, faults)
        # One thread may be dealt several faults in a row.
        return RetryStore(flaky, attempts=50, deadline_seconds=60, backoff_seconds=0)


class Timed:
    def wrap(self, inner: Store) -> Store:
        return TimedStore(inner, lambda *_: None)


class TestTimedOverMemory(Timed, OverMemory):
    pass


class TestTimedOverDisk(Timed, OverDisk):
    pass


class TestSlowOverMemory(OverMemory):
    def wrap(self, inner: Store) -> Store:
        return SlowStore(inner, 0.0001)


class TestCompressedOverMemory(OverMemory):
    traits = VARIABLE
    variable = True
    inner_bytes = BLOCK_BYTES + FRAME_OVERHEAD_BYTES

    def wrap(self, inner: Store) -> Store:
        return CompressedStore(inner, 2)

    def value(self, number: int, length: int) -> bytes:
        """Some that shrink and some that do not."""
        value = super().value(number, length)
        return value if number % 2 else value[: length // 2] + bytes(length - length // 2)


class Quantized:
    inner_bytes = quantized_bytes(BLOCK_BYTES, "float32")

    def wrap(self, inner: Store) -> Store:
        return QuantizedStore(inner, "float32", block_bytes=BLOCK_BYTES)

    def value(self, number: int, length: int) -> bytes:
        """Whole numbers that 8 bits hold without loss, and one infinity."""
        numbers = np.random.default_rng(number).integers(-126, 127, length // 4).astype("<f4")
        numbers[number] = np.inf
        return numbers.tobytes()


class TestQuantizedOverMemory(Quantized, OverMemory):
    pass


class TestQuantizedOverAVariableStore(Quantized, OverMemory):
    variable = True


class TestQuantizedOverDisk(Quantized, OverDisk):
    pass


class TestAllTogether(OverMemory):
    """As a remote store would be wrapped."""

    traits = VARIABLE
    variable = True
    inner_bytes = BLOCK_BYTES + FRAME_OVERHEAD_BYTES

    def wrap(self, inner: Store) -> Store:
        timed = TimedStore(CompressedStore(inner, 2), lambda *_: None)
        retry = RetryStore(timed, backoff_seconds=0.001)
        return BreakerStore(LeadingStore(retry), failures=1, retry_seconds=0)


def test_only_the_suite_needs_the_testing_extra_and_only_compression_zstandard() -> None:
    program = (
        "import importlib, pkgutil, sys, kvstrata.storage, kvstrata.manager\n"
        "for package in (kvstrata.storage, kvstrata.manager):\n"
        "    for found in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(found.name)\n"
        "print(*{'pytest', 'hypothesis', 'zstandard', 'kvstrata.testing'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "\n"
