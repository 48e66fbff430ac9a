"""A manager above a tier that others write to as well."""

import itertools
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
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
    known,
    load,
    reads_running,
    save,
    write,
)
from tests.gated import GatedStore

from kvstrata.core.config import Config
from kvstrata.core.errors import TierUnavailable
from kvstrata.core.types import Read, StoreKey
from kvstrata.manager import choices
from kvstrata.manager.manager import KVManager
from kvstrata.manager.tasks import TaskState, TaskStatus
from kvstrata.storage.call_time import end_within
from kvstrata.storage.store import Store
from kvstrata.storage.wrap.forward import T
from kvstrata.testing import Fault, FlakyStore, SlowStore
from kvstrata.testing.memory import Value


@pytest.fixture
def values() -> dict[StoreKey, Value]:
    """What a node with the same store has left there: a prompt of four blocks."""
    values: dict[StoreKey, Value] = {}
    other = KVManager(config(8), block_bytes=BLOCK_BYTES, remote=GatedStore(values))
    save(other, ALICE, keys(0, 0, 0, 0))
    other.close()
    assert len(values) == 4
    return values


@pytest.fixture
def store(values: dict[StoreKey, Value]) -> GatedStore:
    return GatedStore(values)


@pytest.fixture
def manager(store: GatedStore) -> Iterator[KVManager]:
    made = KVManager(config(8), block_bytes=BLOCK_BYTES, remote=store)
    yield made
    store.searches.set()
    store.reads.set()
    eventually(lambda: not reads_running(made), "a promotion does not end")
    made.check()
    # The writer holds its batch for a moment.
    eventually(lambda: set(known(made).values()) <= {0}, "a lease is kept")
    made.close()


def settled(manager: KVManager, task: TaskStatus) -> TaskStatus:
    return manager.wait([task.task_id], PATIENCE_SECONDS)[task.task_id]


def count(manager: KVManager, name: str) -> int:
    return manager.counters.snapshot()[f"kvstrata_{name}"]


def test_what_another_node_has_saved_is_found_and_loaded(manager: KVManager) -> None:
    asked = keys(0, 0, 0, 0, 7)
    task = manager.get_match(ALICE, asked)
    assert (task.state, task.slots) == (TaskState.SEARCHING, [])
    task = settled(manager, task)
    assert (task.state, task.matched_blocks, task.remote_blocks) == (TaskState.READY, 4, 4)
    assert [bytes(manager.view(slot)) for slot in task.slots] == contents(ALICE, asked[:4])
    manager.launch([task.task_id])
    manager.complete([task.task_id])
    assert count(manager, "lookup_blocks_total{tier=remote}") == 4
    assert count(manager, "lookup_blocks_total{tier=none}") == 1
    assert count(manager, "promoted_blocks_total{tier=remote}") == 4


def test_what_a_prefetch_finds_is_no_lookup_of_the_traffic(manager: KVManager) -> None:
    task = manager.prefetch(ALICE, keys(0, 0, 0, 0, 7))
    assert manager.wait([task], PATIENCE_SECONDS)[task].state is TaskState.DONE
    assert count(manager, "promoted_blocks_total{tier=remote}") == 4
    counted = manager.counters.snapshot()
    assert {n: v for n, v in counted.items() if n.startswith("kvstrata_lookup") and v} == {}
    durations = [each.metric for each in manager.counters.durations.snapshot()]
    assert "kvstrata_lookup_seconds" not in durations
    assert manager.operator.hottest(8) == []


@pytest.mark.parametrize("path", [(0, 1, 0), (1, 1), (0, 0)])
def test_key_that_comes_twice_is_looked_for_up_to_there(
    manager: KVManager, path: tuple[int, ...]
) -> None:
    """No prompt has one. A lease is taken once a block, and would be returned once."""
    prompt = keys(0, 0, 0, 0)
    asked = [prompt[block] for block in path]
    save(manager, ALICE, prompt[:1])
    task = settled(manager, manager.get_match(ALICE, asked))
    assert task.state is TaskState.READY
    assert len(task.slots) == len(set(path))
    manager.cancel([task.task_id])
    eventually(lambda: set(known(manager).values()) == {0}, "a lease is kept")


