"""Every state of a task and everything that can be said of it: a real task, a real cache.

Each cell of the table in ``kvstrata.manager.tasks`` is entered in every way there is, told the
news once and twice, and followed to its end: no slot and no lease is left, no byte is wrong.
"""

from collections.abc import Iterator

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

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.keys import as_key_array
from kvstrata.core.types import StoreKey
from kvstrata.manager.manager import KVManager
from kvstrata.manager.tasks import FINAL, TaskState
from kvstrata.testing.memory import Value

PROMPT = keys(0, 0, 0, 0)
NEWS = ("launch", "complete", "complete_part", "nothing of it", "fail", "cancel")

# Where the news lead to from each state; None: they are refused. Written out, not computed.
GETS: dict[str, dict[str, str | None]] = {
    "searching": {"launch": "running", "fail": "failed", "cancel": "cancelled"},
    "promoting": {"launch": "running", "fail": "failed", "cancel": "cancelled"},
    "ready": {"launch": "running", "fail": "failed", "cancel": "cancelled"},
    "running": {
        "launch": "running",
        "complete": "done",
        "complete_part": "done",
        "fail": "failed",
        "cancel": "stopping",
    },
    "stopping": {
        "launch": "stopping",
        "complete": "cancelled",
        "complete_part": "cancelled",
        "fail": "cancelled",
        "cancel": "stopping",
    },
    "done": dict.fromkeys(NEWS, "done"),
    "failed": dict.fromkeys(NEWS, "failed"),
    "cancelled": dict.fromkeys(NEWS, "cancelled"),
}
PUTS = {state: GETS[state] for state in GETS if state not in {"searching", "promoting"}}
CELLS = [
    (kind, state, news)
    for kind, table in (("get", GETS), ("put", PUTS), ("prefetch", GETS))
    for state in table
    for news in NEWS
]


def after(state: str, news: str) -> str | None:
    """To say that nothing is whole is to say that it failed."""
    return GETS[state].get("fail" if news == "nothing of it" else news)


@pytest.fixture
def store() -> GatedStore:
    """What another node has left there: a prompt of four blocks."""
    values: dict[StoreKey, Value] = {}
    other = KVManager(config(8), block_bytes=BLOCK_BYTES, remote=GatedStore(values))
    save(other, ALICE, PROMPT)
    other.close()
    return GatedStore(values)


@pytest.fixture
def manager(store: GatedStore) -> Iterator[KVManager]:
    """Host memory for eight blocks; at the end nothing of a task is left."""
    made = KVManager(config(8), block_bytes=BLOCK_BYTES, remote=store)
    made.memory.mapping.data[:] = 0xEE
    yield made
    made.disconnect(0)
    store.searches.set()
    store.reads.set()
    eventually(lambda: not reads_running(made), "a promotion does not end")
    eventually(lambda: set(known(made).values()) <= {0}, "a lease is kept")
    made.check()
    report = made.stats()
    assert (report.running_gets, report.running_puts) == (0, 0)
    right = contents(ALICE, PROMPT)
    eventually(lambda: load(made, ALICE, PROMPT) == right, "what is there is not found")
    found = load(made, BOB, PROMPT)
    assert found == contents(BOB, PROMPT[: len(found)])
    made.close()


def state_of(manager: KVManager, task: int) -> str:
    return manager.try_wait([task])[task].state.value


class Bench:
    """Brings a new task of *kind* into the state that is asked for."""

    def __init__(self, kind: str, manager: KVManager, store: GatedStore) -> None:
        self.kind, self.manager, self.store = kind, manager, store

    def bring_to(self, state: str) -> int:
        task = self.begin(state)
        if state in {"running", "stopping", "done"} and state_of(self.manager, task) != "done":
            self.manager.launch([task])
        if state == "stopping":
            self.manager.cancel([task])
        elif state == "done":
            self.manager.complete([task])
        elif state == "failed":
            self.manager.fail([task])
        elif state == "cancelled":
            self.manager.cancel([task])
        assert state_of(self.manager, task) == state
        return task

    def begin(self, state: str) -> int:
        if self.kind == "put":
            task = self.manager.put_match(BOB, PROMPT)
            write(self.manager, task, BOB, PROMPT)
            return task.task_id
        if state == "searching":
            self.store.searches.clear()
        elif state != "ready" and not (self.kind == "get" and state == "done"):
            self.store.reads.clear()
        if self.kind == "get":
            number = self.manager.get_match(ALICE, PROMPT).task_id
        else:
            number = self.manager.prefetch(ALICE, PROMPT)
        if state == "searching":
            return number
        if self.kind == "get" and state in {"ready", "done"}:
            self.until(number, "ready")
        elif state != "ready":
            self.until(number, "promoting")
        return number

    def until(self, task: int, state: str) -> None:
        eventually(lambda: state_of(self.manager, task) == state, f"it is never {state}")


def tell(manager: KVManager, news: str, task: int) -> None:
    if news == "complete_part":
        manager.complete_part(task, 2)
    elif news == "nothing of it":
        manager.complete_part(task, 0)
    else:
        getattr(manager, news)([task])


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(("kind", "state", "news"), CELLS)
def test_cell(
    manager: KVManager, store: GatedStore, kind: str, state: str, news: str, times: int
) -> None:
    if kind == "prefetch" and state == "ready":
        return prefetch_is_never_ready(manager)
    task = Bench(kind, manager, store).bring_to(state)
    expected: str | None = state
    for _ in range(times):
        assert expected is not None
        was, expected = expected, after(expected, news)
        if expected is None:
            expected = was
            with pytest.raises(InvariantViolated, match=f"a task cannot complete while {was}"):
                tell(manager, news, task)
        else:
            tell(manager, news, task)
        assert state_of(manager, task) == expected
    return None


