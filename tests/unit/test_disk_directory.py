"""What a disk store refuses to open, and that refusing changes nothing."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvstrata.core.errors import ConfigError, FormatError, KVStrataError
from kvstrata.core.types import Write
from kvstrata.storage.disk import DiskStore
from kvstrata.storage.disk_directory import Reservation
from kvstrata.storage.disk_lock import LOCK_NAME

BLOCK_BYTES = 4096
SLOT_BYTES = 8192
KEY = b"k" * 48


def make(
    path: Path,
    slots: int = 4,
    *,
    block_bytes: int = BLOCK_BYTES,
    max_blocks_per_file: int = 3,
    lock_timeout_seconds: float = 0,
) -> DiskStore:
    return DiskStore(
        [path],
        block_bytes=block_bytes,
        capacity_bytes=slots * SLOT_BYTES,
        max_blocks_per_file=max_blocks_per_file,
        lock_timeout_seconds=lock_timeout_seconds,
    )


def snapshot(path: Path) -> dict[str, bytes]:
    files = {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}
    files.pop("kvstrata.lock", None)
    return files


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A closed store of 4 slots with one block."""
    path = tmp_path / "store"
    store = make(path)
    assert store.write([KEY], [None], [memoryview(bytes(BLOCK_BYTES))]) == [Write.STORED]
    store.close()
    return path


def refused(path: Path, error: type[KVStrataError], match: str, **wanted: int) -> None:
    before = snapshot(path)
    with pytest.raises(error, match=match) as caught:
        make(path, **wanted)
    assert caught.value.hint
    assert snapshot(path) == before


class TestGeometry:
    def test_another_block_size_is_refused(self, made: Path) -> None:
        match = r"store was made with block_bytes=4096, expected 100"
        refused(made, FormatError, match, block_bytes=100)

    def test_another_number_of_blocks_per_file_is_refused(self, made: Path) -> None:
        match = "made with max_blocks_per_file=3, expected 2"
        refused(made, FormatError, match, max_blocks_per_file=2)

    def test_a_smaller_capacity_is_refused(self, made: Path) -> None:
        refused(
            made,
            ConfigError,
            "holds 4 slots for blocks of 4096 bytes .32768 bytes.*capacity is 3 slots",
            slots=3,
        )

    @pytest.mark.parametrize("slots", [0, 2**32])
    def test_an_impossible_capacity_is_refused(self, tmp_path: Path, slots: int) -> None:
        refused(tmp_path, ConfigError, "possible are 1 to", slots=slots)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("wanted", [{"block_bytes": 0}, {"max_blocks_per_file": 0}])
    def test_nothing_may_be_zero(self, tmp_path: Path, wanted: dict[str, int]) -> None:
        with pytest.raises(ConfigError, match="must be positive"):
            make(tmp_path, **wanted)


class TestSuperblock:
    @pytest.mark.parametrize("offset_bytes", [0, 16, 24, 32, 40, 48, 64, 68, 72, 80, 95])
    def test_a_flipped_bit_is_refused(self, made: Path, offset_bytes: int) -> None:
        path = made / "kvstrata.superblock"
        data = bytearray(path.read_bytes())
        data[offset_bytes] ^= 1
        path.write_bytes(data)
        refused(made, FormatError, "no superblock|is damaged")

    def test_another_format_version_is_refused(self, made: Path) -> None:
        path = made / "kvstrata.superblock"
        data = bytearray(path.read_bytes())
        data[8] = 7
        path.write_bytes(data)
        refused(made, FormatError, "has format version 7, this release reads version 2")

    def test_a_truncated_superblock_is_refused(self, made: Path) -> None:
        os.truncate(made / "kvstrata.superblock", 95)
        refused(made, FormatError, "no superblock")

    def test_our_files_without_a_superblock_are_refused(self, made: Path) -> None:
        (made / "kvstrata.superblock").unlink()
        refused(made, FormatError, r"is not empty \(found 'kvstrata.journal'\)")


