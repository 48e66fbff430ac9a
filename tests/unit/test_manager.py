"""KVManager: tasks, failures of the step after each reserve, a disk that fails or lies."""

import logging
import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.caches import (
    ALICE,
    BLOCK_BYTES,
    BOB,
    PATIENCE_SECONDS,
    config,
    content,
    contents,
    eventually,
    generation_of,
    host_slot,
    key,
    keys,
    known,
    load,
    reads_running,
    save,
    write,
)
from tests.gated import GatedStore

from kvstrata.core.errors import ConfigError, FormatError, InvariantViolated, TierUnavailable
from kvstrata.core.types import BlockKey
from kvstrata.manager import desk
from kvstrata.manager.manager import KVManager
from kvstrata.manager.tasks import TaskState, TaskStatus
from kvstrata.storage import wrap
from kvstrata.storage.disk import DiskStore
from kvstrata.storage.host import HostMemory
from kvstrata.transfer import engine as transfer

DONE, FAILED = TaskStatus(0, TaskState.DONE), TaskStatus(0, TaskState.FAILED)


@pytest.fixture
def managers() -> Iterator[list[KVManager]]:
    """Closed at the end, when every slot must be accounted for."""
    made: list[KVManager] = []
    yield made
    while made:
        close(made, made[0])


def close(managers: list[KVManager], manager: KVManager) -> None:
    managers.remove(manager)
    manager.check()
    report = manager.stats()
    manager.close()
    assert (report.running_gets, report.running_puts) == (0, 0)


@pytest.fixture
def manager(managers: list[KVManager]) -> KVManager:
    """Four blocks of host memory, no disk."""
    return open_(managers, 4)


def open_(
    managers: list[KVManager], slots: int, disk: Path | None = None, disk_slots: int = 64
) -> KVManager:
    made = KVManager(config(slots, disk, disk_slots), block_bytes=BLOCK_BYTES)
    made.memory.mapping.data[:] = 0xEE
    managers.append(made)
    return made


def counted_lookups(manager: KVManager) -> dict[str, object]:
    """All that metrics say of lookups."""
    named = ("kvstrata_lookup", "kvstrata_declined")
    counters = manager.counters.snapshot()
    return {name: counters[name] for name in counters if name.startswith(named)} | {
        "seconds": [
            each for each in manager.counters.durations.snapshot() if "lookup" in each.metric
        ]
    }


def count(manager: KVManager, name: str) -> int:
    return manager.counters.snapshot().get(f"kvstrata_{name}", 0)


def on_disk(manager: KVManager) -> int:
    return manager.stats().tiers[1].used_blocks


def drained(manager: KVManager) -> None:
    eventually(lambda: manager.stats().tiers[1].waiting_blocks == 0, "blocks wait for the disk")
    assert "disk" in manager._lower
    assert manager._lower["disk"].drain(PATIENCE_SECONDS)