def prefetch_is_never_ready(manager: KVManager) -> None:
    """It is done as soon as it could be."""
    task = manager.prefetch(ALICE, PROMPT)
    eventually(lambda: state_of(manager, task) == "done", "it does not end")
    assert manager.prefetch(ALICE, PROMPT) == 0


def test_table_above_has_a_row_for_each_state_and_is_not_about_ends_alone() -> None:
    assert set(GETS) == {state.value for state in TaskState}
    assert {s for s in GETS if set(GETS[s].values()) == {s}} == {state.value for state in FINAL}


# -- what else moves a task ----------------------------------------------------------------------


@pytest.mark.parametrize("news", ["launch", "cancel", "fail"])
@pytest.mark.parametrize("state", ["searching", "promoting"])
def test_what_arrives_after_the_news_changes_nothing(
    manager: KVManager, store: GatedStore, state: str, news: str
) -> None:
    """The end of a search and of a read come late, to a task that has gone on."""
    task = Bench("get", manager, store).bring_to(state)
    tell(manager, news, task)
    expected = state_of(manager, task)
    store.searches.set()
    store.reads.set()
    eventually(lambda: not reads_running(manager), "the reads do not end")
    eventually(lambda: not manager._lower["remote"]._finder._threads._work_queue.qsize(), "search")
    assert state_of(manager, task) == expected


@pytest.mark.parametrize("state", ["searching", "promoting"])
def test_reset_ends_a_search_and_spares_what_is_on_its_way(
    manager: KVManager, store: GatedStore, state: str
) -> None:
    bench = Bench("get", manager, store)
    task = bench.bring_to(state)
    values = dict(store.values)
    manager.reset(ALICE)
    store.values.update(values)  # another node saves it again
    store.searches.set()
    store.reads.set()
    bench.until(task, "ready")
    manager.cancel([task])


# -- prefetches ----------------------------------------------------------------------------------


def test_cancelled_prefetch_begins_no_read(manager: KVManager, store: GatedStore) -> None:
    """Four readers are busy with other blocks, so its own read waits."""
    save(manager, BOB, keys(*range(4)))
    assert manager._lower["remote"].drain(PATIENCE_SECONDS)
    with manager._lock:
        manager._cache.drop_from_host(manager._cache.index.find(BOB, as_key_array(keys(*range(4)))))
    store.reads.clear()
    begun = store.begun_reads
    busy = [manager.prefetch(BOB, [block]) for block in keys(*range(4))]
    eventually(lambda: store.begun_reads == begun + 4, "the readers do not begin")
    task = manager.prefetch(ALICE, PROMPT)
    eventually(lambda: reads_running(manager) == 8, "its blocks are never asked for")
    manager.cancel([task])
    store.reads.set()
    eventually(lambda: [state_of(manager, b) for b in busy] == ["done"] * 4, "the reads do not end")
    assert not reads_running(manager)
    assert not {ALICE + block for block in PROMPT} & set(store.read_keys)
    assert manager.stats().tiers[0].used_blocks == 4


def test_cancelled_prefetch_whose_blocks_another_waits_for_is_read(
    manager: KVManager, store: GatedStore
) -> None:
    store.reads.clear()
    task = manager.prefetch(ALICE, PROMPT)
    eventually(lambda: reads_running(manager) == 4, "its blocks are never asked for")
    get = manager.get_match(ALICE, PROMPT)
    manager.cancel([task])
    store.reads.set()
    found = manager.wait([get.task_id], PATIENCE_SECONDS)[get.task_id]
    assert [bytes(manager.view(slot)) for slot in found.slots] == contents(ALICE, PROMPT)


# -- a part of a task ----------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 3, 4, 99])
def test_blocks_of_a_put_that_were_copied_are_found_and_the_others_are_free(
    manager: KVManager, blocks: int
) -> None:
    task = manager.put_match(BOB, PROMPT)
    manager.launch([task.task_id])
    write(manager, task, BOB, PROMPT)
    for slot in task.slots[blocks:]:
        manager.view(slot)[:] = b"\xdd" * BLOCK_BYTES
    manager.complete_part(task.task_id, blocks)
    kept = min(blocks, 4)
    assert load(manager, BOB, PROMPT) == contents(BOB, PROMPT[:kept])
    assert manager.stats().tiers[0].used_blocks == kept
    assert manager.counters.snapshot()["kvstrata_saved_blocks_total"] == kept
    again = manager.put_match(BOB, PROMPT)
    assert again.missing == list(range(kept, 4))


def test_part_of_a_put_that_began_before_a_reset_is_not_found(manager: KVManager) -> None:
    task = manager.put_match(BOB, PROMPT)
    manager.launch([task.task_id])
    write(manager, task, BOB, PROMPT)
    manager.reset(BOB)
    manager.complete_part(task.task_id, 3)
    assert load(manager, BOB, PROMPT) == []
    assert manager.stats().tiers[0].used_blocks == 0


def test_blocks_of_a_get_that_were_copied_are_not_in_doubt(
    manager: KVManager, store: GatedStore
) -> None:
    task = Bench("get", manager, store).bring_to("ready")
    manager.launch([task])
    manager.complete_part(task, 3)
    assert manager.get_match(ALICE, PROMPT[:3]).state is TaskState.READY
    assert manager.stats().tiers[0].used_blocks == 3
    assert manager.counters.snapshot()["kvstrata_loaded_blocks_total"] == 3
