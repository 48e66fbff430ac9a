"""A failing disk is ``TierUnavailable``, and afterwards no slot is missing."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.core.errors import TierUnavailable
from kvstrata.core.types import Read, Write
from kvstrata.storage.disk import DiskStore

BLOCK_BYTES = 4096
SLOTS = 4
KEYS = [b"n" * 16 + bytes([number]) * 32 for number in range(SLOTS)]


def make(path: Path) -> DiskStore:
    return DiskStore([path], block_bytes=BLOCK_BYTES, capacity_bytes=SLOTS * 8192)


def block(number: int) -> memoryview:
    return memoryview(bytes([number]) * BLOCK_BYTES)


def put_all(store: DiskStore) -> list[Write]:
    return store.write(KEYS, [None] * SLOTS, [block(number) for number in range(SLOTS)])


def assert_all_right(store: DiskStore) -> None:
    buffers = [memoryview(bytearray(b"\xee" * BLOCK_BYTES)) for _ in KEYS]
    assert store.read_into(KEYS, buffers) == [Read.HIT] * SLOTS
    assert buffers == [block(number) for number in range(SLOTS)]


def no_space(*_: object) -> int:
    raise OSError(28, "No space left on device")


def over_quota(*_: object) -> int:
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def broken(*_: object) -> int:
    raise OSError(5, "Input/output error")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    store = make(tmp_path / "store")
    yield store
    store.close()


class TestWrite:
    # The data, the journal record, the sync between them.
    @pytest.mark.parametrize("call", ["pwritev", "pwrite", "fdatasync"])
    @pytest.mark.parametrize(
        ("fault", "cause"), [(no_space, "full"), (over_quota, "full"), (broken, "io")]
    )
    def test_a_failed_write_keeps_nothing_and_gives_its_slots_back(
        self,
        store: DiskStore,
        monkeypatch: pytest.MonkeyPatch,
        call: str,
        fault: object,
        cause: str,
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fault)
            with pytest.raises(TierUnavailable, match="cannot be written") as caught:
                put_all(store)
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.cause == cause
        assert store.statistics().blocks == 0
        assert store.exists(KEYS) == [False] * SLOTS
        assert put_all(store) == [Write.STORED] * SLOTS
        assert_all_right(store)

    def test_a_batch_that_fails_in_the_middle_keeps_nothing(
        self, store: DiskStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, calls = os.pwritev, 0

        def third_fails(fd: int, parts: list[memoryview], offset_bytes: int) -> int:
            nonlocal calls
            calls += 1
            return no_space() if calls == 3 else real(fd, parts, offset_bytes)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", third_fails)
            with pytest.raises(TierUnavailable):
                put_all(store)
        assert store.exists(KEYS) == [False] * SLOTS
        assert put_all(store) == [Write.STORED] * SLOTS
        assert_all_right(store)

    def test_short_writes_are_completed(
        self, store: DiskStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.pwritev

        def one_page(fd: int, parts: list[memoryview], offset_bytes: int) -> int:
            return real(fd, [parts[0][:512]], offset_bytes)

        monkeypatch.setattr(os, "pwritev", one_page)
        assert put_all(store) == [Write.STORED] * SLOTS
        assert_all_right(store)

    def test_a_disk_that_takes_no_more_bytes_is_unavailable(
        self, store: DiskStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "pwritev", lambda *_: 0)
        with pytest.raises(TierUnavailable, match="Input/output error"):
            put_all(store)

    def test_a_failed_write_is_not_served_after_a_kill(
        self, store: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "pwrite", no_space)
        with pytest.raises(TierUnavailable):
            put_all(store)
        monkeypatch.undo()
        shutil.copytree(tmp_path / "store", tmp_path / "killed")
        restarted = make(tmp_path / "killed")
        assert restarted.statistics().blocks == 0
        restarted.close()


class TestRead:
    def test_a_failed_read_is_unavailable_and_keeps_the_block(
        self, store: DiskStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put_all(store)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", broken)
            with pytest.raises(TierUnavailable, match="cannot be read"):
                assert_all_right(store)
        assert_all_right(store)
        assert store.remove(KEYS) == [True] * SLOTS  # no slot is still pinned
        assert put_all(store) == [Write.STORED] * SLOTS

    def test_a_short_read_is_corrupt(
        self, store: DiskStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put_all(store)
        real = os.preadv
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", lambda fd, parts, offset: real(fd, parts[:1], offset) // 2)
            fates = store.read_into(KEYS[:1], [memoryview(bytearray(BLOCK_BYTES))])
        assert fates == [Read.CORRUPT]
        assert put_all(store) == [Write.STORED] + [Write.EXISTS] * 3


class TestRemoveAndDrop:
    def test_a_removal_that_cannot_be_journalled_removes_nothing(
        self, store: DiskStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put_all(store)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", no_space)
            with pytest.raises(TierUnavailable, match="cannot be changed"):
                store.remove(KEYS)
        assert_all_right(store)

    def test_a_drop_that_cannot_be_journalled_drops_nothing(
        self, store: DiskStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put_all(store)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", no_space)
            with pytest.raises(TierUnavailable):
                store.drop_namespace(b"n" * 16)
        assert_all_right(store)
        assert store.drop_namespace(b"n" * 16) == SLOTS

    def test_a_drop_that_cannot_be_synced_serves_nothing_and_is_reported(
        self, store: DiskStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put_all(store)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", broken)
            with pytest.raises(TierUnavailable):
                store.drop_namespace(b"n" * 16)
        assert store.exists(KEYS) == [False] * SLOTS
        assert store.drop_namespace(b"n" * 16) == 0
        assert put_all(store) == [Write.STORED] * SLOTS
