"""A shared store keeps the contract of ``Store``, and its directory in order."""

import errno
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strangers import needs_root, stranger

from kvstrata.core.errors import ConfigError, FormatError, InvariantViolated, TierUnavailable
from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage import shared_fs_lease
from kvstrata.storage.shared_fs import SharedFsStore, Times
from kvstrata.storage.shared_fs_directory import check_directory, open_directory
from kvstrata.storage.store import Store
from kvstrata.testing import StoreConformance, Traits

BLOCK_BYTES = 8192
FILE_BYTES = BLOCK_BYTES + 4096
NAMESPACE = b"n" * 16
OTHER_NAMESPACE = b"o" * 16
# What other nodes have added, or this one before a restart, is known after a sweep.
AS_FAR_AS_IT_KNOWS = Traits(persistent=True, variable=True, bounded=False, counts=False)
AT_ONCE = Times(touch_seconds=0, lease_seconds=0, census_seconds=0, abandoned_seconds=0)
AN_HOUR = Times(census_seconds=3600)  # between two counts


def key(number: int, namespace: bytes = NAMESPACE) -> StoreKey:
    return namespace + number.to_bytes(1, "big") + bytes(31)


def block(number: int) -> bytes:
    return bytes([number]) * BLOCK_BYTES


def dirty(size_bytes: int = BLOCK_BYTES) -> memoryview:
    return memoryview(bytearray(b"\xee" * size_bytes))


def aligned(size_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size_bytes))[:size_bytes]


def make(path: Path, slots: int | None = None, times: Times | None = None) -> SharedFsStore:
    return SharedFsStore(
        path,
        block_bytes=BLOCK_BYTES,
        capacity_bytes=None if slots is None else slots * FILE_BYTES,
        times=times or Times(),
    )


def put(store: SharedFsStore, number: int, namespace: bytes = NAMESPACE) -> Write:
    (fate,) = store.write([key(number, namespace)], [None], [memoryview(block(number))])
    return fate


def owner_and_adder(path: Path) -> tuple[SharedFsStore, SharedFsStore]:
    """The node that evicts, and another, which has added twelve blocks and not told it yet."""
    owner, adder = make(path, 20, AN_HOUR), make(path, 20, AN_HOUR)
    owner.sweep()
    for number in range(12):
        put(adder, number)
    return owner, adder


def content(store: SharedFsStore, number: int, namespace: bytes = NAMESPACE) -> bytes | None:
    buffer = dirty()
    (fate,) = store.read_into([key(number, namespace)], [buffer])
    return bytes(buffer) if fate is Read.HIT else None


def block_file(path: Path, number: int) -> Path:
    name = key(number)[16:].hex()
    return path / "blocks" / NAMESPACE.hex() / name[:2] / name


def age(path: Path, number: int, seconds: int) -> None:
    """Say that the block was used *seconds* before the first of January 2026."""
    when = 1767225600 - seconds
    os.utime(block_file(path, number), (when, when))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> Iterator[SharedFsStore]:
    store = make(path)
    yield store
    store.close()


class TestConformance(StoreConformance):
    traits = AS_FAR_AS_IT_KNOWS

    def open_store(self, place: Path) -> Store:
        return make(place / "store", 16)

    def damage(self, store: Store, place: Path, wanted: StoreKey) -> None:
        name = wanted[16:].hex()
        file = place / "store" / "blocks" / wanted[:16].hex() / name[:2] / name
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)

    @contextmanager
    def outage(self, store: Store, place: Path) -> Iterator[None]:
        (place / "store").rename(place / "unmounted")
        yield
        (place / "unmounted").rename(place / "store")


