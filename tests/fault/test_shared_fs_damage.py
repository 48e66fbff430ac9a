"""A damaged file in a shared store is ``CORRUPT``, counted and removed; nothing wrong is served."""

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage.shared_fs import SharedFsStore

BLOCK_BYTES = 8192
VALUE_BYTES = 5000
FILE_BYTES = 4096 + VALUE_BYTES
HEADER_END = 152  # the rest of the header page is padding

KEYS = [b"n" * 16 + bytes([number]) * 32 for number in range(3)]


def value(number: int) -> bytes:
    return bytes([number, 0xA5]) * (VALUE_BYTES // 2)


def file_of(path: Path, key: StoreKey) -> Path:
    name = key[16:].hex()
    return path / "blocks" / key[:16].hex() / name[:2] / name


def read(store: SharedFsStore, key: StoreKey, buffer_bytes: int = BLOCK_BYTES) -> Read:
    """The fate of *key*, read into a buffer that already holds the right bytes."""
    number = KEYS.index(key)
    buffer = memoryview(bytearray(value(number).ljust(BLOCK_BYTES, b"\xee")[:buffer_bytes]))
    (fate,) = store.read_into([key], [buffer])
    assert fate is not Read.HIT or buffer[:VALUE_BYTES] == value(number)
    return fate


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> Iterator[SharedFsStore]:
    store = SharedFsStore(path, block_bytes=BLOCK_BYTES)
    fates = store.write(KEYS, [None, *KEYS[:-1]], [memoryview(value(n)) for n in range(3)])
    assert fates == [Write.STORED] * 3
    yield store
    store.close()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


def assert_dropped(store: SharedFsStore, path: Path, key: StoreKey, corrupt_blocks: int) -> None:
    assert store.statistics().corrupt_blocks == corrupt_blocks
    assert not file_of(path, key).exists()
    assert store.exists([key]) == [False]
    assert read(store, key) is Read.MISS
    assert store.write([key], [None], [memoryview(value(KEYS.index(key)))]) == [Write.STORED]
    assert read(store, key) is Read.HIT


def flip(file: Path, position: int, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.write_bytes(data)


@pytest.mark.parametrize("buffer_bytes", [VALUE_BYTES, BLOCK_BYTES])
def test_a_flipped_bit_in_any_byte_of_the_header_is_found(
    store: SharedFsStore, path: Path, buffer_bytes: int
) -> None:
    for count, position in enumerate(range(HEADER_END), start=1):
        flip(file_of(path, KEYS[1]), position, bit=position % 8)
        assert read(store, KEYS[1], buffer_bytes) is Read.CORRUPT
        assert_dropped(store, path, KEYS[1], corrupt_blocks=count)


@pytest.mark.parametrize("position", [4096, 4097, 6000, 8191, 8192, FILE_BYTES - 1])
def test_a_flipped_bit_in_the_value_is_found(
    store: SharedFsStore, path: Path, position: int
) -> None:
    flip(file_of(path, KEYS[1]), position, bit=3)
    assert read(store, KEYS[1]) is Read.CORRUPT
    assert_dropped(store, path, KEYS[1], corrupt_blocks=1)


@pytest.mark.parametrize(
    "length", [0, 1, HEADER_END, 4095, 4096, 4097, 8192, FILE_BYTES - 1, FILE_BYTES + 1, 20_000]
)
def test_a_file_of_a_wrong_length_is_found(store: SharedFsStore, path: Path, length: int) -> None:
    os.truncate(file_of(path, KEYS[1]), length)
    assert read(store, KEYS[1]) is Read.CORRUPT
    assert_dropped(store, path, KEYS[1], corrupt_blocks=1)


def test_zeros_where_data_never_arrived_are_found(store: SharedFsStore, path: Path) -> None:
    file_of(path, KEYS[1]).write_bytes(bytes(FILE_BYTES))
    assert read(store, KEYS[1]) is Read.CORRUPT
    assert_dropped(store, path, KEYS[1], corrupt_blocks=1)


def test_the_file_of_another_key_is_found(store: SharedFsStore, path: Path) -> None:
    shutil.copyfile(file_of(path, KEYS[0]), file_of(path, KEYS[1]))
    assert read(store, KEYS[1]) is Read.CORRUPT
    assert_dropped(store, path, KEYS[1], corrupt_blocks=1)
    assert read(store, KEYS[0]) is Read.HIT


def test_the_file_of_another_namespace_is_found(store: SharedFsStore, path: Path) -> None:
    other = b"o" * 16 + KEYS[1][16:]
    file_of(path, other).parent.mkdir(parents=True)
    shutil.copyfile(file_of(path, KEYS[1]), file_of(path, other))
    assert store.read_into([other], [memoryview(bytearray(BLOCK_BYTES))]) == [Read.CORRUPT]


def test_a_write_replaces_a_file_too_short_for_any_value(store: SharedFsStore, path: Path) -> None:
    os.truncate(file_of(path, KEYS[1]), 100)
    assert store.exists([KEYS[1]]) == [False]
    assert store.write([KEYS[1]], [None], [memoryview(value(1))]) == [Write.STORED]
    assert read(store, KEYS[1]) is Read.HIT


def test_one_damaged_block_of_a_batch_spoils_no_other(store: SharedFsStore, path: Path) -> None:
    flip(file_of(path, KEYS[1]), 4100, bit=0)
    buffers = [memoryview(bytearray(b"\xee" * VALUE_BYTES)) for _ in KEYS]
    assert store.read_into(KEYS, buffers) == [Read.HIT, Read.CORRUPT, Read.HIT]
    assert [bytes(buffers[0]), bytes(buffers[2])] == [value(0), value(2)]


def test_a_sound_value_too_long_for_the_buffer_is_not_taken_for_damage(
    store: SharedFsStore,
) -> None:
    with pytest.raises(InvariantViolated, match="a value of 5000"):
        read(store, KEYS[1], VALUE_BYTES - 1)
    assert read(store, KEYS[1]) is Read.HIT


@pytest.mark.parametrize("kind", ["symlink", "directory", "fifo"])
def test_what_is_no_file_of_ours_is_a_miss_and_stays(
    store: SharedFsStore, path: Path, kind: str
) -> None:
    file = file_of(path, KEYS[1])
    target = path.parent / "elsewhere"
    file.rename(target)
    if kind == "symlink":
        file.symlink_to(target)
    elif kind == "directory":
        file.mkdir()
    else:
        os.mkfifo(file)
    assert store.exists([KEYS[1]]) == [False]
    assert read(store, KEYS[1]) is Read.MISS
    assert store.remove([KEYS[1]]) == [False]
    assert os.path.lexists(file)
    assert target.exists()


def test_damage_found_while_another_node_replaces_the_file_leaves_the_new_one(
    store: SharedFsStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = file_of(path, KEYS[1]).read_bytes()
    flip(file_of(path, KEYS[1]), 5000, bit=0)
    real = os.lstat

    def replaced_just_now(name: str) -> os.stat_result:
        fresh = path.parent / "fresh"
        fresh.write_bytes(good)
        fresh.rename(name)
        return real(name)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", replaced_just_now)
        assert read(store, KEYS[1]) is Read.CORRUPT
    assert read(store, KEYS[1]) is Read.HIT
