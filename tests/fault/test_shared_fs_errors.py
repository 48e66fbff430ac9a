"""A failing file system: full is ``FULL``, a vanished file is a miss, all else ``TierUnavailable``."""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Never

import pytest

from kvstrata.core.errors import ConfigError, TierUnavailable
from kvstrata.core.types import Read, Write
from kvstrata.storage.shared_fs import SharedFsStore, Times

BLOCK_BYTES = 65536
FILE_BYTES = BLOCK_BYTES + 4096
KEYS = [b"n" * 16 + bytes([number]) * 32 for number in range(30)]
AT_ONCE = Times(lease_seconds=0, census_seconds=0)


def block(number: int) -> memoryview:
    return memoryview(bytes([number]) * BLOCK_BYTES)


def put(store: SharedFsStore, number: int) -> Write:
    (fate,) = store.write([KEYS[number]], [None], [block(number)])
    return fate


def read(store: SharedFsStore, number: int) -> Read:
    buffer = memoryview(bytearray(b"\xee" * BLOCK_BYTES))
    (fate,) = store.read_into([KEYS[number]], [buffer])
    assert fate is not Read.HIT or buffer == block(number)
    return fate


def leftovers(path: Path) -> list[Path]:
    return [*path.rglob("*.tmp")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> Iterator[SharedFsStore]:
    store = SharedFsStore(path, block_bytes=BLOCK_BYTES)
    yield store
    store.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "kvstrata-test", str(mount)],
        check=False,
        capture_output=True,
    )
    if done.returncode:
        pytest.skip(f"mount: {done.stderr.decode()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


class TestFullFileSystem:
    def test_a_full_file_system_is_full_and_keeps_what_it_has(self, small: Path) -> None:
        store = SharedFsStore(small / "store", block_bytes=BLOCK_BYTES)
        fates = store.write(KEYS, [None] * len(KEYS), [block(n) for n in range(len(KEYS))])
        stored = fates.count(Write.STORED)
        assert 8 < stored < 16
        assert fates == [Write.STORED] * stored + [Write.FULL] * (len(KEYS) - stored)
        assert leftovers(small) == []
        assert [read(store, n) for n in range(stored + 1)] == [Read.HIT] * stored + [Read.MISS]
        assert store.statistics().blocks == stored
        store.remove(KEYS[:2])
        assert put(store, 20) is Write.STORED

    def test_a_node_that_comes_to_a_full_file_system_can_evict(self, small: Path) -> None:
        store = SharedFsStore(small / "store", block_bytes=BLOCK_BYTES)
        store.write(KEYS, [None] * len(KEYS), [block(n) for n in range(len(KEYS))])
        stored = store.statistics().blocks
        room = os.statvfs(small)
        (small / "filler").write_bytes(bytes(room.f_bavail * room.f_frsize))
        late = SharedFsStore(
            small / "store", block_bytes=BLOCK_BYTES, capacity_bytes=5 * FILE_BYTES, times=AT_ONCE
        )
        assert late.sweep() == stored - 4
        assert late.statistics().blocks == 4
        assert put(late, 20) is Write.STORED

    @pytest.mark.parametrize("call", ["open", "pwritev", "fdatasync", "close", "mkdir"])
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
    def test_no_room_at_any_step_of_a_write_is_full_and_leaves_nothing(
        self,
        store: SharedFsStore,
        path: Path,
        monkeypatch: pytest.MonkeyPatch,
        call: str,
        number: int,
    ) -> None:
        with monkeypatch.context() as patch:
            fail_writes(patch, call, number)
            assert put(store, 1) is Write.FULL
        assert store.statistics().blocks == 0
        assert leftovers(path) == []
        assert store.exists([KEYS[1]]) == [False]
        assert put(store, 1) is Write.STORED
        assert read(store, 1) is Read.HIT


def fail_writes(patch: pytest.MonkeyPatch, call: str, number: int) -> None:
    """Make *call* fail with *number*; a close reports what the writes before it did."""
    real = getattr(os, call)

    def fail(*args: object, **kwargs: object) -> Never:
        if call == "close":
            real(*args, **kwargs)
        raise OSError(number, os.strerror(number))

    patch.setattr(os, call, fail)


class TestErrors:
    @pytest.mark.parametrize("call", ["open", "pwritev", "fdatasync", "close", "rename", "mkdir"])
    def test_a_failed_write_is_unavailable_and_leaves_nothing(
        self, store: SharedFsStore, path: Path, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        with monkeypatch.context() as patch:
            fail_writes(patch, call, errno.EIO)
            with pytest.raises(TierUnavailable, match="cannot be written") as caught:
                put(store, 1)
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.hint is not None
        assert store.statistics().blocks == 0
        assert leftovers(path) == []
        assert put(store, 1) is Write.STORED

    @pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
    def test_a_directory_that_a_stale_cache_shows_and_that_is_gone_is_no_broken_store(
        self, store: SharedFsStore, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        with monkeypatch.context() as patch:
            fail_writes(patch, "open", number)
            assert put(store, 1) is Write.FULL
        assert store.statistics().blocks == 0
        assert put(store, 1) is Write.STORED

    def test_short_writes_and_reads_are_completed(
        self, store: SharedFsStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write, fill = os.pwritev, os.preadv

        def write_less(fd: int, parts: list[memoryview], offset_bytes: int) -> int:
            return write(fd, [parts[0][:12288]], offset_bytes)

        def fill_less(fd: int, parts: list[memoryview], offset_bytes: int) -> int:
            return fill(fd, [parts[0][:12288]], offset_bytes)

        monkeypatch.setattr(os, "pwritev", write_less)
        monkeypatch.setattr(os, "preadv", fill_less)
        assert put(store, 1) is Write.STORED
        assert read(store, 1) is Read.HIT

    @pytest.mark.parametrize("call", ["open", "fstat", "preadv"])
    def test_a_file_that_another_node_replaces_during_a_read_is_a_miss(
        self, store: SharedFsStore, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        put(store, 1)
        with monkeypatch.context() as patch:
            fail_writes(patch, call, errno.ESTALE)
            assert read(store, 1) is Read.MISS
        assert store.statistics().corrupt_blocks == 0
        assert read(store, 1) is Read.HIT

    def test_a_stale_name_is_not_there(
        self, store: SharedFsStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(store, 1)
        with monkeypatch.context() as patch:
            fail_writes(patch, "lstat", errno.ESTALE)
            assert store.exists([KEYS[1]]) == [False]
            assert store.remove([KEYS[1]]) == [False]
        assert read(store, 1) is Read.HIT

    @pytest.mark.parametrize("call", ["open", "fstat", "preadv"])
    def test_a_failed_read_is_unavailable_and_removes_nothing(
        self, store: SharedFsStore, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        put(store, 1)
        with monkeypatch.context() as patch:
            fail_writes(patch, call, errno.EIO)
            with pytest.raises(TierUnavailable, match="cannot be read"):
                read(store, 1)
        assert read(store, 1) is Read.HIT

    @pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
    def test_a_last_use_that_cannot_be_renewed_does_not_fail_the_read(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        store = SharedFsStore(path, block_bytes=BLOCK_BYTES, times=Times(touch_seconds=-1))
        put(store, 1)
        fail_writes(monkeypatch, "utime", number)
        assert read(store, 1) is Read.HIT

    def test_a_block_that_is_evicted_while_it_is_open_is_still_read_right(
        self, store: SharedFsStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(store, 1)
        real = os.preadv

        def remove_first(fd: int, parts: list[memoryview], offset_bytes: int) -> int:
            store.remove([KEYS[1]])
            return real(fd, parts, offset_bytes)

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", remove_first)
            assert read(store, 1) is Read.HIT
        assert read(store, 1) is Read.MISS

    def test_a_namespace_dropped_during_a_write_does_not_fail_it(
        self, store: SharedFsStore, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = SharedFsStore(path, block_bytes=BLOCK_BYTES)
        put(store, 2)
        real, drops = os.fdatasync, [b"n" * 16]

        def drop_first(fd: int) -> None:
            if drops:
                other.drop_namespace(drops.pop())
            real(fd)

        monkeypatch.setattr(os, "fdatasync", drop_first)
        assert put(store, 1) is Write.STORED
        assert [read(store, 1), read(store, 2)] == [Read.HIT, Read.MISS]
        assert leftovers(path) == []


class TestMount:
    def test_a_mount_that_has_gone_is_unavailable_and_not_written_below(
        self, store: SharedFsStore, path: Path
    ) -> None:
        put(store, 1)
        path.rename(path.with_name("unmounted"))
        path.mkdir()
        for call in (
            lambda: store.exists(KEYS),
            lambda: read(store, 1),
            lambda: put(store, 2),
            lambda: store.remove(KEYS),
            lambda: store.drop_namespace(KEYS[0][:16]),
            store.sweep,
        ):
            with pytest.raises(TierUnavailable) as caught:
                call()
            assert "mounted" in str(caught.value.hint)
        assert list(path.iterdir()) == []

    def test_a_mount_that_became_read_only_serves_and_takes_nothing(self, small: Path) -> None:
        store = SharedFsStore(small / "store", block_bytes=BLOCK_BYTES)
        put(store, 1)
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        assert read(store, 1) is Read.HIT
        for call in (lambda: put(store, 2), lambda: store.remove(KEYS[:2]), store.sweep):
            with pytest.raises(TierUnavailable, match="Read-only file system"):
                call()
        with pytest.raises(ConfigError, match="not readable and writable"):
            SharedFsStore(small / "store", block_bytes=BLOCK_BYTES)
        assert read(store, 1) is Read.HIT
