"""Neighbouring slots are one call; what goes wrong in it costs no more than it must."""

import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage.disk import DiskStore
from kvstrata.storage.disk_system import FileSystem

BLOCK_BYTES = 8192
SLOT_BYTES = BLOCK_BYTES + 4096
SLOTS = 12


class Calls(FileSystem):
    """Notes how many bytes each vectored call was asked to move, and can cut reads short."""

    def __init__(self) -> None:
        self.reads: list[int] = []
        self.writes: list[int] = []
        self.holes: list[tuple[int, int]] = []
        self.refuses_holes = False
        self.longest_read_bytes = 1 << 30

    def preadv(self, fd: int, buffers: Sequence[memoryview | bytearray], offset_bytes: int) -> int:
        self.reads.append(sum(memoryview(b).nbytes for b in buffers))
        return min(super().preadv(fd, buffers, offset_bytes), self.longest_read_bytes)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset_bytes: int) -> int:
        self.writes.append(sum(b.nbytes for b in buffers))
        return super().pwritev(fd, buffers, offset_bytes)

    def punch_hole(self, fd: int, offset_bytes: int, length_bytes: int) -> None:
        if self.refuses_holes:
            raise OSError(95, "Operation not supported")
        self.holes.append((offset_bytes, length_bytes))
        super().punch_hole(fd, offset_bytes, length_bytes)


def key(number: int) -> StoreKey:
    return b"n" * 16 + number.to_bytes(32, "big")


def block(number: int) -> bytes:
    return bytes([number]) * BLOCK_BYTES


def aligned(content: bytes) -> memoryview:
    buffer = memoryview(mmap.mmap(-1, BLOCK_BYTES))
    buffer[:] = content
    return buffer


def make(path: Path, calls: Calls, *, per_file: int = 100, discard: bool = False) -> DiskStore:
    return DiskStore(
        [path],
        block_bytes=BLOCK_BYTES,
        capacity_bytes=SLOTS * SLOT_BYTES,
        max_blocks_per_file=per_file,
        discard=discard,
        system=calls,
    )


def put(store: DiskStore, *numbers: int) -> None:
    fates = store.write(
        [key(n) for n in numbers], [None] * len(numbers), [aligned(block(n)) for n in numbers]
    )
    assert fates == [Write.STORED] * len(numbers)


def get(store: DiskStore, *numbers: int) -> list[Read]:
    buffers = [aligned(b"\xee" * BLOCK_BYTES) for _ in numbers]
    fates = store.read_into([key(n) for n in numbers], buffers)
    for number, buffer, fate in zip(numbers, buffers, fates, strict=True):
        assert fate is not Read.HIT or buffer == block(number)
    return fates


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def store(tmp_path: Path, calls: Calls) -> Iterator[DiskStore]:
    store = make(tmp_path, calls)
    calls.reads.clear()
    yield store
    store.close()


class TestCoalescing:
    def test_a_batch_is_one_write_and_one_read(self, store: DiskStore, calls: Calls) -> None:
        put(store, 1, 2, 3, 4)
        assert get(store, 3, 1, 4, 2) == [Read.HIT] * 4
        assert (calls.writes, calls.reads) == ([4 * SLOT_BYTES], [4 * SLOT_BYTES])

    def test_a_gap_between_slots_is_not_read(self, store: DiskStore, calls: Calls) -> None:
        put(store, 1, 2, 3, 4, 5)
        assert get(store, 1, 2, 4, 5, 7) == [Read.HIT] * 4 + [Read.MISS]
        assert calls.reads == [2 * SLOT_BYTES, 2 * SLOT_BYTES]

    def test_a_call_ends_with_its_file(self, tmp_path: Path, calls: Calls) -> None:
        store = make(tmp_path / "store", calls, per_file=3)
        put(store, *range(8))
        assert calls.writes == [3 * SLOT_BYTES, 3 * SLOT_BYTES, 2 * SLOT_BYTES]
        store.close()

    def test_a_key_asked_for_twice_is_read_twice(self, store: DiskStore) -> None:
        put(store, 1, 2)
        assert get(store, 1, 2, 1, 2) == [Read.HIT] * 4

    def test_a_batch_written_into_the_holes_of_removed_blocks_is_right(
        self, store: DiskStore
    ) -> None:
        put(store, *range(SLOTS))
        store.remove([key(n) for n in (1, 4, 5, 9)])
        put(store, 21, 22, 23, 24)
        assert get(store, 0, 21, 2, 22, 23, 24) == [Read.HIT] * 6

    def test_a_buffer_that_is_not_aligned_costs_a_call_of_its_own(
        self, store: DiskStore, calls: Calls
    ) -> None:
        if not store.direct:
            pytest.skip("the file system has no direct reads")
        put(store, 1, 2, 3)
        odd = memoryview(mmap.mmap(-1, BLOCK_BYTES + 1))[1:]
        buffers = [aligned(bytes(BLOCK_BYTES)), odd, aligned(bytes(BLOCK_BYTES))]
        assert store.read_into([key(1), key(2), key(3)], buffers) == [Read.HIT] * 3
        assert buffers == [block(1), block(2), block(3)]
        assert calls.reads == [SLOT_BYTES] * 3