def test_what_came_from_there_is_not_written_there_again(
    manager: KVManager, store: GatedStore
) -> None:
    assert load(manager, ALICE, keys(0, 0, 0, 0)) == contents(ALICE, keys(0, 0, 0, 0))
    save(manager, ALICE, keys(5))
    assert manager._lower["remote"].drain(PATIENCE_SECONDS)
    assert store.written_keys == [ALICE + keys(5)[0]]


def test_a_request_that_ends_before_its_lookup_is_answered_counts_as_nothing(
    store: GatedStore,
) -> None:
    manager = KVManager(config(8, remote_lookup_seconds=30), block_bytes=BLOCK_BYTES, remote=store)
    store.searches.clear()
    task = manager.get_match(ALICE, keys(0, 0))
    manager.cancel([task.task_id])
    store.searches.set()
    eventually(
        lambda: count(manager, "lookup_blocks_total{tier=remote}") == 2, "the search has no end"
    )
    assert count(manager, "unanswered_lookups_total") == 0
    manager.close()


def test_a_prefetch_that_is_cancelled_late_is_no_unanswered_lookup(store: GatedStore) -> None:
    manager = KVManager(
        config(8, remote_lookup_seconds=1e-6), block_bytes=BLOCK_BYTES, remote=store
    )
    store.searches.clear()
    manager.cancel([manager.prefetch(ALICE, keys(0, 0))])
    request = manager.get_match(ALICE, keys(0, 0))
    manager.cancel([request.task_id])
    store.searches.set()
    eventually(lambda: count(manager, "unanswered_lookups_total") > 0, "the search has no end")
    manager.close()
    assert count(manager, "unanswered_lookups_total") == 1


def test_a_lookup_makes_no_key_for_each_block_that_is_not_known(store: GatedStore) -> None:
    """A search asks for some of them, behind the answer to the engine."""
    manager = KVManager(config(8), block_bytes=BLOCK_BYTES, remote=store)
    unknown = np.random.default_rng(1).integers(0, 256, (100_000, 32), np.uint8)
    manager.cancel([manager.get_match(ALICE, unknown[:10]).task_id])
    tracemalloc.start()
    task = manager.get_match(ALICE, unknown)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 50 * len(unknown)  # a key is an object of 81 bytes, and a place in a list
    manager.cancel([task.task_id])
    manager.close()


def test_what_is_known_is_there_at_once_and_the_rest_comes_later(
    manager: KVManager, store: GatedStore
) -> None:
    save(manager, ALICE, keys(0, 0))
    store.searches.clear()
    news: list[TaskStatus] = []
    task = manager.get_match(ALICE, keys(0, 0, 0, 0), settled=news.append)
    assert (task.state, len(task.slots)) == (TaskState.SEARCHING, 2)
    store.reads.clear()
    store.searches.set()
    eventually(lambda: len(news) == 1, "the end of the search is not told")
    assert (news[0].state, news[0].matched_blocks) == (TaskState.PROMOTING, 4)
    store.reads.set()
    eventually(lambda: len(news) == 2, "the end of the promotion is not told")
    assert (news[1].state, len(news[1].slots)) == (TaskState.READY, 4)
    manager.cancel([task.task_id])


def test_launched_during_the_search_takes_what_is_known(
    manager: KVManager, store: GatedStore
) -> None:
    save(manager, ALICE, keys(0, 0))
    store.searches.clear()
    task = manager.get_match(ALICE, keys(0, 0, 0, 0))
    manager.launch([task.task_id])
    store.searches.set()
    eventually(lambda: count(manager, "lookup_blocks_total{tier=remote}") == 2, "no search")
    manager.complete([task.task_id])
    assert count(manager, "loaded_blocks_total") == 2
    assert store.read_keys == []