class TestReadAndWrite:
    def test_a_written_block_is_read_back(self, store: SharedFsStore) -> None:
        assert put(store, 1) is Write.STORED
        assert store.exists([key(1), key(2)]) == [True, False]
        assert content(store, 1) == block(1)

    def test_what_one_node_writes_another_finds(self, store: SharedFsStore, path: Path) -> None:
        other = make(path)
        put(store, 1)
        assert other.exists([key(1)]) == [True]
        assert content(other, 1) == block(1)
        assert put(other, 1) is Write.EXISTS
        assert other.remove([key(1)]) == [True]
        assert content(store, 1) is None

    def test_an_unknown_key_is_a_miss(self, store: SharedFsStore) -> None:
        assert store.read_into([key(1)], [dirty()]) == [Read.MISS]

    def test_an_empty_batch_has_no_fates(self, store: SharedFsStore) -> None:
        assert store.exists([]) == store.remove([]) == []
        assert store.read_into([], []) == []
        assert store.write([], [], []) == []

    def test_an_existing_key_keeps_its_value(self, store: SharedFsStore) -> None:
        fates = store.write(
            [key(1), key(1)], [None, key(0)], [memoryview(block(1)), memoryview(block(9))]
        )
        assert fates == [Write.STORED, Write.EXISTS]
        assert content(store, 1) == block(1)

    def test_namespaces_do_not_mix(self, store: SharedFsStore) -> None:
        put(store, 1)
        assert content(store, 1, OTHER_NAMESPACE) is None

    def test_a_removed_block_is_gone_and_can_come_again(self, store: SharedFsStore) -> None:
        put(store, 1)
        assert store.remove([key(1), key(2), key(1)]) == [True, False, False]
        assert content(store, 1) is None
        assert put(store, 1) is Write.STORED

    @given(
        length=st.one_of(st.integers(1, BLOCK_BYTES), st.sampled_from([4096, BLOCK_BYTES])),
        room=st.integers(0, BLOCK_BYTES),
        shift=st.sampled_from([0, 1, 512]),
        fill=st.binary(min_size=1, max_size=32),
        parent=st.sampled_from([None, key(7)]),
    )
    @settings(deadline=None)  # the disk is not always fast
    def test_any_value_at_any_address_comes_back_and_the_rest_is_not_touched(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        length: int,
        room: int,
        shift: int,
        fill: bytes,
        parent: StoreKey | None,
    ) -> None:
        value = (fill * BLOCK_BYTES)[:length]
        buffer_bytes = min(BLOCK_BYTES, length + room)
        source = aligned(shift + length)[shift:]
        source[:] = value
        target = aligned(shift + buffer_bytes)[shift:]
        target[:] = b"\xee" * buffer_bytes
        store = make(tmp_path_factory.mktemp("any") / "store")
        assert store.write([key(1)], [parent], [source]) == [Write.STORED]
        source[:] = b"\xdd" * length
        assert store.read_into([key(1)], [target]) == [Read.HIT]
        assert target[:length] == value
        assert target[length:] == b"\xee" * (buffer_bytes - length)
        assert store.statistics().corrupt_blocks == 0

    def test_a_wrong_buffer_or_key_is_a_bug_of_the_caller(self, store: SharedFsStore) -> None:
        put(store, 1)
        for size_bytes in (0, BLOCK_BYTES + 1):
            with pytest.raises(InvariantViolated, match=f"{size_bytes} bytes"):
                store.read_into([key(1)], [dirty(size_bytes)])
            with pytest.raises(InvariantViolated, match=f"{size_bytes} bytes"):
                store.write([key(2)], [None], [dirty(size_bytes)])
        with pytest.raises(InvariantViolated, match="8191 bytes for a value of 8192"):
            store.read_into([key(1)], [dirty(BLOCK_BYTES - 1)])
        for call in (store.exists, store.remove):
            with pytest.raises(InvariantViolated, match="3 bytes"):
                call([b"abc"])
        with pytest.raises(InvariantViolated, match="3 bytes"):
            store.write([key(2)], [b"abc"], [dirty()])
        with pytest.raises(InvariantViolated, match="15 bytes"):
            store.drop_namespace(b"n" * 15)
        assert content(store, 1) == block(1)

    def test_a_closed_store_is_unavailable(self, store: SharedFsStore) -> None:
        store.close()
        store.close()
        for call in (
            lambda: store.exists([key(1)]),
            lambda: store.read_into([key(1)], [dirty()]),
            lambda: store.write([key(1)], [None], [dirty()]),
            lambda: store.remove([key(1)]),
            lambda: store.drop_namespace(NAMESPACE),
            store.sweep,
            store.statistics,
        ):
            with pytest.raises(TierUnavailable, match="is closed"):
                call()

    def test_threads_that_write_and_read_the_same_keys_see_right_bytes_or_none(
        self, store: SharedFsStore
    ) -> None:
        wrong: list[int] = []

        def work(seed: int) -> None:
            for step in range(40):
                number = (seed * 7 + step * 3) % 5
                put(store, number)
                if content(store, number) not in (None, block(number)):
                    wrong.append(number)
                if step % 4 == seed:
                    store.remove([key(number)])

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert store.statistics().corrupt_blocks == 0

    def test_without_direct_io_the_page_cache_is_used(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(fd: int, command: int, argument: int) -> int:
            raise OSError(22, "Invalid argument")

        monkeypatch.setattr("fcntl.fcntl", refuse)
        store = make(path)
        assert not store.direct
        put(store, 1)
        buffer = aligned(BLOCK_BYTES)
        assert store.read_into([key(1)], [buffer]) == [Read.HIT]
        assert buffer == block(1)


class TestDirectory:
    def test_blocks_survive_a_restart(self, store: SharedFsStore, path: Path) -> None:
        put(store, 1)
        store.close()
        assert content(make(path), 1) == block(1)

    def test_files_are_for_their_owner_only(self, store: SharedFsStore, path: Path) -> None:
        put(store, 1)
        store.sweep()
        modes = {p.is_dir(): p.stat().st_mode & 0o777 for p in path.rglob("*")}
        assert modes == {True: 0o700, False: 0o600}
        assert path.stat().st_mode & 0o777 == 0o700

    def test_nothing_but_the_named_files_is_left(self, store: SharedFsStore, path: Path) -> None:
        put(store, 1)
        store.sweep()
        files = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
        files = {"node" if name.startswith("kvstrata.nodes/") else name for name in files}
        block = str(block_file(path, 1).relative_to(path))
        assert files == {"kvstrata.shared", "kvstrata.owner", "node", block}

    def test_nodes_that_open_a_new_directory_at_once_agree(self, path: Path) -> None:
        start = threading.Barrier(4)
        stores: list[SharedFsStore] = []

        def open_it() -> None:
            start.wait()
            stores.append(make(path))

        threads = [threading.Thread(target=open_it) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(stores) == 4
        put(stores[0], 1)
        assert [content(store, 1) for store in stores] == [block(1)] * 4
        found = {p.name for p in path.iterdir()}
        assert found == {"kvstrata.shared", "kvstrata.nodes", "kvstrata.trash", "blocks"}

    def test_a_directory_of_others_is_refused_and_left_as_it_was(self, path: Path) -> None:
        path.mkdir()
        (path / "thesis.tex").write_text("x")
        with pytest.raises(FormatError, match="not empty") as caught:
            make(path)
        assert caught.value.hint is not None
        assert [p.name for p in path.iterdir()] == ["thesis.tex"]

    def test_what_file_systems_make_themselves_is_no_foreign_file(self, path: Path) -> None:
        (path / "lost+found").mkdir(parents=True)
        (path / ".snapshot").mkdir()
        put(make(path), 1)

    def test_another_block_size_is_refused(self, store: SharedFsStore, path: Path) -> None:
        with pytest.raises(FormatError, match="block_bytes=8192, expected 4096"):
            SharedFsStore(path, block_bytes=4096)

    def test_another_version_is_refused(self, store: SharedFsStore, path: Path) -> None:
        marker = path / "kvstrata.shared"
        data = bytearray(marker.read_bytes())
        data[8] = 2
        marker.write_bytes(data)
        with pytest.raises(FormatError, match="format version 2") as caught:
            make(path)
        assert "the release that wrote it" in str(caught.value.hint)
        assert marker.read_bytes() == data

    @pytest.mark.parametrize("damage", ["empty", "cut", "other magic", "flipped bit"])
    def test_a_damaged_marker_is_refused(
        self, store: SharedFsStore, path: Path, damage: str
    ) -> None:
        marker = path / "kvstrata.shared"
        data = bytearray(marker.read_bytes())
        if damage == "flipped bit":
            data[16] ^= 1
        marker.write_bytes(
            {"empty": b"", "cut": bytes(data[:20]), "other magic": bytes(b"X" + data[1:])}.get(
                damage, bytes(data)
            )
        )
        with pytest.raises(FormatError):
            make(path)

    def test_a_missing_parent_is_refused_as_a_missing_mount(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be opened") as caught:
            make(tmp_path / "not mounted" / "store")
        assert "mount" in str(caught.value.hint)
        assert list(tmp_path.iterdir()) == []

    def test_a_file_in_place_of_the_directory_is_refused(self, path: Path) -> None:
        path.write_text("x")
        with pytest.raises(ConfigError, match="cannot be opened"):
            make(path)

    @pytest.mark.parametrize(("block_bytes", "capacity_bytes"), [(0, None), (8192, 12287)])
    def test_a_capacity_without_room_for_a_block_is_refused(
        self, path: Path, block_bytes: int, capacity_bytes: int | None
    ) -> None:
        with pytest.raises(ConfigError, match="shared store of"):
            SharedFsStore(path, block_bytes=block_bytes, capacity_bytes=capacity_bytes)
        assert not path.exists()

    def test_a_namespace_is_dropped_whole_and_others_stay(
        self, store: SharedFsStore, path: Path
    ) -> None:
        for number in range(3):
            put(store, number)
        put(store, 1, OTHER_NAMESPACE)
        assert store.drop_namespace(NAMESPACE) == 3
        assert store.drop_namespace(NAMESPACE) == 0
        assert store.exists([key(n) for n in range(3)]) == [False] * 3
        assert content(store, 1, OTHER_NAMESPACE) == block(1)
        assert store.statistics().blocks == 1
        assert list((path / "kvstrata.trash").iterdir()) == []
        assert put(store, 1) is Write.STORED


class TestQuota:
    def test_a_full_store_says_so_and_keeps_the_first_blocks_of_a_batch(self, path: Path) -> None:
        store = make(path, 2)
        fates = store.write(
            [key(n) for n in range(4)], [None] * 4, [memoryview(block(n)) for n in range(4)]
        )
        assert fates == [Write.STORED] * 2 + [Write.FULL] * 2
        assert [content(store, n) for n in range(4)] == [block(0), block(1), None, None]
        store.remove([key(0)])
        assert put(store, 2) is Write.STORED

    def test_a_sweep_evicts_what_was_used_longest_ago(self, path: Path) -> None:
        store = make(path, 10)
        for number in range(10):
            put(store, number)
            age(path, number, seconds=(number * 3) % 10)
        assert store.sweep() == 1
        assert store.exists([key(n) for n in range(10)]) == [n != 3 for n in range(10)]
        assert store.statistics().blocks == 9
        assert store.sweep() == 0

    def test_a_block_that_was_read_stays_longer(self, path: Path) -> None:
        store = make(path, 10)
        for number in range(10):
            put(store, number)
            age(path, number, seconds=100 - number)
        assert content(store, 0) == block(0)
        store.sweep()
        assert store.exists([key(0), key(1)]) == [True, False]

    def test_a_read_renews_the_last_use_only_now_and_then(self, path: Path) -> None:
        store = make(path, times=Times(touch_seconds=1000))
        put(store, 1)
        now = int(block_file(path, 1).stat().st_mtime)
        for seconds, renewed in ((500, False), (1500, True)):
            os.utime(block_file(path, 1), (now - seconds, now - seconds))
            content(store, 1)
            assert (block_file(path, 1).stat().st_mtime >= now) is renewed

    def test_values_of_any_length_count_with_their_header(self, path: Path) -> None:
        store = make(path, 1)
        numbers = range(4)
        fates = store.write([key(n) for n in numbers], [None] * 4, [memoryview(b"x")] * 4)
        assert fates == [Write.STORED, Write.STORED, Write.FULL, Write.FULL]

    def test_without_a_capacity_nothing_is_evicted(self, store: SharedFsStore) -> None:
        for number in range(8):
            put(store, number)
        assert store.sweep() == 0
        assert store.statistics().blocks == 8

    def test_one_node_owns_the_quota_and_the_others_learn_from_it(self, path: Path) -> None:
        owner, other = make(path, 10), make(path, 10)
        assert owner.sweep() == other.sweep() == 0
        for number in range(10):
            put(other, number)
        assert other.sweep() == 0  # only tells
        assert owner.statistics().blocks == 0
        assert owner.sweep() == 1
        assert owner.statistics().blocks == 9
        other.sweep()
        assert other.statistics().blocks == 9
        assert put(other, 10) is Write.STORED
        assert put(other, 11) is Write.FULL

    def test_what_a_new_node_finds_is_counted_from_the_start(self, path: Path) -> None:
        owner = make(path, 4)
        for number in range(3):
            put(owner, number)
        owner.sweep()
        late = make(path, 4)
        assert late.statistics().blocks == 3
        assert put(late, 3) is Write.STORED
        assert put(late, 4) is Write.FULL

    def test_a_silent_owner_is_replaced_and_a_living_one_is_not(self, path: Path) -> None:
        times = Times(lease_seconds=0.2)
        owner, other = make(path, 10, times), make(path, 10, times)
        owner.sweep()
        for number in range(10):
            put(owner, number)
        assert other.sweep() == 0
        threading.Event().wait(0.25)  # the lease has to run out
        owner.sweep()
        put(owner, 10)
        assert other.sweep() == 0
        threading.Event().wait(0.25)  # and now nobody renews it
        assert other.sweep() == 1
        assert owner.sweep() == 0

    def test_two_owners_at_once_only_evict_more(self, path: Path) -> None:
        stores = [make(path, 10, AT_ONCE) for _ in range(2)]
        for number in range(10):
            put(stores[number % 2], number)
        for _ in range(3):
            for store in stores:
                store.sweep()
        assert [store.statistics().blocks for store in stores] == [9, 9]

    @pytest.mark.parametrize("damage", ["cut", "flipped bit"])
    def test_a_damaged_lease_says_nothing_and_is_taken_over(self, path: Path, damage: str) -> None:
        first = make(path, 10)
        put(first, 1)
        first.sweep()
        lease = path / "kvstrata.owner"
        data = bytearray(lease.read_bytes())
        data[45] ^= 1  # of the number of blocks
        lease.write_bytes(bytes(data) if damage == "flipped bit" else bytes(data[:50]))
        store = make(path, 10)
        assert store.statistics().blocks == 0
        store.sweep()
        assert store.statistics().blocks == 1
        assert make(path, 10).statistics().blocks == 1

    def test_a_new_count_corrects_what_nobody_told(self, path: Path) -> None:
        store = make(path, 10, AT_ONCE)
        for number in range(4):
            put(store, number)
        store.sweep()
        block_file(path, 0).unlink()
        store.sweep()
        assert store.statistics().blocks == 3

    def test_when_nothing_counted_is_cold_any_more_a_new_count_finds_what_is(
        self, path: Path
    ) -> None:
        store = make(path, 40)
        for number in range(36):
            put(store, number)
            age(path, number, seconds=1000)
        assert store.sweep() == 0
        for number in range(1, 36):
            age(path, number, seconds=number)
        for number in range(36, 40):
            put(store, number)
        assert store.sweep() == 4
        gone = {0, 35, 34, 33}
        assert store.exists([key(n) for n in range(40)]) == [n not in gone for n in range(40)]
        assert store.statistics().blocks == 36

    def test_the_counter_of_a_node_that_is_long_gone_is_forgotten(self, path: Path) -> None:
        gone = make(path)
        put(gone, 1)
        gone.sweep()
        (path / "kvstrata.owner").unlink()
        (counter,) = (path / "kvstrata.nodes").iterdir()
        os.utime(counter, (0, 0))
        store = make(path)
        store.sweep()
        assert not counter.exists()
        assert store.statistics().blocks == 1

    @pytest.mark.parametrize("lost", ["forgotten", "damaged"])
    def test_what_a_node_told_before_it_was_away_is_not_added_again_when_it_is_back(
        self, path: Path, lost: str
    ) -> None:
        owner, away = owner_and_adder(path)
        away.sweep()
        counter = path / "kvstrata.nodes" / away._node
        if lost == "forgotten":
            os.utime(counter, (0, 0))
        else:
            counter.write_bytes(b"?")
        owner._quota._count = None  # a count is due
        assert owner.sweep() == 0
        put(away, 12)
        for blocks in (13, 14):
            assert away.sweep() == owner.sweep() == 0
            assert owner.statistics().blocks == blocks
            away.sweep()
            assert away.statistics().blocks == blocks
            put(away, blocks)

    def test_node_that_is_forgotten_while_it_is_counted_is_counted_once(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The owner sees a counter that is old, the node tells, and then the owner removes it."""
        owner, away = owner_and_adder(path)
        away.sweep()
        counter = path / "kvstrata.nodes" / away._node
        os.utime(counter, (0, 0))
        owner._quota._count = None
        unlink = os.unlink

        def late(name: str) -> None:
            if name == str(counter):
                away.sweep()
            unlink(name)

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", late)
            assert owner.sweep() == 0
        assert not counter.exists()
        for _ in range(2):
            assert away.sweep() == owner.sweep() == 0
            assert owner.statistics().blocks == away.statistics().blocks == 12

    def test_node_that_begins_to_count_anew_is_counted_once_by_an_owner_that_knew_it(
        self, path: Path
    ) -> None:
        """Its counter went after the last count: another node held itself for the owner, say."""
        owner, away = owner_and_adder(path)
        away.sweep()
        owner._quota._count = None
        owner.sweep()
        (path / "kvstrata.nodes" / away._node).unlink()
        put(away, 12)
        away.sweep()
        owner.sweep()
        assert owner.statistics().blocks == 13

    def test_node_that_a_full_file_system_keeps_from_telling_is_counted_when_there_is_room(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It has no counter, but nobody has forgotten it."""
        owner, other = owner_and_adder(path)

        def full(name: str, *rest: object, **kwargs: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

        with monkeypatch.context() as patch:
            patch.setattr(shared_fs_lease, "publish", full)
            other.sweep()
        other.sweep()
        owner.sweep()
        assert owner.statistics().blocks == 12


class TestLeftovers:
    def test_temporary_files_of_dead_writers_go_when_they_are_old(self, path: Path) -> None:
        store = make(path)
        put(store, 1)
        target = block_file(path, 1)
        fresh = target.with_name(f"{target.name}.0123456789abcdef-7.tmp")
        old = target.with_name(f"{target.name}.0123456789abcdef-8.tmp")
        for leftover in (fresh, old):
            leftover.write_bytes(b"half a blo")
        os.utime(old, (0, 0))
        store.sweep()
        assert fresh.exists()
        assert not old.exists()
        assert content(store, 1) == block(1)
        assert store.statistics().blocks == 1

    def test_the_trash_of_a_node_that_died_in_a_drop_is_deleted(self, path: Path) -> None:
        store = make(path)
        put(store, 1)
        (path / "blocks" / NAMESPACE.hex()).rename(path / "kvstrata.trash" / "half-way")
        store.sweep()
        assert list((path / "kvstrata.trash").iterdir()) == []

    def test_an_empty_namespace_goes_and_comes_back_when_it_is_needed(self, path: Path) -> None:
        store = make(path)
        put(store, 1)
        store.remove([key(1)])
        store.sweep()
        assert list((path / "blocks").iterdir()) == []
        assert put(store, 1) is Write.STORED

    def test_files_with_names_that_are_not_ours_are_neither_counted_nor_removed(
        self, path: Path
    ) -> None:
        store = make(path, 2, AT_ONCE)
        put(store, 1)
        strangers = [
            block_file(path, 1).with_name("README"),
            block_file(path, 1).with_name(block_file(path, 1).name + ".bak"),
            path / "blocks" / "notes" / "00" / ("a" * 64),
        ]
        for foreign in strangers:
            foreign.parent.mkdir(parents=True, exist_ok=True)
            foreign.write_bytes(b"x" * 100_000)
            os.utime(foreign, (0, 0))
        folder = block_file(path, 1).with_name("b" * 64)
        folder.mkdir()
        store.sweep()
        assert store.statistics().blocks == 1
        store.drop_namespace(NAMESPACE)
        store.sweep()
        assert [p.name for p in path.rglob("*") if p.name in {"README", "a" * 64}]
        assert len([p for p in path.rglob("*") if p.is_file() and p.stat().st_size == 100_000]) == 3


@needs_root
def test_directory_can_be_made_where_nobody_may_look() -> None:
    """As in a mount where everybody may write, and only its owner lists."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o1733)

        def check_and_open() -> str:
            check_directory(Path(name) / "store")
            open_directory(Path(name) / "store", 4096, "unique")
            return "made"

        with stranger(check_and_open) as answer:
            assert answer == "made"