def hold_reads(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Of the disk, until the event is set."""
    go, read = threading.Event(), DiskStore.read_into
    monkeypatch.setattr(
        DiskStore, "read_into", lambda *a: read(*a) if go.wait(PATIENCE_SECONDS) else []
    )
    return go


def push_out(manager: KVManager, slots: int) -> None:
    """Fill host memory with blocks that nobody asks for."""
    save(manager, BOB, keys(*[77] * slots))
    drained(manager)


# -- gets and puts -------------------------------------------------------------------------------


def test_saved_blocks_come_back_as_they_were(manager: KVManager) -> None:
    task = save(manager, ALICE, keys(1, 2, 3))
    assert (task.state, task.missing, task.slots) == (TaskState.READY, [0, 1, 2], [0, 1, 2])
    assert load(manager, ALICE, keys(1, 2, 3)) == contents(ALICE, keys(1, 2, 3))
    assert load(manager, ALICE, keys(1, 2, 9)) == contents(ALICE, keys(1, 2))
    assert load(manager, BOB, keys(1, 2, 3)) == []
    assert count(manager, "saved_blocks_total") == 3
    assert count(manager, "loaded_blocks_total") == 5
    assert count(manager, "lookups_total") == 3
    assert count(manager, "lookup_blocks_total{tier=host}") == 5
    assert count(manager, "lookup_blocks_total{tier=none}") == 4


def test_nothing_asked_is_nothing_found(manager: KVManager) -> None:
    assert manager.get_match(ALICE, []) == DONE
    assert manager.put_match(ALICE, []) == DONE


def test_only_blocks_that_nobody_has_or_saves_get_slots(manager: KVManager) -> None:
    save(manager, ALICE, keys(1))
    running = manager.put_match(ALICE, keys(1, 2))
    assert running.missing == [1]
    again = manager.put_match(ALICE, keys(1, 2, 3))
    assert again.missing == [2]
    manager.cancel([running.task_id, again.task_id])
    assert manager.put_match(ALICE, keys(1)) == DONE


def test_prompt_ends_where_a_key_comes_twice(manager: KVManager) -> None:
    """No prompt has one, but nothing must be lost to a client that says so."""
    task = save(manager, ALICE, [key(1), key(2), key(1), key(3)])
    assert task.missing == [0, 1]
    assert manager.stats().tiers[0].used_blocks == 2
    found = manager.get_match(ALICE, [key(1), key(1)])
    assert found.matched_blocks == 1
    manager.cancel([found.task_id])
    again = manager.put_match(ALICE, [key(4)], parent=key(4))
    manager.cancel([again.task_id])


def test_block_is_not_found_before_its_save_is_complete(manager: KVManager) -> None:
    task = manager.put_match(ALICE, keys(1))
    assert manager.get_match(ALICE, keys(1)) == DONE
    manager.launch([task.task_id])
    write(manager, task, ALICE, keys(1))
    assert manager.get_match(ALICE, keys(1)) == DONE
    manager.complete([task.task_id])
    assert load(manager, ALICE, keys(1)) == contents(ALICE, keys(1))


@pytest.mark.parametrize("launched", [True, False])
def test_failed_save_gives_its_slots_back_under_a_new_generation(
    manager: KVManager, launched: bool
) -> None:
    task = manager.put_match(ALICE, keys(1, 2))
    if launched:
        manager.launch([task.task_id])
    manager.fail([task.task_id])
    assert manager.get_match(ALICE, keys(1)) == DONE
    assert manager.stats().tiers[0].used_blocks == 0
    assert manager.try_wait([task.task_id]) == {
        task.task_id: TaskStatus(task.task_id, TaskState.FAILED)
    }
    again = manager.put_match(ALICE, keys(1, 2))
    assert set(again.slots) == {0, 1}
    for slot, generation in zip(again.slots, again.generations, strict=True):
        assert generation > task.generations[task.slots.index(slot)]
    manager.cancel([again.task_id])


def test_failed_load_drops_its_blocks_because_of_the_doubt(manager: KVManager) -> None:
    save(manager, ALICE, keys(1, 2, 3))
    task = manager.get_match(ALICE, keys(1, 2))
    manager.launch([task.task_id])
    manager.fail([task.task_id])
    assert manager.get_match(ALICE, keys(1, 2, 3)) == DONE
    assert manager.stats().tiers[0].used_blocks == 1
    assert count(manager, "failed_loads_total") == 1


def test_load_that_was_given_up_is_counted_and_costs_the_cache_nothing(manager: KVManager) -> None:
    save(manager, ALICE, keys(1, 2))
    task = manager.get_match(ALICE, keys(1, 2))
    manager.launch([task.task_id])
    manager.cancel([task.task_id])
    assert manager.stats().leased_blocks == 2
    manager.complete([task.task_id])
    assert manager.stats().leased_blocks == 0
    assert count(manager, "failed_loads_total") == 1
    assert count(manager, "loaded_blocks_total") == 0
    assert load(manager, ALICE, keys(1, 2)) == contents(ALICE, keys(1, 2))


def test_failed_load_leaves_blocks_that_another_is_reading(manager: KVManager) -> None:
    save(manager, ALICE, keys(1))
    first, second = (manager.get_match(ALICE, keys(1)) for _ in range(2))
    manager.launch([first.task_id, second.task_id])
    manager.fail([first.task_id])
    assert bytes(manager.view(second.slots[0])) == content(ALICE, key(1))
    assert generation_of(manager, second.slots[0]) == second.generations[0]
    manager.complete([second.task_id])


def test_leased_blocks_are_not_evicted_and_later_saves_are_shed(manager: KVManager) -> None:
    save(manager, ALICE, keys(1, 2, 3))
    task = manager.get_match(ALICE, keys(1, 2, 3))
    other = manager.put_match(BOB, keys(1, 2, 3))
    assert (other.missing, count(manager, "shed_blocks_total")) == ([0], 2)
    assert manager.put_match(BOB, keys(9)) == FAILED
    found = [bytes(manager.view(slot)) for slot in task.slots]
    assert found == contents(ALICE, keys(1, 2, 3))
    manager.cancel([task.task_id, other.task_id])


@pytest.mark.parametrize("eviction", ["lru", "s3fifo", "cost"])
def test_prompt_that_can_never_fit_is_kept_in_part_and_drives_out_a_tenth(eviction: str) -> None:
    manager = KVManager(config(100, eviction=eviction), block_bytes=BLOCK_BYTES)
    older = [keys(n, 0, 0, 0, 0) for n in range(20)]
    for prompt in older:
        save(manager, ALICE, prompt)
    huge = keys(*[99] * 101)
    task = save(manager, ALICE, huge)
    assert task.missing == list(range(10))
    assert load(manager, ALICE, huge) == contents(ALICE, huge[:10])
    found = sum(len(load(manager, ALICE, prompt)) for prompt in older)
    assert found >= 90
    manager.check()
    manager.close()


def test_long_prompt_outlives_short_ones_that_were_used_since_where_cost_counts() -> None:
    """Its blocks are dearer to compute: each looks back at all before it."""
    manager = KVManager(config(680, eviction="cost"), block_bytes=BLOCK_BYTES)
    long, short = keys(*range(640)), [keys(n) for n in range(1000, 1080)]
    for prompt in [long, *short]:
        save(manager, ALICE, prompt)
    assert count(manager, "evicted_blocks_total{tier=host}") == 40
    assert manager.get_match(ALICE, long).matched_blocks == 640
    manager.disconnect(0)
    assert [prompt for prompt in short if load(manager, ALICE, prompt)] == short[40:]
    manager.check()
    manager.close()


@pytest.mark.parametrize("pieces", [2, 3, 7])
@pytest.mark.parametrize("eviction", ["lru", "s3fifo", "cost"])
@pytest.mark.parametrize("quota", [None, 0.5])
def test_prompt_that_can_never_fit_drives_out_no_more_in_pieces(
    eviction: str, pieces: int, quota: float | None
) -> None:
    """As chunked prefill offers it."""
    quotas = {"m": quota} if quota else {}
    manager = KVManager(config(200, eviction=eviction, quotas=quotas), block_bytes=BLOCK_BYTES)
    manager.register_namespace(ALICE, {"model": "m"})
    room = int(200 * (quota or 1))
    older = [keys(n, *range(9)) for n in range(room // 10)]
    for prompt in older:
        save(manager, ALICE, prompt)
    assert sum(len(load(manager, ALICE, prompt)) for prompt in older) == room
    huge = keys(*[99] * (2 * room))
    step = len(huge) // pieces
    for start in range(0, len(huge), step):
        piece, before = huge[start : start + step], huge[start - 1] if start else None
        save(manager, ALICE, piece, parent=before, prompt_blocks=len(huge))
    assert load(manager, ALICE, huge) == contents(ALICE, huge[: room // 10])
    assert sum(len(load(manager, ALICE, prompt)) for prompt in older) >= 0.9 * room
    manager.check()
    manager.close()


def test_namespaces_without_end_are_not_all_remembered() -> None:
    manager = KVManager(config(100, quotas={"m": 0.5}), block_bytes=BLOCK_BYTES)
    for number in range(1000):
        manager.register_namespace(number.to_bytes(16, "big"), {"model": "m"})
    manager.register_namespace(ALICE, {"model": "m"})
    assert len(manager.stats().namespaces) == 256
    assert len(manager._cache._host.limited) == 256
    assert len(manager.put_match(ALICE, keys(*range(60))).slots) == 50
    manager.check()
    manager.close()


def test_resets_of_a_neighbour_do_not_lift_a_quota() -> None:
    """Each reset registers a new namespace, and an engine registers its own once."""
    manager = KVManager(config(100, quotas={"m": 0.5}), block_bytes=BLOCK_BYTES)
    manager.register_namespace(ALICE, {"model": "m"})
    save(manager, ALICE, keys(1))
    for number in range(300):
        old = number.to_bytes(16, "big")
        manager.register_namespace(old, {"model": "other"})
        manager.reset(old)
    parts = {each.namespace: each.parts for each in manager.stats().namespaces}
    assert parts[ALICE.hex()] == {"model": "m"}
    assert len(manager.put_match(ALICE, keys(*range(60))).slots) <= 50
    manager.close()


def test_reset_by_one_of_two_engines_does_not_lift_the_quota_of_the_other() -> None:
    """The one that was reset goes on in another namespace, the other one in this."""
    manager = KVManager(config(100, quotas={"m": 0.5}), block_bytes=BLOCK_BYTES)
    manager.register_namespace(ALICE, {"model": "m"})
    manager.reset(ALICE)
    assert len(manager.put_match(ALICE, keys(*range(60))).slots) == 50
    manager.close()


def test_quota_counts_what_is_still_being_saved() -> None:
    manager = KVManager(config(100, quotas={"m": 0.5}), block_bytes=BLOCK_BYTES)
    manager.register_namespace(ALICE, {"model": "m"})
    tasks = [manager.put_match(ALICE, keys(n, *range(29))) for n in range(3)]
    assert [len(task.slots) for task in tasks] == [30, 20, 0]
    manager.cancel([task.task_id for task in tasks])
    manager.close()


def test_save_does_not_evict_the_prefix_that_it_continues(manager: KVManager) -> None:
    save(manager, ALICE, keys(1, 2, 3))
    save(manager, ALICE, keys(1, 2, 3, 4, 5, 6))
    assert load(manager, ALICE, keys(1, 2, 3, 4, 5, 6)) == contents(ALICE, keys(1, 2, 3, 4))
    assert count(manager, "shed_blocks_total") == 2


def test_news_of_unknown_ended_and_foreign_tasks_mean_nothing(manager: KVManager) -> None:
    engine, worker = manager.connect_engine("e", 1), manager.connect_worker("e", 0)
    task = manager.put_match(ALICE, keys(1), owner=engine)
    for news in (manager.launch, manager.complete, manager.fail, manager.cancel):
        news([task.task_id, task.task_id + 1, 0, -1], owner=worker)
        news([task.task_id])
    assert manager.try_wait([task.task_id])[task.task_id].state is TaskState.READY
    manager.cancel([task.task_id], owner=engine)
    for news in (manager.launch, manager.complete, manager.fail, manager.cancel):
        news([task.task_id], owner=engine)
    assert manager.get_match(ALICE, keys(1)) == DONE


def test_news_that_a_task_cannot_take_is_refused_and_the_others_of_the_message_are_carried_out(
    manager: KVManager,
) -> None:
    ready, running = manager.put_match(ALICE, keys(1)), manager.put_match(ALICE, keys(2))
    manager.launch([running.task_id])
    with pytest.raises(InvariantViolated, match="cannot complete while ready"):
        manager.complete([ready.task_id, running.task_id])
    assert manager.try_wait([ready.task_id])[ready.task_id].state is TaskState.READY
    assert manager.try_wait([running.task_id])[running.task_id].state is TaskState.DONE
    manager.cancel([ready.task_id])


def test_task_ids_of_two_servers_differ(managers: list[KVManager]) -> None:
    """An engine outlives its server, with copies of the old one's tasks in flight."""
    four = [open_(managers, 1) for _ in range(4)]
    tasks = [manager.put_match(ALICE, keys(1)).task_id for manager in four]
    for manager, task in zip(four, tasks, strict=True):
        manager.cancel([task])
    assert len(set(tasks)) == 4
    assert all(0 < task < 2**53 for task in tasks)


def test_results_of_tasks_that_ended_long_ago_are_forgotten(
    manager: KVManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "_KEPT_RESULTS", 3)
    tasks = [save(manager, ALICE, keys(n)).task_id for n in range(5)]
    assert list(manager.try_wait(tasks)) == tasks[2:]


def test_lease_of_a_get_that_was_forgotten_ends_in_time(
    manager: KVManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(manager, ALICE, keys(1))
    monkeypatch.setattr(manager._gets, "_lease_seconds", -1.0)
    task = manager.get_match(ALICE, keys(1))
    manager._gets._next_expiry = 0.0  # it looks once a second
    with caplog.at_level(logging.WARNING):
        assert manager.get_match(ALICE, keys(2)) == DONE
    assert manager.try_wait([task.task_id])[task.task_id].state is TaskState.CANCELLED
    assert "was given up" in caplog.text


def test_load_that_takes_longer_than_the_lease_before_it_has_as_long_again(
    manager: KVManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(manager, ALICE, keys(1))
    began, lease_seconds = time.monotonic(), manager._gets._lease_seconds

    def state_at(leases: float) -> TaskState:
        monkeypatch.setattr(time, "monotonic", lambda: began + leases * lease_seconds)
        assert manager.get_match(ALICE, keys(9)) == DONE  # looks whose time is up
        return manager.try_wait([task.task_id])[task.task_id].state

    task = manager.get_match(ALICE, keys(1))
    assert state_at(0.9) is TaskState.READY
    manager.launch([task.task_id])
    assert state_at(1.8) is TaskState.RUNNING
    assert state_at(2.0) is TaskState.CANCELLED


def test_wait_ends_at_its_deadline(manager: KVManager) -> None:
    assert manager.wait([5, 6], 0.01) == {}


# -- engines and workers -------------------------------------------------------------------------


def test_nothing_is_matched_or_reserved_before_the_workers_are_there(manager: KVManager) -> None:
    save(manager, ALICE, keys(1))
    engine = manager.connect_engine("e", 1)
    assert manager.get_match(ALICE, keys(1), owner=engine) == FAILED
    assert manager.put_match(ALICE, keys(2), owner=engine) == FAILED
    manager.connect_worker("e", 0)
    assert manager.get_match(ALICE, keys(1), owner=engine).state is TaskState.READY
    manager.disconnect(engine)


def test_who_is_no_engine_has_no_tasks(manager: KVManager) -> None:
    save(manager, ALICE, keys(1))
    assert manager.get_match(ALICE, keys(1), owner=manager.connect_worker("e", 0)) == FAILED
    assert manager.get_match(ALICE, keys(1), owner=999) == FAILED


def test_dead_engine_returns_its_leases_at_once(manager: KVManager) -> None:
    save(manager, ALICE, keys(1, 2))
    engine = manager.connect_engine("e", 1)
    manager.connect_worker("e", 0)
    task = manager.get_match(ALICE, keys(1, 2), owner=engine)
    manager.launch([task.task_id], owner=engine)
    manager.disconnect(engine)
    assert manager.put_match(BOB, keys(1, 2, 3, 4)).missing == [0, 1, 2, 3]
    manager.disconnect(0)


def test_slots_of_a_dead_engine_are_not_reused_while_its_worker_may_write(
    manager: KVManager,
) -> None:
    engine, worker = manager.connect_engine("e", 1), manager.connect_worker("e", 0)
    task = manager.put_match(ALICE, keys(1, 2, 3), owner=engine)
    manager.launch([task.task_id], owner=engine)
    manager.disconnect(engine)
    assert save(manager, BOB, keys(1, 2)).missing == [0]
    manager.check()
    for slot in task.slots:
        manager.view(slot)[:] = b"\xdd" * BLOCK_BYTES
    assert load(manager, BOB, keys(1)) == contents(BOB, keys(1))
    assert manager.get_match(ALICE, keys(1)) == DONE
    manager.disconnect(worker)
    assert save(manager, BOB, keys(1, 2, 3)).missing == [1, 2]
    assert count(manager, "shed_blocks_total") == 1


def test_slots_of_a_worker_whose_line_broke_are_reused_only_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstrata.manager.manager.WRITER_GRACE_SECONDS", 0.2)
    manager = KVManager(config(3), block_bytes=BLOCK_BYTES)
    engine, worker = manager.connect_engine("e", 1), manager.connect_worker("e", 0)
    manager.put_match(ALICE, keys(1, 2, 3), owner=engine)
    manager.disconnect(worker)
    manager.disconnect(engine)
    assert manager.put_match(BOB, keys(1)) == FAILED
    manager.check()
    eventually(lambda: manager.put_match(BOB, keys(1)).missing == [0], "the slots are kept")
    manager.disconnect(0)
    manager.close()


def test_scheduler_that_connects_again_ends_its_earlier_connections(manager: KVManager) -> None:
    """It may be back before the server has seen the end of the line."""
    first = manager.connect_engine("e", 1, life="a")
    other = manager.connect_engine("f", 1, life="b")
    manager.connect_worker("e", 0)
    save(manager, ALICE, keys(1), owner=first)
    get = manager.get_match(ALICE, keys(1), owner=first)
    put = manager.put_match(ALICE, keys(2, 3), owner=first)
    manager.launch([put.task_id], owner=first)
    again = manager.connect_engine("e", 1, life="a", running=[put.task_id])
    ended = manager.try_wait([get.task_id, put.task_id]).values()
    assert [status.state for status in ended] == [TaskState.CANCELLED] * 2
    assert set(known(manager).values()) == {0}
    assert [engine["session"] for engine in manager.stats().engines] == ["f", "e"]
    manager.check()
    assert manager.stats().tiers[0].used_blocks == 3  # the workers may still be writing
    manager.fail([put.task_id], owner=again)
    assert manager.stats().tiers[0].used_blocks == 1
    manager.disconnect(other)


def test_save_that_a_dead_engine_was_making_can_be_made_by_another(manager: KVManager) -> None:
    engine = manager.connect_engine("e", 1)
    manager.connect_worker("e", 0)
    manager.put_match(ALICE, keys(1), owner=engine)
    assert manager.put_match(ALICE, keys(1)) == FAILED  # being saved is not yet saved
    manager.disconnect(engine)
    save(manager, ALICE, keys(1))
    assert load(manager, ALICE, keys(1)) == contents(ALICE, keys(1))


# -- reset ---------------------------------------------------------------------------------------


def test_reset_takes_one_namespace_from_all_tiers_for_good(
    managers: list[KVManager], tmp_path: Path
) -> None:
    first = open_(managers, 4, tmp_path)
    save(first, ALICE, keys(1, 2))
    save(first, BOB, keys(1))
    drained(first)
    assert first.reset(ALICE) == 2
    assert first.get_match(ALICE, keys(1)) == DONE
    close(managers, first)
    again = open_(managers, 4, tmp_path)
    assert again.get_match(ALICE, keys(1)) == DONE
    assert load(again, BOB, keys(1)) == contents(BOB, keys(1))


def test_save_that_began_before_a_reset_does_not_become_visible(manager: KVManager) -> None:
    task = manager.put_match(ALICE, keys(1))
    manager.launch([task.task_id])
    assert manager.reset(ALICE) == 0
    write(manager, task, ALICE, keys(1))
    manager.complete([task.task_id])
    assert manager.get_match(ALICE, keys(1)) == DONE
    assert (manager.stats().tiers[0].used_blocks, count(manager, "saved_blocks_total")) == (0, 0)


def test_load_that_began_before_a_reset_keeps_its_bytes_to_the_end(manager: KVManager) -> None:
    save(manager, ALICE, keys(1))
    task = manager.get_match(ALICE, keys(1))
    manager.launch([task.task_id])
    assert manager.reset(ALICE) == 1
    assert save(manager, ALICE, keys(1)).slots != task.slots
    assert task.slots[0] not in save(manager, BOB, keys(1, 2, 3, 4)).slots
    assert bytes(manager.view(task.slots[0])) == content(ALICE, key(1))
    assert generation_of(manager, task.slots[0]) == task.generations[0]
    manager.check()
    manager.complete([task.task_id])
    assert save(manager, BOB, keys(1, 2, 3, 4)).slots == task.slots


def test_block_that_waits_for_the_disk_while_it_is_loaded_does_not_reach_it_after_a_reset(
    managers: list[KVManager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_(managers, 8, tmp_path)
    away, write_down = threading.Event(), DiskStore.write
    away.set()

    def fickle(*asked: Any) -> Any:
        if away.is_set():
            raise TierUnavailable("the disk is gone")
        return write_down(*asked)

    monkeypatch.setattr(DiskStore, "write", fickle)
    save(first, ALICE, keys(1, 2))
    task = first.get_match(ALICE, keys(1, 2))
    first.launch([task.task_id])
    assert first.reset(ALICE) == 2
    away.clear()
    save(first, BOB, keys(1))
    drained(first)
    first.complete([task.task_id])
    close(managers, first)
    again = open_(managers, 8, tmp_path)
    assert again.get_match(ALICE, keys(1)) == DONE
    assert (on_disk(again), load(again, BOB, keys(1))) == (1, contents(BOB, keys(1)))


def test_reset_that_the_disk_refuses_is_carried_out_when_it_heals(
    managers: list[KVManager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_RETRY_SECONDS", 0.01)
    first = open_(managers, 4, tmp_path)
    save(first, ALICE, keys(1))
    drained(first)
    drop = DiskStore.drop_namespace
    broken = threading.Event()
    broken.set()

    def fickle(store: DiskStore, namespace: bytes) -> int:
        if broken.is_set():
            raise TierUnavailable("the disk is gone")
        return drop(store, namespace)

    monkeypatch.setattr(DiskStore, "drop_namespace", fickle)
    with pytest.raises(TierUnavailable, match="the disk is gone"):
        first.reset(ALICE)
    assert first.get_match(ALICE, keys(1)) == DONE
    broken.clear()
    save(first, BOB, keys(1))
    drained(first)
    close(managers, first)
    again = open_(managers, 4, tmp_path)
    assert again.get_match(ALICE, keys(1)) == DONE
    assert load(again, BOB, keys(1)) == contents(BOB, keys(1))


# -- disk ----------------------------------------------------------------------------------------


def test_blocks_go_down_to_disk_and_come_up_when_asked_for(
    managers: list[KVManager], tmp_path: Path
) -> None:
    manager = open_(managers, 3, tmp_path)
    save(manager, ALICE, keys(1, 2, 3))
    drained(manager)
    push_out(manager, 3)
    settled = list[TaskStatus]()
    task = manager.get_match(ALICE, keys(1, 2), settled=settled.append)
    assert (task.state, task.slots) == (TaskState.PROMOTING, [])
    assert (task.matched_blocks, task.disk_blocks) == (2, 2)
    eventually(lambda: len(settled) == 1, "the promotion does not end")
    (status,) = settled
    assert (status.task_id, status.state) == (task.task_id, TaskState.READY)
    assert [bytes(manager.view(slot)) for slot in status.slots] == contents(ALICE, keys(1, 2))
    manager.launch([task.task_id])
    manager.complete([task.task_id])
    assert count(manager, "promoted_blocks_total{tier=disk}") == 2
    assert count(manager, "lookup_blocks_total{tier=disk}") == 2


def test_restart_finds_what_was_written_down(managers: list[KVManager], tmp_path: Path) -> None:
    first = open_(managers, 2, tmp_path)
    save(first, ALICE, keys(1, 2))
    close(managers, first)
    again = open_(managers, 2, tmp_path)
    assert load(again, ALICE, keys(1, 2)) == contents(ALICE, keys(1, 2))
    assert first.server_id != again.server_id


def test_restart_finds_what_was_to_be_written_when_it_leaves(
    managers: list[KVManager], tmp_path: Path
) -> None:
    first = KVManager(config(4, tmp_path, write="evicted"), block_bytes=BLOCK_BYTES)
    save(first, ALICE, keys(1, 2, 3))
    assert first.stats().tiers[1].used_blocks == 0
    first.close()
    again = open_(managers, 4, tmp_path)
    assert load(again, ALICE, keys(1, 2, 3)) == contents(ALICE, keys(1, 2, 3))


def test_full_disk_gives_up_blocks_and_the_last_of_a_prompt_first(
    managers: list[KVManager], tmp_path: Path
) -> None:
    manager = open_(managers, 2, tmp_path, disk_slots=3)
    save(manager, ALICE, keys(1, 2))
    drained(manager)
    save(manager, BOB, keys(1, 2))
    drained(manager)
    assert on_disk(manager) == 3
    assert count(manager, "evicted_blocks_total{tier=disk}") == 1
    assert load(manager, ALICE, keys(1, 2)) == contents(ALICE, keys(1))


def test_launched_before_all_has_arrived_takes_what_is_there(
    managers: list[KVManager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = open_(managers, 4, tmp_path)
    save(manager, ALICE, keys(1, 2))
    drained(manager)
    push_out(manager, 3)
    go = hold_reads(monkeypatch)
    assert [host_slot(manager, ALICE + k) >= 0 for k in keys(1, 2)] == [True, False]
    told = list[TaskStatus]()
    task = manager.get_match(ALICE, keys(1, 2), settled=told.append)
    assert (task.state, len(task.slots), task.matched_blocks) == (TaskState.PROMOTING, 1, 2)
    assert manager.wait([task.task_id], 0.01)[task.task_id].state is TaskState.PROMOTING
    manager.launch([task.task_id])
    assert bytes(manager.view(task.slots[0])) == content(ALICE, key(1))
    manager.complete([task.task_id])
    go.set()
    eventually(lambda: not reads_running(manager), "the promotion does not end")
    assert told == []
    assert load(manager, ALICE, keys(1, 2)) == contents(ALICE, keys(1, 2))


def test_what_arrives_after_the_launch_is_not_counted_as_loaded(
    managers: list[KVManager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = open_(managers, 4, tmp_path)
    save(manager, ALICE, keys(1, 2))
    drained(manager)
    push_out(manager, 3)
    go = hold_reads(monkeypatch)
    task = manager.get_match(ALICE, keys(1, 2))
    assert len(task.slots) == 1
    manager.launch([task.task_id])
    go.set()
    eventually(lambda: not reads_running(manager), "the promotion does not end")
    manager.complete([task.task_id])
    assert count(manager, "loaded_blocks_total") == 1


def test_two_gets_wait_for_one_read(
    managers: list[KVManager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = open_(managers, 3, tmp_path)
    save(manager, ALICE, keys(1))
    drained(manager)
    push_out(manager, 3)
    go = hold_reads(monkeypatch)
    tasks = [manager.get_match(ALICE, keys(1)).task_id for _ in range(2)]
    manager.cancel(tasks[:1])
    go.set()
    (found,) = manager.wait(tasks[1:], PATIENCE_SECONDS).values()
    assert bytes(manager.view(found.slots[0])) == content(ALICE, key(1))
    assert count(manager, "promoted_blocks_total{tier=disk}") == 1
    manager.cancel(tasks[1:])


def test_read_that_nobody_waits_for_any_more_leaves_its_blocks_on_disk(
    managers: list[KVManager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = open_(managers, 8, tmp_path)
    busy, asked = [keys(n)[:1] for n in range(10, 14)], keys(1, 2)
    for prompt in [*busy, asked]:
        save(manager, ALICE, prompt)
    drained(manager)
    push_out(manager, 8)
    go = hold_reads(monkeypatch)
    first = [manager.prefetch(ALICE, prompt) for prompt in busy]  # all readers
    given_up = manager.get_match(ALICE, asked).task_id
    assert reads_running(manager) == 6
    manager.cancel([given_up])
    before = on_disk(manager)
    go.set()
    eventually(lambda: not reads_running(manager), "the reads do not end")
    assert count(manager, "promoted_blocks_total{tier=disk}") == len(first)
    assert on_disk(manager) == before
    assert load(manager, ALICE, asked) == contents(ALICE, asked)


def test_promotion_without_a_slot_is_no_hit(managers: list[KVManager], tmp_path: Path) -> None:
    manager = open_(managers, 2, tmp_path)
    save(manager, ALICE, keys(1, 2))
    drained(manager)
    task = manager.put_match(BOB, keys(1, 2))
    nothing = manager.get_match(ALICE, keys(1, 2))
    assert nothing == TaskStatus(0, TaskState.DONE, declined_blocks=2)
    manager.cancel([task.task_id])
    assert load(manager, ALICE, keys(1, 2)) == contents(ALICE, keys(1, 2))


def test_prefetch_brings_blocks_up_and_keeps_no_lease(
    managers: list[KVManager], tmp_path: Path
) -> None:
    manager = open_(managers, 3, tmp_path)
    save(manager, ALICE, keys(1, 2))
    drained(manager)
    push_out(manager, 3)
    assert manager.prefetch(ALICE, keys(1, 2)) != 0
    eventually(lambda: manager.stats().running_gets == 0, "the prefetch does not end")
    assert manager.prefetch(ALICE, keys(1, 2)) == 0
    assert manager.prefetch(ALICE, keys(5)) == 0
    assert manager.get_match(ALICE, keys(1, 2)).state is TaskState.READY
    manager.disconnect(0)


def test_prefetch_is_no_lookup_of_the_traffic(managers: list[KVManager], tmp_path: Path) -> None:
    """Else a hit rate falls while an operator warms the cache up, and what he warms is the hottest."""
    manager = open_(managers, 3, tmp_path)
    save(manager, ALICE, keys(1, 2))
    drained(manager)
    push_out(manager, 3)
    lookups = counted_lookups(manager)
    assert lookups
    manager.prefetch(ALICE, keys(1, 2, 3))
    eventually(lambda: manager.stats().running_gets == 0, "the prefetch does not end")
    manager.prefetch(ALICE, keys(1, 2))
    manager.prefetch(ALICE, keys(*range(9)))
    assert counted_lookups(manager) == lookups
    assert manager.operator.hottest(8) == []
    assert count(manager, "promoted_blocks_total{tier=disk}") == 2


def test_damaged_block_cuts_the_prefix_is_dropped_and_counted(
    managers: list[KVManager], tmp_path: Path
) -> None:
    manager = open_(managers, 4, tmp_path)
    save(manager, ALICE, keys(1, 2, 3))
    drained(manager)
    push_out(manager, 4)
    marked = content(ALICE, key(1, 2))
    damaged = 0
    for path in tmp_path.rglob("*"):
        raw = path.read_bytes() if path.is_file() else b""
        if marked in raw:
            with path.open("r+b") as file:
                file.seek(raw.index(marked) + 100)
                file.write(b"\xff\x00\xff")
            damaged += 1
    assert damaged == 1
    assert load(manager, ALICE, keys(1, 2, 3)) == contents(ALICE, keys(1))
    assert count(manager, "corrupt_blocks_total") == 1
    assert load(manager, ALICE, keys(1, 2, 3)) == contents(ALICE, keys(1))
    assert count(manager, "corrupt_blocks_total") == 1
    save(manager, ALICE, keys(1, 2))
    assert load(manager, ALICE, keys(1, 2, 3)) == contents(ALICE, keys(1, 2, 3))


@pytest.mark.parametrize("unreadable", [1, 2, 4])
def test_block_that_the_disk_cannot_read_costs_itself_and_what_follows(
    managers: list[KVManager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreadable: int
) -> None:
    """What is in host memory, and what the disk has before that block, is given all the same."""
    asked = keys(1, 2, 3, 4, 5)
    manager = open_(managers, 6, tmp_path)
    save(manager, ALICE, asked)
    drained(manager)
    push_out(manager, 6)
    load(manager, ALICE, asked[:1])
    read = DiskStore.read_into
    bad = {ALICE + asked[unreadable]}

    def sometimes(store: DiskStore, wanted: list[bytes], buffers: list[memoryview]) -> object:
        if bad & set(wanted):
            raise TierUnavailable("a sector cannot be read")
        return read(store, wanted, buffers)

    monkeypatch.setattr(DiskStore, "read_into", sometimes)
    assert host_slot(manager, ALICE + asked[0]) >= 0
    assert host_slot(manager, ALICE + asked[1]) < 0
    assert load(manager, ALICE, asked) == contents(ALICE, asked[:unreadable])
    manager.check()
    bad.clear()
    assert load(manager, ALICE, asked) == contents(ALICE, asked)


def test_disk_that_is_away_costs_no_hit_in_host_memory(
    managers: list[KVManager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = open_(managers, 4, tmp_path)
    save(manager, ALICE, keys(1, 2, 3))
    drained(manager)
    push_out(manager, 4)
    load(manager, ALICE, keys(1, 2))
    disk = FailingDisk(monkeypatch)
    assert load(manager, ALICE, keys(1, 2, 3)) == contents(ALICE, keys(1, 2))
    disk.broken = False
    assert load(manager, ALICE, keys(1, 2, 3)) == contents(ALICE, keys(1, 2, 3))


class FailingDisk:
    """Every read or write of the disk store fails while ``broken``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken = True
        self.error: Exception = TierUnavailable("the disk is gone")
        self.calls = 0
        for name in ("read_into", "write", "remove"):
            monkeypatch.setattr(DiskStore, name, self._wrapped(getattr(DiskStore, name)))

    def _wrapped(self, real: object) -> object:
        def call(*args: object) -> object:
            self.calls += 1
            if self.broken:
                raise self.error
            return real(*args)  # type: ignore[operator]  # a method of DiskStore

        return call


def test_failing_disk_costs_hits_and_later_all_is_written(
    managers: list[KVManager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(wrap.BreakerStore.__init__, "__kwdefaults__", FAST_BREAKER)
    manager = open_(managers, 4, tmp_path)
    save(manager, ALICE, keys(1, 2))
    drained(manager)
    push_out(manager, 3)
    assert on_disk(manager) == 5
    disk = FailingDisk(monkeypatch)
    assert load(manager, ALICE, keys(1, 2)) == contents(ALICE, keys(1))
    manager.check()
    save(manager, ALICE, keys(8))
    eventually(lambda: manager.stats().tiers[1].switched_off, "the breaker does not open")
    assert load(manager, ALICE, keys(8)) == contents(ALICE, keys(8))
    eventually(lambda: manager.stats().tiers[1].waiting_blocks == 1, "a block is given up")
    assert on_disk(manager) == 5
    disk.broken = False
    drained(manager)
    assert not manager.stats().tiers[1].switched_off
    assert on_disk(manager) == 6
    assert load(manager, ALICE, keys(1, 2)) == contents(ALICE, keys(1, 2))


@pytest.mark.parametrize("restarted", [False, True])  # then it has to be asked what it has
def test_what_a_disk_that_is_switched_off_has_comes_from_the_remote_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    store = GatedStore({})
    manager = KVManager(config(4, tmp_path), block_bytes=BLOCK_BYTES, remote=store)
    save(manager, ALICE, keys(1, 2))
    for prompt in range(3):
        eventually(lambda: manager.stats().is_at_rest, "not written")
        save(manager, BOB, keys(prompt, 0, 0))
    eventually(lambda: manager.stats().is_at_rest, "not written")  # or slots cannot be had
    assert {ALICE + k for k in keys(1, 2)} <= store.values.keys()
    if restarted:
        manager.close()
        store = GatedStore(store.values)
        manager = KVManager(config(4, tmp_path), block_bytes=BLOCK_BYTES, remote=store)
    disk = FailingDisk(monkeypatch)
    while not manager.stats().tiers[1].switched_off:
        load(manager, BOB, keys(0, 0))
    store.reads.clear()
    twice = [manager.get_match(ALICE, keys(1, 2)) for _ in range(2)]
    store.reads.set()
    assert load(manager, ALICE, keys(1, 2)) == contents(ALICE, keys(1, 2))
    twice = list(manager.try_wait([task.task_id for task in twice]).values())
    assert [(task.disk_blocks, task.remote_blocks) for task in twice] == [(0, 2)] * 2
    manager.cancel([task.task_id for task in twice])
    store.values.clear()
    save(manager, BOB, keys(9, 9, 9, 9))
    gone = manager.get_match(ALICE, keys(1, 2, 3))
    if gone.task_id:
        gone = manager.wait([gone.task_id], PATIENCE_SECONDS)[gone.task_id]
        manager.cancel([gone.task_id])
    told = (gone.matched_blocks, gone.declined_blocks, gone.untold_blocks)
    # Read in vain, or not even that, since every slot was just being written down.
    assert told in {(0, 0, 2), (0, 2, 1)}
    disk.broken = False
    manager.check()
    manager.close()


def test_what_is_on_its_way_down_has_yet_to_be_written(
    managers: list[KVManager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = open_(managers, 4, tmp_path)
    writing, go, real = threading.Event(), threading.Event(), DiskStore.write

    def held(*args: Any) -> Any:
        writing.set()
        assert go.wait(PATIENCE_SECONDS)
        return real(*args)

    monkeypatch.setattr(DiskStore, "write", held)
    save(manager, ALICE, keys(1, 2))
    assert writing.wait(PATIENCE_SECONDS)
    report = manager.stats()
    assert (report.tiers[1].waiting_blocks, report.is_at_rest) == (2, False)
    go.set()
    drained(manager)
    report = manager.stats()
    assert (report.tiers[1].waiting_blocks, report.is_at_rest) == (0, True)


FAST_BREAKER = {**(wrap.BreakerStore.__init__.__kwdefaults__ or {}), "retry_seconds": 0.02}


def test_bug_while_writing_leaves_no_lease_and_the_blocks_are_tried_again(
    managers: list[KVManager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_RETRY_SECONDS", 0.01)
    disk = FailingDisk(monkeypatch)
    disk.error = ZeroDivisionError("a bug")
    manager = open_(managers, 2, tmp_path)
    save(manager, ALICE, keys(1, 2))
    eventually(lambda: disk.calls > 2, "the writer has stopped")
    disk.broken = False
    drained(manager)
    assert on_disk(manager) == 2
    assert set(known(manager).values()) == {0}


def test_blocks_that_a_full_disk_could_not_give_up_are_given_up_later(
    managers: list[KVManager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the disk would stay fuller than the index knows, and refuse blocks for ever."""
    monkeypatch.setattr(transfer, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(wrap.BreakerStore.__init__, "__kwdefaults__", FAST_BREAKER)
    manager = open_(managers, 2, tmp_path, disk_slots=2)
    save(manager, ALICE, keys(1, 2))
    drained(manager)
    disk = FailingDisk(monkeypatch)
    save(manager, BOB, keys(1, 2))
    eventually(lambda: disk.calls > 1, "the writer has stopped")
    disk.broken = False
    drained(manager)
    assert on_disk(manager) == 2
    push_out(manager, 2)
    close(managers, manager)
    again = open_(managers, 2, tmp_path, disk_slots=2)
    assert load(again, BOB, keys(77, 77)) == contents(BOB, keys(77, 77))


def test_disk_that_stays_broken_does_not_hold_close_for_longer_than_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transfer, "_RETRY_SECONDS", 0.01)
    manager = KVManager(config(2, tmp_path, drain_timeout_seconds=0.05), block_bytes=BLOCK_BYTES)
    FailingDisk(monkeypatch)
    save(manager, ALICE, keys(1))
    with caplog.at_level(logging.WARNING):
        manager.close()
    assert "1 blocks could not be written to disk in time" in caplog.text


def test_disk_that_hangs_does_not_hold_close_for_longer_than_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    manager = KVManager(config(2, tmp_path, drain_timeout_seconds=0.05), block_bytes=BLOCK_BYTES)
    go, entered = threading.Event(), threading.Event()
    real = DiskStore.write

    def hanging(*args: object) -> object:
        entered.set()
        assert go.wait(PATIENCE_SECONDS)
        return real(*args)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(DiskStore, "write", hanging)
    save(manager, ALICE, keys(1))
    assert entered.wait(PATIENCE_SECONDS)
    ours = set(threading.enumerate()) - before
    writers = [each for each in ours if each.name.startswith("kvstrata-write")]
    assert writers
    closing = threading.Thread(target=manager.close)
    closing.start()
    closing.join(PATIENCE_SECONDS)
    hung = closing.is_alive()
    go.set()
    closing.join(PATIENCE_SECONDS)
    assert not hung
    eventually(lambda: not any(each.is_alive() for each in writers), "the writer does not end")


# -- opening -------------------------------------------------------------------------------------


def memfds() -> set[tuple[str, int]]:
    """Descriptors of host tiers, with inodes; those of earlier tests may go at any moment."""
    links = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
    return {(fd, os.stat(fd).st_ino) for fd in links if _is_host_tier(fd)}


def _is_host_tier(fd: str) -> bool:
    return os.path.islink(fd) and "memfd:kvstrata-host" in os.readlink(fd)


def test_refused_host_memory_leaves_the_disk_to_others(tmp_path: Path) -> None:
    before = memfds()
    with pytest.raises(ConfigError, match="holds no block"):
        KVManager(config(1, tmp_path), block_bytes=2 * BLOCK_BYTES)
    assert memfds() <= before
    DiskStore(
        [tmp_path], block_bytes=BLOCK_BYTES, capacity_bytes=1 << 20, lock_timeout_seconds=0
    ).close()


def test_refused_disk_leaves_no_host_memory(tmp_path: Path) -> None:
    KVManager(config(1, tmp_path), block_bytes=BLOCK_BYTES).close()
    before = memfds()
    with pytest.raises(FormatError):
        KVManager(config(4, tmp_path), block_bytes=2 * BLOCK_BYTES)
    assert memfds() <= before


def test_host_memory_larger_than_the_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="of memory is available"):
        KVManager(
            config(1).model_validate({"tiers": "host:1000TiB", "prefault": False}),
            block_bytes=BLOCK_BYTES,
        )


def test_prefaulting_backs_every_page_and_changes_none() -> None:
    memory = HostMemory(capacity_bytes=64 * 4096, block_bytes=BLOCK_BYTES, server_id=b"s")
    memory.view(3)[:] = b"\x07" * BLOCK_BYTES
    memory.prefault()
    assert os.fstat(memory.mapping.fd).st_blocks * 512 == 65 * 4096
    assert bytes(memory.view(3)) == b"\x07" * BLOCK_BYTES
    memory.close()


def test_prefault_in_the_background_ends_quietly_when_the_cache_closes_first() -> None:
    manager = KVManager(config(4, prefault=True), block_bytes=BLOCK_BYTES)
    manager.close()
    eventually(
        lambda: not any(t.name == "kvstrata-prefault" for t in threading.enumerate()),
        "prefaulting does not end",
    )


def test_lossy_blocks_come_from_below_nearly_as_they_were(tmp_path: Path) -> None:
    settings = config(2, tmp_path / "kv", 8)
    manager = KVManager(settings, block_bytes=BLOCK_BYTES, block_format="int8 float32")
    rng = np.random.default_rng(1)
    values = [rng.normal(size=BLOCK_BYTES // 4).astype(np.float32) for _ in range(4)]
    asked = keys(0, 0, 0, 0)
    for i, value in enumerate(values):
        task = manager.put_match(ALICE, asked[i : i + 1], parent=asked[i - 1] if i else None)
        manager.view(task.slots[0])[:] = value.tobytes()
        manager.launch([task.task_id])
        manager.complete([task.task_id])
        assert load(manager, ALICE, asked[i : i + 1]) == [value.tobytes()]  # exact in host memory
        drained(manager)
    for i, value in enumerate(values[:2]):
        (promoted,) = load(manager, ALICE, asked[i : i + 1])
        read = np.frombuffer(promoted, np.float32)
        assert not np.array_equal(read, value)
        assert np.abs(read - value).max() < 0.05
    manager.check()
    manager.close()
    with pytest.raises(ConfigError, match="was made with block_bytes="):
        KVManager(settings, block_bytes=BLOCK_BYTES)


@pytest.mark.parametrize("block_format", ["int8 float8_e4m3fn", "int4 bfloat16", "int8"])
def test_format_that_is_none_is_refused(block_format: str) -> None:
    with pytest.raises(ConfigError, match="cannot be kept as"):
        KVManager(config(2), block_bytes=BLOCK_BYTES, block_format=block_format)


def test_report_says_how_long_the_disk_took(tmp_path: Path) -> None:
    manager = KVManager(config(8, tmp_path), block_bytes=BLOCK_BYTES)
    save(manager, ALICE, keys(0, 0))
    drained(manager)
    (writes,) = [o for o in manager.stats().operations if o.operation == "write"]
    assert (writes.tier, writes.moved_bytes, max(writes.within)) == ("disk", 8192, writes.calls)
    assert writes.seconds > 0
    manager.close()


def test_report_says_what_there_is(managers: list[KVManager], tmp_path: Path) -> None:
    manager = open_(managers, 4, tmp_path)
    manager.register_namespace(ALICE, {"model": "m"})
    engine = manager.connect_engine("e", 2)
    manager.connect_worker("e", 1)
    save(manager, ALICE, keys(1))
    drained(manager)
    report = manager.stats()
    assert report.server_id == manager.server_id.hex()
    host, disk = report.tiers
    assert (host.tier, host.capacity_blocks, host.used_blocks, host.block_bytes) == (
        "host",
        4,
        1,
        4096,
    )
    assert (disk.tier, disk.capacity_blocks, disk.used_blocks) == ("disk", 64, 1)
    assert [n.parts for n in report.namespaces] == [{"model": "m"}]
    assert report.engines == [
        {"session": "e", "workers": [1], "world_size": 2, "blocks_per_second": None}
    ]
    manager.disconnect(engine)
    assert manager.stats().engines == []


@pytest.mark.parametrize("eviction", ["lru", "s3fifo", "cost"])
def test_reset_while_blocks_that_have_to_leave_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eviction: str
) -> None:
    settings = config(40, tmp_path, 256, eviction=eviction, write="evicted")
    manager = KVManager(settings, block_bytes=BLOCK_BYTES)
    with monkeypatch.context() as patch:
        patch.setattr(manager._lower["disk"], "_take", lambda: None)
        for prompt in range(12):
            save(manager, ALICE, keys(*[prompt] * 4))
        manager.reset(ALICE)
        manager.check()

    def is_kept(asked: list[BlockKey]) -> bool:
        save(manager, BOB, asked)  # for which others may have to be written first
        return load(manager, BOB, asked) == contents(BOB, asked)

    for prompt in range(12):
        eventually(partial(is_kept, keys(*[prompt] * 4)), "nothing can be saved any more")
    manager.check()
    manager.close()


def test_lookups_that_find_nothing_leave_nothing_behind(tmp_path: Path) -> None:
    manager = KVManager(config(8, tmp_path), block_bytes=BLOCK_BYTES)
    for prompt in range(10):
        assert manager.get_match(ALICE, keys(prompt)).task_id == 0
    assert manager._cache._host._touched == manager._cache._disk._touched == []
    manager.close()
