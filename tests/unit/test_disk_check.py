"""A check counts every kind of damage and writes nothing; a repair keeps every good block."""

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvstrata.core.errors import ConfigError, FormatError
from kvstrata.core.types import Read, Write
from kvstrata.storage.disk import DiskStore
from kvstrata.storage.disk_check import check_store
from kvstrata.storage.disk_system import FileSystem

BLOCK_BYTES = 5000
SLOT_BYTES = 12288
FIRST, SECOND = b"a" * 16, b"b" * 16
KEYS = [FIRST + bytes([n]) * 32 for n in range(4)] + [SECOND + bytes([n]) * 32 for n in (4, 5)]


def make(paths: Sequence[Path]) -> DiskStore:
    return DiskStore(
        paths,
        block_bytes=BLOCK_BYTES,
        capacity_bytes=8 * SLOT_BYTES,
        max_blocks_per_file=2,
        lock_timeout_seconds=0,
    )


def block(number: int) -> bytes:
    return bytes([number + 1]) * BLOCK_BYTES


def served(paths: Sequence[Path]) -> list[bool]:
    """Which blocks the store serves, all of them right."""
    store = make(paths)
    buffers = [memoryview(bytearray(b"\xee" * BLOCK_BYTES)) for _ in KEYS]
    fates = store.read_into(KEYS, buffers)
    store.close()
    assert Read.CORRUPT not in fates
    for number, (fate, buffer) in enumerate(zip(fates, buffers, strict=True)):
        assert fate is Read.MISS or buffer == block(number)
    return [fate is Read.HIT for fate in fates]


def flip(path: Path, offset_bytes: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset_bytes] ^= 0x10
    path.write_bytes(data)


