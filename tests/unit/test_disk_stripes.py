"""A store in several directories: all of them are used, and no other is mistaken for one."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.errors import ConfigError, FormatError
from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage.disk import DiskStore
from kvstrata.storage.superblock import Superblock

BLOCK_BYTES = 4096
SLOT_BYTES = 8192
SLOTS = 9


def key(number: int) -> StoreKey:
    return b"n" * 16 + number.to_bytes(32, "big")


def block(number: int) -> bytes:
    return bytes([number]) * BLOCK_BYTES


def make(paths: Sequence[Path], slots: int = SLOTS) -> DiskStore:
    return DiskStore(
        paths,
        block_bytes=BLOCK_BYTES,
        capacity_bytes=slots * SLOT_BYTES,
        max_blocks_per_file=2,
        lock_timeout_seconds=0,
    )


def fill(store: DiskStore, slots: int = SLOTS) -> list[Write]:
    numbers = range(slots)
    return store.write(
        [key(n) for n in numbers], [None] * slots, [memoryview(block(n)) for n in numbers]
    )


def assert_all_there(store: DiskStore, slots: int = SLOTS) -> None:
    buffers = [memoryview(bytearray(b"\xee" * BLOCK_BYTES)) for _ in range(slots)]
    assert store.read_into([key(n) for n in range(slots)], buffers) == [Read.HIT] * slots
    assert buffers == [block(n) for n in range(slots)]


def snapshot(paths: Sequence[Path]) -> dict[Path, bytes]:
    return {
        file: file.read_bytes()
        for path in paths
        if path.exists()
        for file in path.iterdir()
        if file.name != "kvstrata.lock"
    }


def refused(paths: Sequence[Path], match: str, slots: int = SLOTS) -> None:
    before = snapshot(paths)
    with pytest.raises(ConfigError, match=match) as caught:
        make(paths, slots)
    assert caught.value.hint
    assert snapshot(paths) == before


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [tmp_path / name for name in "abc"]


@pytest.fixture
def made(paths: list[Path]) -> list[Path]:
    """The directories of a closed store that is full."""
    store = make(paths)
    assert fill(store) == [Write.STORED] * SLOTS
    store.close()
    return paths


def test_every_directory_holds_its_share_and_the_first_one_the_journal(made: list[Path]) -> None:
    sizes = [sum(f.stat().st_size for f in path.glob("kvstrata_*.bin")) for path in made]
    assert sizes == [3 * SLOT_BYTES] * 3
    assert [(path / "kvstrata.journal").exists() for path in made] == [True, False, False]


def test_blocks_survive_a_restart(made: list[Path]) -> None:
    store = make(made)
    assert_all_there(store)
    store.close()


def test_a_larger_capacity_keeps_the_blocks(made: list[Path]) -> None:
    store = make(made, 20)
    assert fill(store, 20) == [Write.EXISTS] * SLOTS + [Write.STORED] * 11
    store.close()
    store = make(made, 20)
    assert_all_there(store, 20)
    store.close()


def test_a_directory_that_is_gone_is_refused(made: list[Path]) -> None:
    shutil.rmtree(made[1])
    refused(made, "b is empty, expected directory 1 of store")
    assert not made[1].exists()


def test_a_first_directory_that_is_gone_is_refused(made: list[Path]) -> None:
    shutil.rmtree(made[0])
    refused(made, "b is directory 1 of store .* expected directory 1 of an empty one")


def test_another_order_is_refused(made: list[Path]) -> None:
    refused([made[0], made[2], made[1]], "c is directory 2 of store .* expected directory 1")
    refused([made[1], made[0], made[2]], "b is directory 1 of store .* expected directory 0")


@pytest.mark.parametrize("count", [1, 2])
def test_a_part_of_the_directories_is_refused(made: list[Path], count: int) -> None:
    refused(made[:count], f"made with directories=3, expected {count}")


def test_one_directory_more_is_refused(made: list[Path], tmp_path: Path) -> None:
    refused([*made, tmp_path / "d"], "made with directories=3, expected 4")


def test_a_directory_of_another_store_is_refused(made: list[Path], tmp_path: Path) -> None:
    others = [tmp_path / name for name in "xyz"]
    make(others).close()
    refused([made[0], others[1], made[2]], "y is directory 1 of store .* expected directory 1 of")


def test_one_directory_twice_is_refused(paths: list[Path]) -> None:
    refused([paths[0], paths[0]], "one directory twice")
    assert not paths[0].exists()


def test_fewer_slots_than_directories_are_refused(paths: list[Path]) -> None:
    refused(paths, "possible are 3 to", slots=2)


def test_each_directory_is_locked(made: list[Path], tmp_path: Path) -> None:
    store = make(made)
    other = [tmp_path / "other", made[1], made[2]]
    with pytest.raises(FormatError):  # refused before it waits for a lock
        make(other)
    refused(made, f"in use by process {os.getpid()}")
    store.close()


@pytest.mark.parametrize("left", [1, 2])
def test_a_making_that_was_interrupted_goes_on(made: list[Path], left: int) -> None:
    """A crash after the superblocks of the first directories, before the journal."""
    for number, path in enumerate(made):
        for file in path.iterdir():
            if file.name != "kvstrata.superblock" or number >= left:
                file.unlink()
    store = make(made)
    assert store.statistics().blocks == 0
    assert fill(store) == [Write.STORED] * SLOTS
    store.close()


def test_a_missing_slot_file_loses_its_blocks_only(made: list[Path]) -> None:
    (made[1] / "kvstrata_1.bin").unlink()
    store = make(made)
    assert store.statistics().corrupt_blocks == 1
    assert sum(store.exists([key(n) for n in range(SLOTS)])) == SLOTS - 1
    store.close()


@given(
    slots=st.integers(1, 60),
    per_file=st.integers(1, 7),
    directories=st.integers(1, 4),
    stripe=st.integers(1, 9),
)
def test_every_slot_has_a_place_of_its_own_within_its_file(
    slots: int, per_file: int, directories: int, stripe: int
) -> None:
    superblock = Superblock(b"i" * 16, BLOCK_BYTES, slots, per_file, directories, stripe)
    places = {superblock.place(slot) for slot in range(slots)}
    assert places == {
        (directory, file, position)
        for directory in range(directories)
        for file, size in enumerate(superblock.file_slots(directory))
        for position in range(size)
    }
    assert len(places) == slots
