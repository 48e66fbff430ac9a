"""Batches on their way to the disk: side by side, and still one cache."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.caches import (
    ALICE,
    BLOCK_BYTES,
    BOB,
    PATIENCE_SECONDS,
    config,
    contents,
    eventually,
    keys,
    load,
    save,
)
from tests.gated import HeldDrops

from kvstrata.core.errors import TierUnavailable
from kvstrata.core.types import StoreKey, Write
from kvstrata.manager import cascade
from kvstrata.manager.manager import KVManager
from kvstrata.storage.disk import DiskStore

BATCH_BLOCKS = 2


class HeldDisk:
    """Every write waits for ``go``; what was written, dropped and answered is kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.under_way: list[int] = []  # blocks of each write that waits
        self.fates: list[Write] = []
        self.log: list[str] = []
        self._lock = threading.Lock()
        self._write, self._drop = DiskStore.write, DiskStore.drop_namespace
        disk = self

        def write(
            store: DiskStore,
            keys: Sequence[StoreKey],
            parents: Sequence[StoreKey | None],
            buffers: Sequence[memoryview],
        ) -> list[Write]:
            return disk.write(store, keys, parents, buffers)

        def drop(store: DiskStore, namespace: bytes) -> int:
            disk.log.append("drop")
            return disk._drop(store, namespace)

        monkeypatch.setattr(DiskStore, "write", write)
        monkeypatch.setattr(DiskStore, "drop_namespace", drop)

    def write(
        self,
        store: DiskStore,
        keys: Sequence[StoreKey],
        parents: Sequence[StoreKey | None],
        buffers: Sequence[memoryview],
    ) -> list[Write]:
        with self._lock:
            self.under_way.append(len(keys))
        assert self.go.wait(PATIENCE_SECONDS)
        fates = self._write(store, keys, parents, buffers)
        with self._lock:
            self.under_way.remove(len(keys))
            self.fates += fates
            self.log.append("written")
        return fates


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> HeldDisk:
    monkeypatch.setattr(cascade, "WRITE_BATCH_BYTES", BATCH_BLOCKS * BLOCK_BYTES)
    return HeldDisk(monkeypatch)


@pytest.fixture
def manager(disk: HeldDisk, tmp_path: Path) -> Iterator[KVManager]:
    made = KVManager(config(12, tmp_path, disk_slots=8), block_bytes=BLOCK_BYTES)
    yield made
    disk.go.set()
    made.check()
    made.close()


def written(manager: KVManager) -> None:
    eventually(lambda: manager._lower["disk"].drain(PATIENCE_SECONDS), "blocks are not written")


def test_full_batches_are_written_side_by_side(manager: KVManager, disk: HeldDisk) -> None:
    save(manager, ALICE, keys(*range(8)))
    eventually(lambda: disk.under_way == [BATCH_BLOCKS] * 4, "writes wait for each other")
    disk.go.set()
    written(manager)
    assert disk.fates == [Write.STORED] * 8


def test_batch_that_is_not_full_waits_for_the_one_under_way_and_grows(
    manager: KVManager, disk: HeldDisk
) -> None:
    """Else blocks that come one by one would each cost a sync of the disk."""
    save(manager, ALICE, keys(1))
    eventually(lambda: disk.under_way == [1], "the first is not written")
    save(manager, ALICE, keys(2))
    manager._lower["disk"].wake()
    assert not disk.go.wait(0.05)  # time to do wrong
    assert disk.under_way == [1]
    save(manager, ALICE, keys(3))
    eventually(lambda: disk.under_way == [1, 2], "the full batch is not written")
    disk.go.set()
    written(manager)
    assert disk.fates == [Write.STORED] * 3


def test_blocks_on_their_way_have_their_room(manager: KVManager, disk: HeldDisk) -> None:
    disk.go.set()
    save(manager, BOB, keys(*range(8)))
    written(manager)
    disk.go.clear()
    save(manager, ALICE, keys(*range(6)))
    eventually(lambda: disk.under_way == [BATCH_BLOCKS] * 3, "writes wait for each other")
    disk.go.set()
    written(manager)
    assert set(disk.fates) == {Write.STORED}
    assert manager.stats().tiers[1].used_blocks == 8


def test_more_than_the_disk_holds_is_not_under_way_at_once(
    manager: KVManager, disk: HeldDisk
) -> None:
    save(manager, ALICE, keys(*range(11)))
    eventually(lambda: sum(disk.under_way) == 8, "the disk is not used")
    disk.go.set()
    written(manager)
    assert set(disk.fates) == {Write.STORED}
    assert manager.stats().tiers[1].used_blocks == 8


def test_reset_waits_for_what_is_under_way(manager: KVManager, disk: HeldDisk) -> None:
    save(manager, ALICE, keys(*range(4)))
    eventually(lambda: len(disk.under_way) == 2, "writes wait for each other")
    resetting = threading.Thread(target=manager.reset, args=[ALICE])
    resetting.start()
    eventually(lambda: manager._lower["disk"].owes_drop(ALICE), "nothing is reset")
    save(manager, BOB, keys(*range(4)))
    disk.go.set()
    resetting.join(PATIENCE_SECONDS)
    written(manager)
    assert disk.log == ["written"] * 2 + ["drop"] + ["written"] * 2
    assert load(manager, ALICE, keys(0)) == []
    assert load(manager, BOB, keys(*range(4))) == contents(BOB, keys(*range(4)))


def test_refused_resets_of_one_namespace_owe_one_drop(manager: KVManager, disk: HeldDisk) -> None:
    """Nothing is written while a drop is owed: when it can be made it forgets all there is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskStore, "drop_namespace", refused)
        for namespace in (ALICE, BOB, ALICE, ALICE):
            with pytest.raises(TierUnavailable, match="it is away"):
                manager.reset(namespace)
    manager.reset(ALICE)
    assert disk.log == ["drop"] * 2
    assert not any(manager._lower["disk"].owes_drop(namespace) for namespace in (ALICE, BOB))


def refused(_store: DiskStore, _namespace: bytes) -> int:
    raise TierUnavailable("it is away")


def test_reset_while_a_drop_is_made_owes_another(
    manager: KVManager, disk: HeldDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drop may have passed what another server has written to a shared tier by then."""
    drops = HeldDrops(monkeypatch)
    first, second = (threading.Thread(target=manager.reset, args=[ALICE]) for _ in range(2))
    first.start()
    assert drops.begun.wait(PATIENCE_SECONDS)
    second.start()
    owed = manager._lower["disk"]._owed_drops
    eventually(lambda: owed[ALICE] == 2, "the second reset is not heard of")
    drops.go.set()
    first.join(PATIENCE_SECONDS)
    second.join(PATIENCE_SECONDS)
    assert disk.log == ["drop"] * 2
    assert not owed


def test_writers_do_not_wait_for_a_drop_that_somebody_else_makes(
    manager: KVManager,
    disk: HeldDisk,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor tell of a write that does not end: there is none. And then they go on."""
    monkeypatch.setattr(cascade, "_FORGET_SECONDS", 0.05)
    drops = HeldDrops(monkeypatch)

    def reset() -> None:
        with contextlib.suppress(TierUnavailable):  # a writer may have come first
            manager.reset(ALICE)

    resetting = threading.Thread(target=reset)
    resetting.start()
    assert drops.begun.wait(PATIENCE_SECONDS)
    for prompt in range(4):
        save(manager, BOB, keys(prompt))
        assert not drops.go.wait(0.1)  # time to do wrong
    drops.go.set()
    disk.go.set()
    resetting.join(PATIENCE_SECONDS)
    written(manager)
    assert caplog.text == ""