class TestPath:
    def test_a_directory_of_somebody_else_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("x")
        refused(tmp_path, FormatError, r"is not empty \(found 'thesis.txt'\)")
        assert os.listdir(tmp_path) == ["thesis.txt"]

    def test_a_fresh_file_system_counts_as_empty(self, tmp_path: Path) -> None:
        (tmp_path / "lost+found").mkdir()
        make(tmp_path).close()

    def test_a_file_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_text("x")
        with pytest.raises(ConfigError, match="is not a directory"):
            make(path)
        assert path.read_text() == "x"

    def test_a_place_that_cannot_be_made_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="disk store /proc/kvstrata"):
            make(Path("/proc/kvstrata"))

    def test_an_unwritable_directory_is_refused(
        self, made: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
        refused(made, ConfigError, "is not readable and writable by uid")


class TestRoom:
    def test_more_than_the_file_system_has_free_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"its file system has \d+ free"):
            make(tmp_path / "store", slots=2**28, max_blocks_per_file=2**28)
        assert list(tmp_path.iterdir()) == []

    def test_what_our_own_files_occupy_counts_as_free(
        self, made: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The files of 4 slots are there already; only journal room is still to come."""
        real = os.statvfs(made)
        fields = list(real)
        fields[4] = (65536 + 4) * 128 // real.f_frsize + 1  # f_bavail
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
        make(made).close()
        refused(made, ConfigError, "with 8 slots needs", slots=8)

    @pytest.mark.parametrize("fails_at", [1, 2])
    def test_a_disk_that_fills_up_while_the_store_is_made_is_left_clean(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
    ) -> None:
        monkeypatch.setattr(os, "posix_fallocate", _full_at(fails_at))
        with pytest.raises(ConfigError, match="No space left on device") as caught:
            make(tmp_path / "store")
        assert "capacity" in (caught.value.hint or "")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("fails_at", [1, 2, 3])
    def test_a_disk_that_fills_up_while_the_store_grows_is_left_as_it_was(
        self, made: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
    ) -> None:
        before = snapshot(made)
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", _full_at(fails_at))
            if fails_at == 3:  # files 1 and 2 change, file 0 is full size already
                make(made, slots=8).close()
                return
            with pytest.raises(ConfigError, match="No space left on device"):
                make(made, slots=8)
        assert snapshot(made) == before
        store = make(made)
        assert store.exists([KEY]) == [True]
        store.close()

    def test_a_failure_at_the_last_step_takes_everything_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.rename

        def fail(old: Path, new: Path) -> None:
            if new.name == "kvstrata.journal":
                raise OSError(5, "Input/output error")
            real(old, new)

        monkeypatch.setattr(os, "rename", fail)
        descriptors = set(os.listdir("/proc/self/fd"))
        with pytest.raises(ConfigError, match="Input/output error"):
            make(tmp_path / "store")
        assert list(tmp_path.iterdir()) == []
        assert set(os.listdir("/proc/self/fd")) <= descriptors


def _full_at(call: int) -> Callable[[int, int, int], None]:
    real, calls = os.posix_fallocate, 0

    def allocate(fd: int, offset_bytes: int, count_bytes: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            real(fd, offset_bytes, count_bytes // 2)  # what a full disk leaves
            raise OSError(28, "No space left on device")
        real(fd, offset_bytes, count_bytes)

    return allocate


_HOLD = """
import sys
from pathlib import Path
from kvstrata.storage.disk import DiskStore
store = DiskStore([Path(sys.argv[1])], block_bytes=4096, capacity_bytes=4 * 8192,
                  max_blocks_per_file=3)
print("open", flush=True)
sys.stdin.read()
"""


class TestLock:
    def test_a_second_process_is_refused_until_the_first_dies(self, made: Path) -> None:
        with subprocess.Popen(
            [sys.executable, "-c", _HOLD, str(made)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PYTHONPATH": os.pathsep.join(sys.path)},
        ) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"open\n"
            refused(made, ConfigError, rf"in use by process {holder.pid}\n")
            holder.kill()
            holder.wait()
            store = make(made, lock_timeout_seconds=10)
        assert store.exists([KEY]) == [True]
        store.close()

    def test_a_second_store_in_the_same_process_is_refused(self, made: Path) -> None:
        store = make(made)
        refused(made, ConfigError, f"in use by process {os.getpid()}")
        store.close()

    def test_a_reservation_keeps_others_out_and_leaves_nothing_without_a_store(
        self, tmp_path: Path
    ) -> None:
        taken, path = tmp_path / "taken", tmp_path / "above" / "store"
        reservation = Reservation([taken])
        refused(taken, ConfigError, f"in use by process {os.getpid()}")
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
            Reservation([path, taken], lock_timeout_seconds=0)
        assert not (tmp_path / "above").exists()
        reservation.close()
        assert not taken.exists()

    def test_a_store_that_is_opened_in_a_reservation_has_its_locks(self, tmp_path: Path) -> None:
        path = tmp_path / "store"
        reservation = Reservation([path])
        opened = partial(DiskStore, [path], block_bytes=BLOCK_BYTES, reservation=reservation)
        with pytest.raises(ConfigError, match="0 slots"):
            opened(capacity_bytes=1)
        refused(path, ConfigError, "in use by process")
        store = opened(capacity_bytes=4 * SLOT_BYTES, max_blocks_per_file=3)
        reservation.close()
        refused(path, ConfigError, "in use by process")
        store.close()
        make(path).close()

    @pytest.mark.parametrize("what", ["the directory", "what is in it"])
    def test_a_reservation_that_was_deleted_is_made_anew(self, tmp_path: Path, what: str) -> None:
        """Somebody empties the disk tier of a server that has no engine yet."""
        paths = [tmp_path / "a", tmp_path / "b"]
        reservation = Reservation(paths)
        if what == "the directory":
            shutil.rmtree(paths[1])
        else:
            (paths[1] / LOCK_NAME).unlink()
        opened = partial(DiskStore, paths, block_bytes=BLOCK_BYTES, capacity_bytes=4 * SLOT_BYTES)
        store = opened(reservation=reservation)
        for path in paths:
            with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
                Reservation([path], lock_timeout_seconds=0)
        store.close()
        reservation.close()
        opened().close()


class TestInterruptedMaking:
    def test_a_directory_with_only_a_superblock_is_an_empty_store(self, made: Path) -> None:
        for path in made.iterdir():
            if path.name != "kvstrata.superblock":
                path.unlink()
        (made / "kvstrata.journal.tmp").write_bytes(b"half")
        store = make(made)
        assert store.statistics().blocks == 0
        store.close()
        assert not list(made.glob("*.tmp"))

    def test_a_directory_with_only_lock_and_temporary_is_empty(self, tmp_path: Path) -> None:
        (tmp_path / "kvstrata.lock").write_text("1\n")
        (tmp_path / "kvstrata.superblock.tmp").write_bytes(b"half")
        make(tmp_path).close()

    def test_files_that_grew_before_the_superblock_did_are_accepted(
        self, made: Path, tmp_path: Path
    ) -> None:
        shutil.copy(made / "kvstrata.superblock", tmp_path / "old")
        make(made, slots=8).close()
        shutil.copy(tmp_path / "old", made / "kvstrata.superblock")
        store = make(made)
        assert store.statistics().capacity_blocks == 4
        assert store.exists([KEY]) == [True]
        store.close()
