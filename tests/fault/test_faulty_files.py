"""What a failing disk leaves: the double that the tests of the disk store rely on."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fault.lives import Life, make, read

from kvstrata.storage.disk_check import check_store
from kvstrata.storage.disk_files import replace_file, sync_directory
from kvstrata.storage.disk_system import FileSystem
from kvstrata.testing import FaultyFiles, PowerFailure

SEEDS = 60


def outcomes(tmp_path: Path, *, synced: bool, named: bool) -> Iterator[bytes | None]:
    """What becomes of a new file of two sectors, the second written twice, for every seed."""
    for seed in range(SEEDS):
        files, path = FaultyFiles(seed=seed), tmp_path / str(seed)
        fd = files.open(path, os.O_RDWR | os.O_CREAT)
        files.pwrite(fd, b"a" * 1024, 0)
        files.pwrite(fd, b"b" * 512, 512)
        if synced:
            files.fdatasync(fd)
        if named:
            sync_directory(files, tmp_path)
        files.lose_power()
        yield path.read_bytes() if path.exists() else None


def test_synced_data_and_synced_names_stay(tmp_path: Path) -> None:
    assert set(outcomes(tmp_path, synced=True, named=True)) == {b"a" * 512 + b"b" * 512}


def test_a_name_that_was_not_synced_may_be_gone(tmp_path: Path) -> None:
    assert set(outcomes(tmp_path, synced=True, named=False)) == {None, b"a" * 512 + b"b" * 512}


def test_data_that_was_not_synced_is_torn_at_any_sector_and_of_any_length(tmp_path: Path) -> None:
    found = set(outcomes(tmp_path, synced=False, named=True))
    old, a, b = bytes(512), b"a" * 512, b"b" * 512
    assert found <= {b"", *(first + second for first in (old, a) for second in (old, a, b))}
    assert found >= {b"", a + b, old + b, a + old}


def test_a_rename_is_lost_or_kept_as_a_whole(tmp_path: Path) -> None:
    found = set()
    for seed in range(SEEDS):
        path = tmp_path / str(seed)
        path.mkdir()
        (path / "file").write_bytes(b"old")
        files = FaultyFiles(seed=seed)
        files.close(replace_file(files, path, "file", b"new"))
        files.lose_power()
        found.add(tuple(sorted((file.name, file.read_bytes()) for file in path.iterdir())))
    old, new = ("file", b"old"), ("file", b"new")
    assert found == {(old,), (new,), (old, ("file.tmp", b"new"))}


def test_after_the_power_is_off_every_call_fails_and_no_lock_is_held(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = make([tmp_path / "store"], files)
    files.lose_power()
    with pytest.raises(PowerFailure):
        Life(0).write(store, 1)
    make([tmp_path / "store"]).close()


def test_a_call_fails_once_or_from_then_on(tmp_path: Path) -> None:
    for lasting in (False, True):
        files = FaultyFiles(fail_at=2, code=errno.ENOSPC, lasting=lasting)
        fates: list[int | None] = []
        for _ in range(4):
            try:
                files.stat(tmp_path)
                fates.append(0)
            except OSError as e:
                fates.append(e.errno)
        assert fates == ([0, 28, 28, 28] if lasting else [0, 28, 0, 0])


def test_a_store_whose_data_is_not_synced_names_damaged_blocks(tmp_path: Path) -> None:
    class ForgetsData(FaultyFiles):
        """Syncs all but slot files: what a store does that records blocks before their data."""

        def fdatasync(self, fd: int) -> None:
            if not os.readlink(f"/proc/self/fd/{fd}").endswith(".bin"):
                super().fdatasync(fd)

    damaged = 0
    for seed in range(10):
        files, life, path = ForgetsData(seed=seed), Life(seed), tmp_path / str(seed)
        life.run(make([path], files), 4)
        files.lose_power()
        damaged += sum(check_store([path]).damaged_blocks.values())
    assert damaged > 0


def test_the_real_file_system_is_the_same_without_faults(tmp_path: Path) -> None:
    found = []
    for files in (FileSystem(), FaultyFiles()):
        life, path = Life(1), tmp_path / type(files).__name__
        life.run(make([path], files), 6)
        store = make([path])
        found.append(read(store))
        assert found[-1] == life.stored
        store.close()
    assert found[0] == found[1]
