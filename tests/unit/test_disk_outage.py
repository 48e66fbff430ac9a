"""A disk that hangs, is full, or cannot read a block, costs what is on it and nothing else."""

import errno
import logging
import os
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
    reads_running,
    save,
    write,
)
from tests.disks import CrowdedFiles

from kvstrata.core.types import BlockKey
from kvstrata.manager import cascade, choices, gets
from kvstrata.manager.manager import KVManager
from kvstrata.manager.tasks import TaskState
from kvstrata.storage.disk import DiskStore
from kvstrata.storage.disk_system import FileSystem
from kvstrata.storage.journal import RECORD_BYTES

PROMPTS = 8


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KVManager]:
    """Eight prompts of four blocks on disk, the last four in host memory as well."""
    monkeypatch.setattr(choices, "_HUNG_SECONDS", 0.05)
    monkeypatch.setattr(gets, "_EXPIRY_SECONDS", 0.01)
    made = KVManager(config(16, tmp_path), block_bytes=BLOCK_BYTES)
    for prompt in range(PROMPTS):
        save(made, ALICE, keys(*[prompt] * 4))
        assert made._lower["disk"].drain(PATIENCE_SECONDS)
    yield made
    made.check()
    made.close()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Reads of the disk end when it is set."""
    answers = threading.Event()
    real = DiskStore.read_into

    def hanging(*args: object) -> object:
        assert answers.wait(PATIENCE_SECONDS)
        return real(*args)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(DiskStore, "read_into", hanging)
    yield answers
    answers.set()


class BadSectors(FileSystem):
    """Cannot read the bytes of ``bad``, or any."""

    def __init__(self) -> None:
        self.bad = range(0)
        self.dead = False
        self.reads = 0

    def preadv(self, fd: int, buffers: Sequence[memoryview | bytearray], offset_bytes: int) -> int:
        self.reads += 1
        end = offset_bytes + sum(len(buffer) for buffer in buffers)
        if self.dead or (offset_bytes < self.bad.stop and self.bad.start < end):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().preadv(fd, buffers, offset_bytes)


def with_bad_sector(manager: KVManager, block: BlockKey) -> BadSectors:
    """The disk can no longer read a sector of *block* of ALICE."""
    storage = manager._storage.disk
    assert storage is not None
    files = BadSectors()
    slot = storage.data._table.slots(storage.data._table.find([ALICE + block]))[0]
    files.bad = range(slot * 2 * BLOCK_BYTES + 512, slot * 2 * BLOCK_BYTES + 1024)
    storage.data._files._system = files
    return files


def is_off(manager: KVManager) -> bool:
    return manager.stats().tiers[1].switched_off


def ask(manager: KVManager, prompt: int) -> int:
    """Ask for a prompt and give it up at once; how many of its blocks are in host memory."""
    task = manager.get_match(ALICE, keys(*[prompt] * 4))
    manager.cancel([task.task_id])
    return len(task.slots)


def test_disk_that_hangs_takes_no_host_memory(manager: KVManager, disk: threading.Event) -> None:
    manager._lower["disk"]._transfer._batch_blocks = 1
    waiting = [manager.get_match(ALICE, keys(*[prompt] * 4)).task_id for prompt in range(2)]
    assert reads_running(manager) == 8
    eventually(lambda: is_off(manager), "the disk is not switched off")
    eventually(
        lambda: not ask(manager, 7) or reads_running(manager) == 4,
        "what is not being read keeps its slots",
    )
    for prompt in range(6):
        assert ask(manager, prompt) == 0
    assert (ask(manager, 6), ask(manager, 7)) == (4, 4), "it was evicted for what cannot be read"
    assert manager.counters.snapshot()["kvstrata_declined_blocks_total{reason=off}"] > 0
    save(manager, BOB, keys(1, 1))
    assert load(manager, BOB, keys(1, 1)) == contents(BOB, keys(1, 1))
    disk.set()
    eventually(lambda: not reads_running(manager), "a read does not end")
    manager.cancel(waiting)


def test_disk_that_answers_again_is_used_again(manager: KVManager, disk: threading.Event) -> None:
    manager._lower["disk"]._store._retry_seconds = 0.01
    manager._lower["disk"]._transfer._batch_blocks = 1
    waiting = manager.get_match(ALICE, keys(*[0] * 4)).task_id
    eventually(lambda: is_off(manager), "the disk is not switched off")
    disk.set()
    manager.cancel([waiting])
    asked = keys(*[1] * 4)
    eventually(lambda: load(manager, ALICE, asked) == contents(ALICE, asked), "it stays off")
    assert not is_off(manager)


def test_lookup_that_waits_for_a_disk_that_hangs_hears_of_its_end(
    manager: KVManager, disk: threading.Event
) -> None:
    tasks = [manager.get_match(ALICE, keys(*[prompt] * 4)).task_id for prompt in range(2)]
    manager._lower["disk"]._transfer.give_up()
    disk.set()
    found = manager.wait(tasks, PATIENCE_SECONDS)
    assert {status.state for status in found.values()} == {TaskState.READY}
    manager.cancel(tasks)


@pytest.mark.parametrize("unreadable", [0, 1, 3])
def test_block_that_cannot_be_read_is_forgotten_and_saved_again(
    manager: KVManager, unreadable: int
) -> None:
    """Else the prompts that it is part of could not be cached any more for as long as it is known."""
    asked = keys(0, 0, 0, 0)
    with_bad_sector(manager, asked[unreadable])
    assert load(manager, ALICE, asked) == contents(ALICE, asked[:unreadable])
    assert not is_off(manager)
    assert manager.counters.snapshot()["kvstrata_corrupt_blocks_total"] == 1
    save(manager, ALICE, asked)
    assert load(manager, ALICE, asked) == contents(ALICE, asked)


@pytest.mark.parametrize("blocks", [1, 4])
def test_disk_that_reads_nothing_forgets_nothing_and_is_not_asked_for_each_block(
    manager: KVManager, blocks: int
) -> None:
    asked = keys(0, 0, 0, 0)[:blocks]
    files = with_bad_sector(manager, asked[0])
    files.dead = True
    assert load(manager, ALICE, asked) == []
    assert files.reads <= 8
    files.dead, files.bad = False, range(0)
    assert load(manager, ALICE, asked) == contents(ALICE, asked)
    assert manager.counters.snapshot()["kvstrata_corrupt_blocks_total"] == 0


def switch_off(manager: KVManager) -> BadSectors:
    """The disk fails until it is switched off, for good."""
    manager._lower["disk"]._store._retry_seconds = 1e9
    files = with_bad_sector(manager, keys(0)[0])
    files.dead = True
    eventually(
        lambda: not load(manager, ALICE, keys(*[0] * 4)) and manager._lower["disk"].is_off(),
        "the disk is not switched off",
    )
    return files


def repair(manager: KVManager, files: BadSectors) -> None:
    files.dead, files.bad = False, range(0)
    manager._lower["disk"]._store._next_probe = 0.0


def test_what_is_only_on_a_dead_disk_is_saved_again(manager: KVManager) -> None:
    """Else the prompts that are on it could not be cached for as long as it is dead."""
    asked = keys(0, 0, 0, 0)
    switch_off(manager)
    assert len(save(manager, ALICE, asked).slots) == 4
    assert load(manager, ALICE, asked) == contents(ALICE, asked)
    assert save(manager, ALICE, asked).state is TaskState.DONE, "it is saved twice"


def test_save_of_what_is_on_a_dead_disk_can_be_given_up(manager: KVManager) -> None:
    asked = keys(0, 0, 0, 0)
    files = switch_off(manager)
    manager.cancel([manager.put_match(ALICE, asked).task_id])
    manager.check()
    repair(manager, files)
    assert load(manager, ALICE, asked) == contents(ALICE, asked)


@pytest.mark.parametrize("ended", ["fail", "complete", "cancel"])
def test_reset_while_what_is_on_a_dead_disk_is_saved_again_leaves_nothing(
    manager: KVManager, ended: str
) -> None:
    files = switch_off(manager)
    saving = manager.put_match(ALICE, keys(0, 0, 0, 0))
    if ended != "cancel":
        manager.launch([saving.task_id])
    repair(manager, files)
    manager.reset(ALICE)
    getattr(manager, ended)([saving.task_id])
    assert manager._cache.index.retired_blocks == 0
    assert [tier.used_blocks for tier in manager.stats().tiers] == [0, 0]


def test_block_that_is_being_saved_is_not_read_from_a_disk_that_is_back(
    manager: KVManager,
) -> None:
    """It would be read into another slot than the one that is being written."""
    asked = keys(0, 0, 0, 0)
    files = switch_off(manager)
    saving = manager.put_match(ALICE, asked)
    manager.launch([saving.task_id])
    repair(manager, files)
    assert load(manager, ALICE, asked) == []
    manager.check()
    write(manager, saving, ALICE, asked)
    manager.complete([saving.task_id])
    assert load(manager, ALICE, asked) == contents(ALICE, asked)


def is_tried(manager: KVManager, files: CrowdedFiles, times: int) -> bool:
    manager._lower["disk"].wake()
    return len(files.refused) >= times


@pytest.mark.parametrize("of_blocks", [False, True], ids=["journal", "punched slots"])
def test_what_is_on_a_full_disk_is_served_and_what_waits_is_written_when_there_is_room(
    manager: KVManager,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    of_blocks: bool,
) -> None:
    monkeypatch.setattr(cascade, "_NO_ROOM_SECONDS", 0.001)
    files = CrowdedFiles(manager, of_blocks=of_blocks)
    with caplog.at_level(logging.WARNING):
        save(manager, BOB, keys(1, 1, 1, 1))
        eventually(lambda: is_tried(manager, files, 8), "it is not tried again")
        assert not is_off(manager)
        for prompt in range(PROMPTS):
            asked = keys(*[prompt] * 4)
            assert load(manager, ALICE, asked) == contents(ALICE, asked)
    warnings = [r.getMessage() for r in caplog.records if "writing blocks" in r.getMessage()]
    assert "No space left on device" in warnings[0]
    assert len(warnings) < 8
    save(manager, BOB, keys(2, 2, 2, 2))
    files.is_full = False
    assert manager._lower["disk"].drain(PATIENCE_SECONDS)
    assert manager.stats().tiers[1].used_blocks > 4 * PROMPTS


def test_full_disk_is_tried_with_one_block_and_not_with_each_save(
    manager: KVManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cascade, "_NO_ROOM_SECONDS", 1e9)
    disk, files = manager._lower["disk"], CrowdedFiles(manager)
    save(manager, BOB, keys(1, 1, 1, 1))
    eventually(lambda: disk._next_try > 1e8, "it is not tried")
    save(manager, BOB, keys(2, 2))
    assert not disk.drain(0.1)
    assert files.refused == [4 * RECORD_BYTES]
    disk._next_try = 0.0
    eventually(lambda: is_tried(manager, files, 2), "it is not tried again")
    save(manager, BOB, keys(3, 3))
    assert not disk.drain(0.1)
    assert files.refused == [4 * RECORD_BYTES, RECORD_BYTES]
    files.is_full = False

    def is_drained() -> bool:
        disk._next_try = 0.0
        return disk.drain(0.01)

    eventually(is_drained, "it is not tried again")
    save(manager, BOB, keys(4, 4))
    assert disk.drain(PATIENCE_SECONDS), "it is taken for full"