def test_what_lies_behind_a_block_that_is_gone_is_not_waited_for(
    manager: KVManager, store: GatedStore, values: dict[StoreKey, Value]
) -> None:
    """A store that says that a block is there may have lost it by the time it is read."""
    prompt = keys(0, 0, 0, 0)
    task = manager.get_match(ALICE, prompt)
    store.reads.clear()
    eventually(lambda: reads_running(manager) == 4, "nothing is read")
    del values[ALICE + prompt[1]]
    store.reads.set()
    task = settled(manager, task)
    assert (task.state, len(task.slots), task.matched_blocks) == (TaskState.READY, 1, 1)
    assert task.untold_blocks == 0
    manager.cancel([task.task_id])


def test_two_lookups_of_the_same_blocks_are_one_read(manager: KVManager, store: GatedStore) -> None:
    store.reads.clear()
    one = manager.get_match(ALICE, keys(0, 0, 0, 0))
    eventually(lambda: reads_running(manager) == 4, "nothing is read")
    other = manager.get_match(ALICE, keys(0, 0, 0, 0))
    assert (other.state, other.matched_blocks) == (TaskState.PROMOTING, 4)
    store.reads.set()
    for task in (one, other):
        assert len(settled(manager, task).slots) == 4
    manager.cancel([one.task_id, other.task_id])
    assert len(store.read_keys) == 4


def test_block_that_is_being_saved_is_not_read_as_well(
    manager: KVManager, store: GatedStore
) -> None:
    asked = keys(0, 0)
    put = manager.put_match(ALICE, asked)
    manager.launch([put.task_id])
    write(manager, put, ALICE, asked)
    get = settled(manager, manager.get_match(ALICE, asked))
    assert (get.slots, get.matched_blocks, get.untold_blocks) == ([], 0, 2)
    manager.complete([put.task_id])
    manager.cancel([get.task_id])
    manager.check()
    assert load(manager, ALICE, asked) == contents(ALICE, asked)
    assert manager.stats().tiers[0].used_blocks == 2


def test_room_for_what_was_found_may_be_made_by_a_block_behind_one_that_is_being_saved(
    store: GatedStore, values: dict[StoreKey, Value]
) -> None:
    manager = KVManager(config(4), block_bytes=BLOCK_BYTES, remote=store)
    asked = keys(0, 0, 0)
    assert load(manager, ALICE, asked) == contents(ALICE, asked)
    doubted = manager.get_match(ALICE, asked[:2]).task_id
    manager.launch([doubted])
    manager.fail([doubted])
    failed = manager.put_match(ALICE, asked[:1]).task_id
    saving = manager.put_match(ALICE, asked[1:2], parent=asked[0]).task_id
    manager.launch([failed, saving])
    manager.fail([failed])
    full = manager.put_match(BOB, keys(0, 0)).task_id  # but for the last of *asked*
    task = settled(manager, manager.get_match(ALICE, asked))
    assert task.state is TaskState.READY
    assert [bytes(manager.view(slot)) for slot in task.slots] == contents(ALICE, asked[:1])
    manager.cancel([task.task_id, full])
    manager.fail([saving])
    manager.check()
    assert manager.stats().tiers[0].used_blocks == 1
    manager.close()


def test_block_that_is_being_read_is_not_saved_as_well(
    manager: KVManager, store: GatedStore
) -> None:
    asked = keys(0, 0)
    store.reads.clear()
    get = manager.get_match(ALICE, asked)
    eventually(lambda: reads_running(manager) == 2, "nothing is read")
    assert manager.put_match(ALICE, asked) == TaskStatus(0, TaskState.DONE)
    store.reads.set()
    get = settled(manager, get)
    assert [bytes(manager.view(slot)) for slot in get.slots] == contents(ALICE, asked)
    manager.cancel([get.task_id])


