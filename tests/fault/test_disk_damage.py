"""Bytes that changed on disk are never served."""

import os
import shutil
from pathlib import Path

import pytest
from tests.disks import listed_keys

from kvstrata.core.types import Read, Write
from kvstrata.storage.disk import DiskStore

BLOCK_BYTES = 8192
SLOT_BYTES = BLOCK_BYTES + 4096
KEYS = [b"n" * 16 + bytes([number]) * 32 for number in range(4)]


def make(path: Path) -> DiskStore:
    return DiskStore(
        [path],
        block_bytes=BLOCK_BYTES,
        capacity_bytes=4 * SLOT_BYTES,
        max_blocks_per_file=2,
        lock_timeout_seconds=0,
    )


def block(number: int) -> bytes:
    return bytes([number]) * BLOCK_BYTES


def read(store: DiskStore) -> list[Read]:
    """The fate of every key, read into dirty buffers; what is a hit is also right."""
    buffers = [memoryview(bytearray(b"\xee" * BLOCK_BYTES)) for _ in KEYS]
    fates = store.read_into(KEYS, buffers)
    for number, (fate, buffer) in enumerate(zip(fates, buffers, strict=True)):
        assert fate is not Read.HIT or buffer == block(number)
    return fates


def flip(path: Path, offset_bytes: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset_bytes] ^= 1
    path.write_bytes(data)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A closed store whose four blocks are in slots 0 to 3."""
    path = tmp_path / "store"
    store = make(path)
    buffers = [memoryview(block(number)) for number in range(4)]
    parents = [None, *KEYS[:3]]
    assert store.write(KEYS, parents, buffers) == [Write.STORED] * 4
    store.close()
    return path


class TestSlots:
    # The payload, then every field of the footer: magic, version, flags, generation, length,
    # key, parent, checksum of the payload, checksum of the footer.
    @pytest.mark.parametrize(
        "offset_bytes",
        [0, 5000, BLOCK_BYTES - 1]
        + [BLOCK_BYTES + n for n in (0, 8, 12, 16, 24, 32, 79, 80, 127, 128, 143, 144, 159)],
    )
    def test_a_flipped_bit_makes_the_block_corrupt_once_and_then_a_miss(
        self, made: Path, offset_bytes: int
    ) -> None:
        flip(made / "kvstrata_0.bin", SLOT_BYTES + offset_bytes)
        store = make(made)
        assert read(store) == [Read.HIT, Read.CORRUPT, Read.HIT, Read.HIT]
        assert read(store) == [Read.HIT, Read.MISS, Read.HIT, Read.HIT]
        assert store.statistics().corrupt_blocks == 1
        assert store.write([KEYS[1]], [None], [memoryview(block(1))]) == [Write.STORED]
        assert read(store) == [Read.HIT] * 4
        store.close()

    def test_a_corrupt_block_stays_forgotten_after_a_kill(self, made: Path, tmp_path: Path) -> None:
        flip(made / "kvstrata_0.bin", 0)
        store = make(made)
        assert read(store)[0] is Read.CORRUPT
        shutil.copytree(made, tmp_path / "killed")
        store.close()
        store = make(tmp_path / "killed")
        assert store.exists(KEYS) == [False, True, True, True]
        store.close()

    def test_bits_that_nobody_reads_do_not_matter(self, made: Path) -> None:
        flip(made / "kvstrata_0.bin", BLOCK_BYTES + 160)
        store = make(made)
        assert read(store) == [Read.HIT] * 4
        store.close()

    def test_two_blocks_that_changed_places_are_both_corrupt(self, made: Path) -> None:
        path = made / "kvstrata_0.bin"
        data = path.read_bytes()
        path.write_bytes(data[SLOT_BYTES:] + data[:SLOT_BYTES])
        store = make(made)
        assert read(store) == [Read.CORRUPT, Read.CORRUPT, Read.HIT, Read.HIT]
        store.close()

    def test_an_older_block_of_the_same_key_is_corrupt(self, made: Path) -> None:
        old = (made / "kvstrata_0.bin").read_bytes()
        store = make(made)
        store.remove([KEYS[0]])
        store.write([KEYS[0]], [None], [memoryview(block(9))])
        store.close()
        (made / "kvstrata_0.bin").write_bytes(old)
        store = make(made)
        assert read(store)[0] is Read.CORRUPT
        store.close()


class TestFiles:
    @pytest.mark.parametrize("left_bytes", [SLOT_BYTES, SLOT_BYTES + 1, 2 * SLOT_BYTES - 1])
    def test_a_truncated_file_loses_the_blocks_beyond_its_end(
        self, made: Path, left_bytes: int
    ) -> None:
        os.truncate(made / "kvstrata_0.bin", left_bytes)
        store = make(made)
        assert read(store) == [Read.HIT, Read.MISS, Read.HIT, Read.HIT]
        assert store.statistics().corrupt_blocks == 1
        assert (made / "kvstrata_0.bin").stat().st_size == 2 * SLOT_BYTES
        store.close()

    def test_a_file_truncated_while_open_makes_short_reads_corrupt(self, made: Path) -> None:
        store = make(made)
        os.truncate(made / "kvstrata_1.bin", SLOT_BYTES - 4096)
        assert read(store) == [Read.HIT, Read.HIT, Read.CORRUPT, Read.CORRUPT]
        store.close()

    def test_stale_bytes_in_the_buffer_do_not_complete_a_short_file(self, made: Path) -> None:
        store = make(made)
        os.truncate(made / "kvstrata_1.bin", SLOT_BYTES - 4096)
        already_right = memoryview(bytearray(block(2)))
        assert store.read_into([KEYS[2]], [already_right]) == [Read.CORRUPT]
        store.close()

    def test_a_missing_file_loses_its_blocks_and_is_made_again(self, made: Path) -> None:
        (made / "kvstrata_1.bin").unlink()
        store = make(made)
        assert read(store) == [Read.HIT, Read.HIT, Read.MISS, Read.MISS]
        assert listed_keys(store) == KEYS[:2]
        fates = store.write(KEYS[2:], [None] * 2, [memoryview(block(2)), memoryview(block(3))])
        assert fates == [Write.STORED] * 2
        assert read(store) == [Read.HIT] * 4
        store.close()

    def test_a_missing_journal_is_an_empty_store(self, made: Path) -> None:
        (made / "kvstrata.journal").unlink()
        store = make(made)
        assert read(store) == [Read.MISS] * 4
        assert listed_keys(store) == []
        store.close()

    @pytest.mark.parametrize("number", range(4))
    def test_a_flipped_bit_in_the_journal_costs_one_block(self, made: Path, number: int) -> None:
        flip(made / "kvstrata.journal", 128 + number * 128 + 60)
        store = make(made)
        assert read(store) == [Read.MISS if n == number else Read.HIT for n in range(4)]
        store.close()

    @pytest.mark.parametrize("left_bytes", [128, 129, 255, 256, 300, 640 - 1])
    def test_a_journal_cut_anywhere_serves_the_records_before_the_cut(
        self, made: Path, left_bytes: int
    ) -> None:
        os.truncate(made / "kvstrata.journal", left_bytes)
        whole = (left_bytes - 128) // 128
        store = make(made)
        assert read(store) == [Read.HIT] * whole + [Read.MISS] * (4 - whole)
        store.close()