def snapshot(path: Path) -> dict[str, tuple[bytes, int]]:
    files = [file for file in path.rglob("*") if file.is_file()]
    return {str(file): (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


@pytest.fixture
def made(tmp_path: Path) -> list[Path]:
    """A closed store of 8 slots in two directories: six blocks, slots 0 to 3 in the first."""
    paths = [tmp_path / "one", tmp_path / "two"]
    store = make(paths)
    buffers = [memoryview(block(number)) for number in range(len(KEYS))]
    assert store.write(KEYS, [None] * len(KEYS), buffers) == [Write.STORED] * len(KEYS)
    store.close()
    return paths


class Watched(FileSystem):
    """Notes what is opened for writing, made, renamed or removed; may fail to read a slot."""

    def __init__(self, unreadable: int | None = None) -> None:
        self.changes: list[str] = []
        self.unreadable = unreadable  # an offset

    def open(self, path: Path, flags: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            self.changes.append(f"open {path}")
        return super().open(path, flags)

    def rename(self, old: Path, new: Path) -> None:
        self.changes.append(f"rename {old}")
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self.changes.append(f"unlink {path}")
        super().unlink(path)

    def preadv(self, fd: int, buffers: Sequence[memoryview | bytearray], offset_bytes: int) -> int:
        end = offset_bytes + sum(memoryview(buffer).nbytes for buffer in buffers)
        if self.unreadable is not None and offset_bytes <= self.unreadable < end:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().preadv(fd, buffers, offset_bytes)


def test_a_sound_store_is_sound_and_counted(made: list[Path]) -> None:
    steps: list[tuple[int, int]] = []
    report = check_store(made, progress=lambda *step: steps.append(step))
    assert report.sound
    assert report.good_blocks == {FIRST: 4, SECOND: 2}
    assert report.damaged_blocks == {}
    assert (report.free_slots, report.superblock.slots, report.superblock.directories) == (2, 8, 2)
    assert (steps[0], steps[-1]) == ((0, 6), (6, 6))
    assert not report.repaired


def test_removed_blocks_and_dropped_namespaces_are_no_damage(made: list[Path]) -> None:
    store = make(made)
    store.remove(KEYS[:1])
    store.drop_namespace(SECOND)
    store.close()
    report = check_store(made)
    assert (report.sound, report.good_blocks, report.free_slots) == (True, {FIRST: 3}, 5)


# What is done to a store, what the check says, and which blocks are left by a repair.
DAMAGES: list[tuple[Callable[[Path, Path], object], dict[str, object], list[int]]] = [
    (lambda one, _: flip(one / "kvstrata_0.bin", 0), {"damaged_blocks": {FIRST: 1}}, [0]),
    (
        lambda _, two: flip(two / "kvstrata_0.bin", 2 * SLOT_BYTES - 4096),
        {"damaged_blocks": {SECOND: 1}},
        [5],
    ),
    (lambda one, _: flip(one / "kvstrata.journal", 128 + 130), {"damaged_records": 1}, [1]),
    (lambda one, _: flip(one / "kvstrata.journal", 128 * 7 - 1), {"torn_bytes": 128}, [5]),
    (lambda one, _: os.truncate(one / "kvstrata.journal", 128 * 7 - 1), {"torn_bytes": 127}, [5]),
    (lambda one, _: os.truncate(one / "kvstrata_1.bin", SLOT_BYTES + 5), {"lost_blocks": 1}, [3]),
    (lambda one, _: os.truncate(one / "kvstrata_0.bin", 0), {"lost_blocks": 2}, [0, 1]),
    (lambda _, two: (two / "kvstrata_0.bin").unlink(), {"lost_blocks": 2}, [4, 5]),
    (lambda _, two: (two / "kvstrata_1.bin").unlink(), {"lost_blocks": 0}, []),
    (lambda one, _: (one / "kvstrata.journal").unlink(), {"has_journal": False}, [*range(6)]),
]


@pytest.mark.parametrize(("damage", "found", "gone"), DAMAGES)
def test_each_damage_is_found_and_repair_keeps_all_other_blocks(
    made: list[Path],
    damage: Callable[[Path, Path], object],
    found: dict[str, object],
    gone: list[int],
) -> None:
    damage(*made)
    report = check_store(made)
    assert not report.sound
    assert {name: getattr(report, name) for name in found} == found
    assert sum(report.good_blocks.values()) == len(KEYS) - len(gone)
    assert check_store(made, repair=True).repaired
    again = check_store(made)
    assert (again.sound, again.good_blocks) == (True, report.good_blocks)
    assert again.free_slots == 2 + len(gone)
    assert served(made) == [number not in gone for number in range(len(KEYS))]


@pytest.mark.parametrize("damaged", [False, True])
def test_without_repair_nothing_is_opened_for_writing_or_changed(
    made: list[Path], damaged: bool
) -> None:
    if damaged:
        flip(made[0] / "kvstrata_0.bin", 0)
        (made[1] / "kvstrata_0.bin").unlink()
    before = snapshot(made[0].parent)
    system = Watched()
    assert check_store(made, system=system).sound is not damaged
    assert system.changes == []
    assert snapshot(made[0].parent) == before


def test_a_sound_store_is_not_rewritten_by_a_repair(made: list[Path]) -> None:
    before = snapshot(made[0].parent)
    report = check_store(made, repair=True)
    after = snapshot(made[0].parent)
    for path in made:
        before.pop(str(path / "kvstrata.lock"))
        after.pop(str(path / "kvstrata.lock"))
    assert (report.sound, report.repaired, after) == (True, False, before)


def test_a_repair_changes_no_slot_file_and_no_file_that_is_not_ours(made: list[Path]) -> None:
    strangers = [made[0] / "notes.txt", made[1] / "kvstrata.journal", made[1] / "kvstrata_7.bin"]
    for file in strangers:
        file.write_bytes(b"mine")
    (made[1] / "kvstrata.superblock.tmp").write_bytes(b"left by a crash")
    flip(made[0] / "kvstrata_0.bin", 7)
    before = snapshot(made[0].parent)
    report = check_store(made, repair=True)
    assert report.repaired
    assert report.stray_files == strangers
    after = snapshot(made[0].parent)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    rewritten = {str(path / "kvstrata.lock") for path in made}
    assert changed == {str(made[0] / "kvstrata.journal"), *rewritten}


def test_a_block_that_cannot_be_read_is_damaged_and_its_neighbours_are_good(
    made: list[Path],
) -> None:
    report = check_store(made, system=Watched(unreadable=SLOT_BYTES + 4096))
    assert report.damaged_blocks == {FIRST: 2, SECOND: 1}  # the second slot of each file
    assert report.good_blocks == {FIRST: 2, SECOND: 1}


@pytest.mark.parametrize("repair", [False, True])
def test_a_store_in_use_is_refused_by_name_of_the_process(made: list[Path], repair: bool) -> None:
    store = make(made)
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}") as caught:
        check_store(made, repair=repair)
    assert caught.value.hint
    store.close()
    assert check_store(made, repair=repair).sound


def test_a_store_cannot_be_opened_while_it_is_checked(made: list[Path]) -> None:
    refused = []

    def open_it(_done: int, _total: int) -> None:
        with pytest.raises(ConfigError, match="in use"):
            make(made)
        refused.append(True)

    assert check_store(made, progress=open_it).sound
    assert refused


def test_two_checks_may_run_at_once(made: list[Path]) -> None:
    within = []
    check_store(made, progress=lambda *_: within.append(check_store(made).sound))
    assert set(within) == {True}


class TestRefused:
    def test_directories_out_of_order(self, made: list[Path]) -> None:
        with pytest.raises(FormatError, match=r"is directory 1 of 2 .* expected directory 0 of 2"):
            check_store(made[::-1])

    def test_one_directory_of_two(self, made: list[Path]) -> None:
        with pytest.raises(FormatError, match=r"directory 0 of 2 .* expected directory 0 of 1"):
            check_store(made[:1])

    def test_a_directory_of_another_store(self, made: list[Path], tmp_path: Path) -> None:
        others = [tmp_path / "three", tmp_path / "four"]
        make(others).close()
        with pytest.raises(FormatError, match="expected directory 1 of 2 of store"):
            check_store([made[0], others[1]])

    @pytest.mark.parametrize("missing", [0, 1])
    def test_a_directory_without_a_superblock(self, made: list[Path], missing: int) -> None:
        shutil.rmtree(made[missing])
        with pytest.raises(FormatError, match=f"there is no {made[missing]}"):
            check_store(made)
        assert not made[missing].exists()

    @pytest.mark.parametrize("name", ["kvstrata.superblock", "kvstrata.journal"])
    @pytest.mark.parametrize("repair", [False, True])
    def test_a_damaged_head_says_which_file(
        self, made: list[Path], name: str, repair: bool
    ) -> None:
        flip(made[0] / name, 17)
        before = (made[0] / name).read_bytes()
        with pytest.raises(FormatError, match=f"{name} is damaged") as caught:
            check_store(made, repair=repair)
        assert caught.value.hint
        assert (made[0] / name).read_bytes() == before