class TestDamage:
    def test_a_damaged_block_takes_no_neighbour_with_it(
        self, store: DiskStore, tmp_path: Path
    ) -> None:
        put(store, 1, 2, 3, 4)
        with (tmp_path / "kvstrata_0.bin").open("r+b") as file:
            file.seek(SLOT_BYTES + 5)
            file.write(b"!")
        assert get(store, 1, 2, 3, 4) == [Read.HIT, Read.CORRUPT, Read.HIT, Read.HIT]

    @pytest.mark.parametrize("left_bytes", [SLOT_BYTES, 2 * SLOT_BYTES - 512, 3 * SLOT_BYTES])
    def test_a_file_cut_short_costs_the_slots_beyond_its_end(
        self, store: DiskStore, tmp_path: Path, left_bytes: int
    ) -> None:
        put(store, 1, 2, 3, 4)
        os.truncate(tmp_path / "kvstrata_0.bin", left_bytes)
        whole = left_bytes // SLOT_BYTES
        assert get(store, 1, 2, 3, 4) == [Read.HIT] * whole + [Read.CORRUPT] * (4 - whole)

    def test_a_read_that_stops_early_is_completed(self, store: DiskStore, calls: Calls) -> None:
        put(store, 1, 2, 3, 4)
        calls.longest_read_bytes = SLOT_BYTES + 4096
        assert get(store, 1, 2, 3, 4) == [Read.HIT] * 4
        assert calls.reads == [4 * SLOT_BYTES, SLOT_BYTES, SLOT_BYTES, SLOT_BYTES]


class TestDiscard:
    def test_the_room_of_blocks_that_go_is_given_back_in_runs(
        self, tmp_path: Path, calls: Calls
    ) -> None:
        store = make(tmp_path, calls, discard=True)
        put(store, *range(SLOTS))
        full = (tmp_path / "kvstrata_0.bin").stat().st_blocks
        store.remove([key(n) for n in (1, 2, 3, 7)])
        assert calls.holes == [(SLOT_BYTES, 3 * SLOT_BYTES), (7 * SLOT_BYTES, SLOT_BYTES)]
        assert (tmp_path / "kvstrata_0.bin").stat().st_blocks == full - 4 * SLOT_BYTES // 512
        put(store, 31, 32, 33, 34)
        assert get(store, 0, 31, 32, 33, 34, 11) == [Read.HIT] * 6
        store.close()

    def test_nothing_is_given_back_unless_asked_for(self, store: DiskStore, calls: Calls) -> None:
        put(store, 1, 2)
        store.remove([key(1)])
        store.drop_namespace(b"n" * 16)
        assert calls.holes == []

    def test_a_file_system_that_cannot_costs_nothing_else(
        self, tmp_path: Path, calls: Calls
    ) -> None:
        store = make(tmp_path, calls, discard=True)
        calls.refuses_holes = True
        put(store, *range(SLOTS))
        assert store.drop_namespace(b"n" * 16) == SLOTS
        put(store, *range(SLOTS))
        store.close()