def test_store_that_is_away_has_nothing(manager: KVManager, store: GatedStore) -> None:
    save(manager, ALICE, keys(0))
    store.away = True
    task = settled(manager, manager.get_match(ALICE, keys(0, 0, 0)))
    assert (task.state, len(task.slots), task.untold_blocks) == (TaskState.READY, 1, 2)
    manager.cancel([task.task_id])
    store.away = False


def test_store_all_searches_of_which_hang_is_left_alone(
    store: GatedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory whose mount hangs, on a node that writes nothing."""
    monkeypatch.setattr(choices, "_HUNG_SECONDS", 0.05)
    manager = KVManager(config(8), block_bytes=BLOCK_BYTES, remote=store)
    store.searches.clear()
    manager.cancel([manager.get_match(ALICE, keys(0)).task_id])
    eventually(lambda: manager.stats().tiers[1].switched_off, "it is not switched off")
    task = settled(manager, manager.get_match(ALICE, keys(0)))
    assert (task.state, task.slots, task.untold_blocks) == (TaskState.READY, [], 1)
    manager.cancel([task.task_id])
    store.searches.set()
    manager.close()


def test_what_cannot_be_read_is_not_said_to_be_gone(
    manager: KVManager, store: GatedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = keys(0, 0, 0, 0, 0)
    inner = store.read_into

    def failing(names: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        return [
            Read.FAILED if name == ALICE + prompt[1] else read
            for name, read in zip(names, inner(names, buffers), strict=True)
        ]

    with monkeypatch.context() as patch:
        patch.setattr(store, "read_into", failing)
        task = settled(manager, manager.get_match(ALICE, prompt))
    assert (task.matched_blocks, task.untold_blocks) == (1, 3)
    manager.cancel([task.task_id])


def test_what_nobody_was_asked_for_is_not_said_to_be_gone(tmp_path: Path) -> None:
    """Where there is no room for what is on disk, what may follow on it is not searched for."""
    manager = KVManager(config(2, tmp_path), block_bytes=BLOCK_BYTES, remote=GatedStore({}))
    save(manager, ALICE, keys(0))
    eventually(lambda: manager.stats().is_at_rest, "not written")
    full = manager.put_match(BOB, keys(0, 0))
    task = manager.get_match(ALICE, keys(0, 0, 0))
    assert task == TaskStatus(0, TaskState.DONE, declined_blocks=1, untold_blocks=2)
    manager.cancel([full.task_id])
    manager.close()


def test_damaged_block_cuts_the_prefix(manager: KVManager, store: GatedStore) -> None:
    asked = keys(0, 0, 0, 0)
    store.damage(ALICE + asked[2])
    task = settled(manager, manager.get_match(ALICE, asked))
    assert [bytes(manager.view(slot)) for slot in task.slots] == contents(ALICE, asked[:2])
    assert count(manager, "corrupt_blocks_total") == 1
    manager.cancel([task.task_id])


def test_reset_is_for_all_nodes(
    manager: KVManager, store: GatedStore, values: dict[StoreKey, Value]
) -> None:
    store.searches.clear()
    running = manager.get_match(ALICE, keys(0, 0))
    other = manager.get_match(BOB, keys(0))
    manager.reset(ALICE)
    assert settled(manager, running).slots == []
    store.searches.set()
    assert values == {}
    assert settled(manager, manager.get_match(ALICE, keys(0, 0))).slots == []
    assert settled(manager, other).slots == []
    for task in list(manager._gets.tasks):
        manager.cancel([task])


def test_reset_that_the_store_does_not_hear_keeps_its_blocks_from_being_found(
    manager: KVManager, store: GatedStore, values: dict[StoreKey, Value]
) -> None:
    store.away = True
    with pytest.raises(TierUnavailable):
        manager.reset(ALICE)
    store.away = False
    store.reads.clear()
    if ALICE + keys(0)[0] in values:
        assert manager.get_match(ALICE, keys(0, 0)) == TaskStatus(0, TaskState.DONE)
    eventually(lambda: not values, "the store never hears of the reset")


def test_host_memory_without_room_takes_what_fits(store: GatedStore) -> None:
    manager = KVManager(config(3), block_bytes=BLOCK_BYTES, remote=store)
    task = settled(manager, manager.get_match(ALICE, keys(0, 0, 0, 0)))
    assert (task.state, len(task.slots), task.matched_blocks) == (TaskState.READY, 3, 3)
    manager.cancel([task.task_id])
    manager.check()
    manager.close()


@pytest.mark.parametrize("compress", [False, True])
def test_nodes_share_a_directory(tmp_path: Path, compress: bool) -> None:
    host = {"kind": "host", "capacity": "64KiB"}
    shared = {"kind": "shared", "path": tmp_path / "shared", "capacity": "1MiB"}
    tiers = [host, {**shared, "compress": compress}]
    settings = Config.model_validate({"tiers": tiers, "prefault": False})
    nodes = [KVManager(settings, block_bytes=BLOCK_BYTES) for _ in range(2)]
    save(nodes[0], ALICE, keys(0, 0, 0))
    assert nodes[0]._lower["remote"].drain(PATIENCE_SECONDS)
    assert load(nodes[1], ALICE, keys(0, 0, 0)) == contents(ALICE, keys(0, 0, 0))
    assert nodes[1].stats().tiers[1].tier == "remote"
    for node in nodes:
        node.close()


def test_directory_that_is_over_its_capacity_is_swept(tmp_path: Path) -> None:
    tiers = f"host:64KiB | shared:{tmp_path}/shared:40KiB"
    node = KVManager(
        Config.model_validate({"tiers": tiers, "prefault": False}), block_bytes=BLOCK_BYTES
    )
    for i in range(12):
        save(node, ALICE, keys(i))
    eventually(
        lambda: sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file()) <= 60 << 10,
        "the directory is never swept",
    )
    node.close()


@pytest.mark.parametrize(("timeout_seconds", "calls"), [(0.2, 1), (2.0, 3)])
def test_a_call_is_repeated_within_the_time_of_its_tier(
    values: dict[StoreKey, Value], timeout_seconds: float, calls: int
) -> None:
    tiers = f"host:32KiB | valkey://cache?timeout_seconds={timeout_seconds}"
    away = FlakyStore(GatedStore(values), itertools.repeat(Fault.BEFORE))
    manager = KVManager(
        Config.model_validate({"tiers": tiers, "prefault": False}),
        block_bytes=BLOCK_BYTES,
        remote=SlowStore(away, 0.15),
    )
    task = settled(manager, manager.get_match(ALICE, keys(0)))
    assert task.matched_blocks == 0
    assert away.calls == calls
    manager.close()


class Hurried(FlakyStore):
    """Always away. When each of its calls had to end."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner, itertools.repeat(Fault.BEFORE))
        self.ends: list[float] = []

    def _call(self, call: Callable[[], T]) -> T:
        self.ends.append(end_within(3600.0))
        return super()._call(call)


def test_all_tries_of_a_call_share_the_time_of_its_tier(values: dict[StoreKey, Value]) -> None:
    away = Hurried(GatedStore(values))
    manager = KVManager(
        Config.model_validate(
            {"tiers": "host:32KiB | valkey://cache?timeout_seconds=5", "prefault": False}
        ),
        block_bytes=BLOCK_BYTES,
        remote=away,
    )
    began = time.monotonic()
    settled(manager, manager.get_match(ALICE, keys(0)))
    assert len(away.ends) == 3
    assert len(set(away.ends)) == 1
    assert began < away.ends[0] < time.monotonic() + 5.0
    manager.close()
