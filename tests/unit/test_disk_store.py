"""The disk store keeps the contract of ``Store`` on a healthy disk."""

import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.disks import listed, listed_keys

from kvstrata.core.errors import InvariantViolated, TierUnavailable
from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage.disk import DiskStore
from kvstrata.storage.store import Store

BLOCK_BYTES = 8192
SLOT_BYTES = BLOCK_BYTES + 4096
NAMESPACE = b"n" * 16
OTHER_NAMESPACE = b"o" * 16


def key(number: int, namespace: bytes = NAMESPACE) -> StoreKey:
    return namespace + number.to_bytes(32, "big")


def block(number: int) -> bytes:
    return bytes([number]) * BLOCK_BYTES


def dirty(block_bytes: int = BLOCK_BYTES) -> memoryview:
    return memoryview(bytearray(b"\xee" * block_bytes))


def aligned(block_bytes: int = BLOCK_BYTES) -> memoryview:
    return memoryview(mmap.mmap(-1, block_bytes))[:block_bytes]


def make(path: Path, slots: int = 4, *, block_bytes: int = BLOCK_BYTES) -> DiskStore:
    slot_bytes = -(-block_bytes // 4096) * 4096 + 4096
    return DiskStore(
        [path],
        block_bytes=block_bytes,
        capacity_bytes=slots * slot_bytes,
        max_blocks_per_file=3,
        lock_timeout_seconds=0,
    )


def put(store: DiskStore, number: int, parent: StoreKey | None = None) -> Write:
    (fate,) = store.write([key(number)], [parent], [memoryview(block(number))])
    return fate


def content(store: DiskStore, number: int) -> bytes | None:
    buffer = dirty()
    (fate,) = store.read_into([key(number)], [buffer])
    return bytes(buffer) if fate is Read.HIT else None


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = make(tmp_path / "store")
    yield store
    store.close()


class TestReadAndWrite:
    def test_a_written_block_is_read_back(self, store: DiskStore) -> None:
        assert put(store, 1) is Write.STORED
        assert content(store, 1) == block(1)

    def test_an_unknown_key_is_a_miss(self, store: DiskStore) -> None:
        assert store.read_into([key(1)], [dirty()]) == [Read.MISS]

    def test_a_batch_has_one_fate_per_key_in_order(self, store: DiskStore) -> None:
        put(store, 2)
        buffers = [dirty(), dirty(), dirty()]
        assert store.read_into([key(1), key(2), key(2)], buffers) == [
            Read.MISS,
            Read.HIT,
            Read.HIT,
        ]
        assert buffers[1] == buffers[2] == block(2)

    def test_an_existing_key_is_not_written_again(self, store: DiskStore) -> None:
        put(store, 1)
        assert store.write([key(1)], [None], [memoryview(block(9))]) == [Write.EXISTS]
        assert content(store, 1) == block(1)

    def test_a_key_twice_in_one_batch_takes_one_slot(self, store: DiskStore) -> None:
        fates = store.write(
            [key(1), key(1)], [None, None], [memoryview(block(1)), memoryview(block(9))]
        )
        assert fates == [Write.STORED, Write.EXISTS]
        assert content(store, 1) == block(1)
        assert store.statistics().blocks == 1

    def test_the_first_blocks_of_a_batch_fill_the_last_slots(self, store: DiskStore) -> None:
        numbers = range(1, 6)
        fates = store.write(
            [key(n) for n in numbers], [None] * 5, [memoryview(block(n)) for n in numbers]
        )
        assert fates == [Write.STORED] * 4 + [Write.FULL]
        assert [content(store, n) for n in numbers] == [*(block(n) for n in range(1, 5)), None]

    def test_the_room_of_a_removed_block_is_used_again(self, store: DiskStore) -> None:
        for number in range(1, 5):
            put(store, number)
        assert store.remove([key(2), key(7), key(2)]) == [True, False, False]
        assert put(store, 5) is Write.STORED
        assert store.exists([key(2), key(5)]) == [False, True]
        assert content(store, 5) == block(5)

    @pytest.mark.parametrize("block_bytes", [1, 4095, 4096, 4097, 12288])
    @pytest.mark.parametrize("offset_bytes", [0, 1])
    def test_any_block_size_and_any_address_round_trips(
        self, tmp_path: Path, block_bytes: int, offset_bytes: int
    ) -> None:
        payload = os.urandom(block_bytes)
        source = aligned(block_bytes + offset_bytes)[offset_bytes:]
        source[:] = payload
        target = aligned(block_bytes + offset_bytes)[offset_bytes:]
        target[:] = b"\xee" * block_bytes
        store = make(tmp_path, block_bytes=block_bytes)
        assert store.write([key(1)], [None], [source]) == [Write.STORED]
        assert store.read_into([key(1)], [target]) == [Read.HIT]
        assert target == payload
        store.close()

    def test_a_file_system_without_direct_io_is_used_through_the_page_cache(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.open

        def refuse_direct(path: str, flags: int, mode: int = 0o777) -> int:
            if flags & os.O_DIRECT:
                raise OSError(22, "Invalid argument")
            return real(path, flags, mode)

        monkeypatch.setattr(os, "open", refuse_direct)
        store = make(tmp_path)
        assert not store.direct
        put(store, 1)
        assert content(store, 1) == block(1)
        store.close()

    def test_a_file_system_with_direct_io_is_used_past_the_page_cache(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.open
        opened: dict[str, bool] = {}

        def accept_direct(path: str, flags: int, mode: int = 0o777) -> int:
            opened[Path(path).name] = bool(flags & os.O_DIRECT)
            return real(path, flags & ~os.O_DIRECT, mode)  # whatever this file system can

        monkeypatch.setattr(os, "open", accept_direct)
        store = make(tmp_path)
        assert store.direct
        put(store, 1)
        assert content(store, 1) == block(1)
        store.close()
        slot_files = {name: how for name, how in opened.items() if name.endswith(".bin")}
        assert slot_files == {"kvstrata_0.bin": True, "kvstrata_1.bin": True}

    def test_a_wrong_buffer_or_key_is_a_bug_of_the_caller(self, store: DiskStore) -> None:
        with pytest.raises(InvariantViolated, match="4096 bytes"):
            store.read_into([key(1)], [dirty(4096)])
        with pytest.raises(InvariantViolated, match="3 bytes"):
            store.write([b"abc"], [None], [memoryview(block(1))])
        with pytest.raises(InvariantViolated, match="3 bytes"):
            store.write([key(1)], [b"abc"], [memoryview(block(1))])


class TestRestart:
    def test_blocks_and_parents_survive_a_restart(self, tmp_path: Path) -> None:
        store = make(tmp_path)
        put(store, 1)
        put(store, 2, parent=key(1))
        store.close()
        store = make(tmp_path)
        assert listed(store) == [(key(1), None), (key(2), key(1))]
        assert [content(store, 1), content(store, 2)] == [block(1), block(2)]
        store.close()

    def test_parents_come_before_children_written_earlier(self, tmp_path: Path) -> None:
        store = make(tmp_path)
        put(store, 3, parent=key(2))
        put(store, 2, parent=key(1))
        put(store, 4, parent=key(9))  # its parent is not stored
        put(store, 1)
        assert listed_keys(store) == [key(4), key(1), key(2), key(3)]
        store.close()

    def test_a_ring_of_parents_still_lists_each_block_once(self, store: DiskStore) -> None:
        put(store, 1, parent=key(2))
        put(store, 2, parent=key(1))
        assert sorted(listed_keys(store)) == [key(1), key(2)]

    def test_removed_blocks_stay_removed(self, tmp_path: Path) -> None:
        store = make(tmp_path)
        put(store, 1)
        put(store, 2)
        store.remove([key(1)])
        store.close()
        store = make(tmp_path)
        assert [content(store, 1), content(store, 2)] == [None, block(2)]
        store.close()

    def test_a_larger_capacity_keeps_the_blocks_and_adds_slots(self, tmp_path: Path) -> None:
        store = make(tmp_path, 4)
        for number in range(1, 5):
            put(store, number)
        store.close()
        store = make(tmp_path, 8)
        assert store.statistics().capacity_blocks == 8
        for number in range(5, 9):
            assert put(store, number) is Write.STORED
        assert put(store, 9) is Write.FULL
        store.close()
        store = make(tmp_path, 8)
        assert all(content(store, number) == block(number) for number in range(1, 9))
        store.close()

    def test_slot_files_are_never_sparse(self, store: DiskStore, tmp_path: Path) -> None:
        sizes = []
        for path in sorted((tmp_path / "store").glob("kvstrata_*.bin")):
            found = path.stat()
            assert found.st_blocks * 512 >= found.st_size
            sizes.append(found.st_size)
        assert sizes == [3 * SLOT_BYTES, SLOT_BYTES]

    def test_files_are_private_to_the_user(self, store: DiskStore, tmp_path: Path) -> None:
        for path in (tmp_path / "store").iterdir():
            assert path.stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700


class TestDropNamespace:
    def test_only_the_blocks_of_the_namespace_go(self, store: DiskStore) -> None:
        put(store, 1)
        put(store, 2)
        store.write([key(1, OTHER_NAMESPACE)], [None], [memoryview(block(7))])
        assert store.drop_namespace(NAMESPACE) == 2
        assert store.exists([key(1), key(2), key(1, OTHER_NAMESPACE)]) == [False, False, True]
        assert store.drop_namespace(NAMESPACE) == 0

    def test_dropped_blocks_do_not_come_back_after_a_kill(self, tmp_path: Path) -> None:
        store = make(tmp_path / "store")
        put(store, 1)
        store.drop_namespace(NAMESPACE)
        put(store, 2)
        shutil.copytree(tmp_path / "store", tmp_path / "killed")
        store.close()
        store = make(tmp_path / "killed")
        assert [content(store, 1), content(store, 2)] == [None, block(2)]
        store.close()

    def test_the_record_is_synced_before_the_call_returns(
        self, store: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        journal = tmp_path / "store" / "kvstrata.journal"
        synced_bytes = []
        real = os.fdatasync

        def note(fd: int) -> None:
            if os.path.samestat(os.fstat(fd), journal.stat()):
                synced_bytes.append(os.fstat(fd).st_size)
            real(fd)

        put(store, 1)
        put(store, 2)
        monkeypatch.setattr(os, "fdatasync", note)
        before = journal.stat().st_size
        store.drop_namespace(NAMESPACE)
        assert journal.stat().st_size == before + 128  # one record, whatever it drops
        assert synced_bytes == [before + 128]


class TestClose:
    def test_every_call_after_close_is_refused(self, tmp_path: Path) -> None:
        store = make(tmp_path)
        store.close()
        store.close()
        for call in (
            lambda: store.exists([key(1)]),
            lambda: store.read_into([key(1)], [dirty()]),
            lambda: store.write([key(1)], [None], [memoryview(block(1))]),
            lambda: store.remove([key(1)]),
            lambda: store.drop_namespace(NAMESPACE),
            store.statistics,
            store.stored,
        ):
            with pytest.raises(TierUnavailable, match="is closed"):
                call()

    def test_close_leaves_no_descriptor_open(self, tmp_path: Path) -> None:
        before = set(os.listdir("/proc/self/fd"))
        store = make(tmp_path)
        put(store, 1)
        store.close()
        assert set(os.listdir("/proc/self/fd")) <= before
