"""Recurrent states: a prefix ends where all of them are, in whatever tier, and nowhere else."""

import itertools
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
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
    reads_running,
    save,
)
from tests.gated import GatedStore

from kvstrata.core.keys import BlockIds, KeyArray, as_key_array, state_keys
from kvstrata.core.types import BlockKey, NamespaceId, Read, StoreKey
from kvstrata.index.tree import PrefixIndex
from kvstrata.manager.manager import KVManager
from kvstrata.manager.tasks import TaskState, TaskStatus
from kvstrata.storage.disk import DiskStore
from kvstrata.testing.memory import Value

GROUPS = 2
PROMPT = keys(0, 0, 0, 0, 0, 0)


@pytest.fixture
def values() -> dict[StoreKey, Value]:
    return {}


@pytest.fixture
def store(values: dict[StoreKey, Value]) -> GatedStore:
    return GatedStore(values)


@pytest.fixture
def managers() -> Iterator[list[KVManager]]:
    """Closed at the end, when nothing is leased and every slot accounted for."""
    made: list[KVManager] = []
    yield made
    for manager in made:
        close(manager)


def close(manager: KVManager) -> None:
    eventually(lambda: not reads_running(manager), "a promotion does not end")
    manager.check()
    eventually(lambda: set(known(manager).values()) <= {0}, "a lease is kept")
    manager.close()


@pytest.fixture
def manager(managers: list[KVManager]) -> KVManager:
    return open_(managers)


def open_(
    managers: list[KVManager],
    slots: int = 32,
    disk: Path | None = None,
    remote: GatedStore | None = None,
) -> KVManager:
    made = KVManager(config(slots, disk, recompute="never"), block_bytes=BLOCK_BYTES, remote=remote)
    made.memory.mapping.data[:] = 0xEE
    managers.append(made)
    return made


def states_of(block: BlockKey, groups: int = GROUPS) -> list[BlockKey]:
    return [state_keys(as_key_array([block]), group).tobytes() for group in range(groups)]


def save_states(
    manager: KVManager, blocks: Sequence[BlockKey], *ends: int, groups: Sequence[int] = (0, 1)
) -> None:
    """Those of some *groups* behind each number of *ends* of the leading *blocks*."""
    for end in ends:
        states = states_of(blocks[end - 1])
        save(manager, ALICE, [states[g] for g in groups], parent=blocks[end - 1])


def written(manager: KVManager) -> None:
    for lower in manager._lower.values():
        assert lower.drain(PATIENCE_SECONDS)


def push_out(manager: KVManager) -> None:
    """Nothing of before is in host memory afterwards."""
    written(manager)
    slots = manager.memory.slots
    save(manager, BOB, keys(*[77] * slots))
    written(manager)


def ask(manager: KVManager, asked: Sequence[BlockKey]) -> TaskStatus:
    return manager.get_match(ALICE, asked, states=GROUPS)


def settled(manager: KVManager, status: TaskStatus) -> TaskStatus:
    if not status.task_id:
        return status
    return manager.wait([status.task_id], PATIENCE_SECONDS)[status.task_id]


def found(manager: KVManager, asked: Sequence[BlockKey]) -> int:
    """How many blocks a whole get gives back, which are those asked for with the states behind."""
    status = settled(manager, ask(manager, asked))
    return taken(manager, status, asked)


def taken(manager: KVManager, status: TaskStatus, asked: Sequence[BlockKey]) -> int:
    """The blocks of *status*, rightly there, with the states behind them; then it is over."""
    if not status.slots:
        if status.task_id:
            manager.cancel([status.task_id])
        return 0
    blocks = len(status.slots) - GROUPS
    manager.launch([status.task_id])
    here = [bytes(manager.view(slot)) for slot in status.slots]
    assert here == contents(ALICE, [*asked[:blocks], *states_of(asked[blocks - 1])])
    manager.complete([status.task_id])
    return blocks


def hit_count(manager: KVManager, name: str) -> int:
    return manager.counters.snapshot().get(f"kvstrata_{name}", 0)


def test_keys_of_states_differ_by_block_and_group_and_from_their_blocks() -> None:
    some = [*PROMPT, *itertools.chain(*(states_of(block, 4) for block in PROMPT))]
    assert len(set(some)) == 5 * len(PROMPT)


def test_prefix_ends_at_the_last_block_whose_states_are_all_there(manager: KVManager) -> None:
    save(manager, ALICE, PROMPT)
    assert found(manager, PROMPT) == 0
    save_states(manager, PROMPT, 2, 4)
    assert found(manager, PROMPT) == 4
    save_states(manager, PROMPT, 5, groups=[1])
    assert found(manager, PROMPT) == 4
    save_states(manager, PROMPT, 5, groups=[0])
    assert found(manager, PROMPT) == 5
    assert found(manager, PROMPT[:4]) == 4
    assert found(manager, PROMPT[:3]) == 2
    assert found(manager, PROMPT[:1]) == 0


def test_state_behind_a_block_that_is_not_there_is_no_end(manager: KVManager) -> None:
    save(manager, ALICE, PROMPT[:2])
    save_states(manager, PROMPT, 1, 4)
    assert found(manager, PROMPT) == 1


@pytest.mark.parametrize("where", ["in the prompt", "of another end"])
def test_state_that_is_also_something_else_is_none(manager: KVManager, where: str) -> None:
    """No engine has such keys: a lease would be taken twice, and returned twice."""
    last = PROMPT[1]
    first, second = states_of(last)
    if where == "in the prompt":
        asked = [first, last]
    else:  # the first state of this block is the second of that
        rows = as_key_array([second])
        asked = [state_keys(rows, 0).tobytes(), last]
        save(manager, ALICE, states_of(asked[0]))
    save(manager, ALICE, asked)
    save(manager, ALICE, [first, second])
    task = manager.get_match(ALICE, asked, states=GROUPS)
    assert task.slots == []
    manager.check()


def test_states_of_another_namespace_are_not_found(manager: KVManager) -> None:
    save(manager, ALICE, PROMPT)
    save(manager, BOB, PROMPT)
    save(manager, BOB, states_of(PROMPT[1]), parent=PROMPT[1])
    assert found(manager, PROMPT) == 0


def test_state_that_is_being_saved_is_none_yet(manager: KVManager) -> None:
    save(manager, ALICE, PROMPT)
    states = states_of(PROMPT[3])
    task = manager.put_match(ALICE, states, parent=PROMPT[3])
    assert len(task.slots) == GROUPS
    save_states(manager, PROMPT, 2)
    assert found(manager, PROMPT) == 2
    manager.fail([task.task_id])
    assert found(manager, PROMPT) == 2


def test_lookup_without_states_is_as_it_was(manager: KVManager) -> None:
    save(manager, ALICE, PROMPT)
    save_states(manager, PROMPT, 2)
    task = manager.get_match(ALICE, PROMPT)
    assert (task.matched_blocks, len(task.slots)) == (6, 6)
    manager.cancel([task.task_id])


def test_what_is_behind_the_end_is_not_leased_and_the_states_are(manager: KVManager) -> None:
    save(manager, ALICE, PROMPT)
    save_states(manager, PROMPT, 1, 3)
    task = ask(manager, PROMPT)
    assert (task.state, task.matched_blocks, len(task.slots)) == (TaskState.READY, 3, 5)
    leased = {key for key, leases in known(manager).items() if leases}
    assert leased == {ALICE + key for key in [*PROMPT[:3], *states_of(PROMPT[2])]}
    manager.cancel([task.task_id])


def test_failed_load_drops_states_and_blocks_from_host_memory(manager: KVManager) -> None:
    save(manager, ALICE, PROMPT)
    save_states(manager, PROMPT, 3)
    task = ask(manager, PROMPT)
    manager.launch([task.task_id])
    manager.fail([task.task_id])
    assert found(manager, PROMPT) == 0
    assert hit_count(manager, "failed_loads_total") == 1


def test_counters_know_blocks_and_no_states(manager: KVManager) -> None:
    save(manager, ALICE, PROMPT)
    save_states(manager, PROMPT, 4)
    task = manager.get_match(ALICE, PROMPT, states=GROUPS, request="r")
    assert taken(manager, task, PROMPT) == 4
    assert hit_count(manager, "lookup_blocks_total{tier=host}") == 4
    assert hit_count(manager, "lookup_blocks_total{tier=none}") == 2
    assert hit_count(manager, "loaded_blocks_total") == 4
    (decision,) = manager.explain("r")
    assert (decision.taken_blocks, decision.host_blocks) == (4, 4)


def test_reset_forgets_states(manager: KVManager) -> None:
    save(manager, ALICE, PROMPT)
    save_states(manager, PROMPT, 4)
    assert manager.reset(ALICE) == 8
    assert found(manager, PROMPT) == 0
    save(manager, ALICE, PROMPT)
    assert found(manager, PROMPT) == 0


# -- disk ----------------------------------------------------------------------------------------


def test_blocks_and_states_come_up_from_disk(managers: list[KVManager], tmp_path: Path) -> None:
    manager = open_(managers, 12, tmp_path)
    save(manager, ALICE, PROMPT)
    save_states(manager, PROMPT, 4)
    push_out(manager)
    task = ask(manager, PROMPT)
    assert (task.state, task.matched_blocks, task.slots) == (TaskState.PROMOTING, 4, [])
    task = settled(manager, task)
    assert (task.state, task.matched_blocks, task.disk_blocks) == (TaskState.READY, 4, 4)
    assert taken(manager, task, PROMPT) == 4


def test_blocks_behind_the_end_are_not_leased_while_it_comes(
    managers: list[KVManager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = open_(managers, 12, tmp_path)
    save(manager, ALICE, PROMPT)
    save_states(manager, PROMPT, 1, 4)
    push_out(manager)
    go = threading.Event()
    read = DiskStore.read_into
    monkeypatch.setattr(
        DiskStore, "read_into", lambda *a: read(*a) if go.wait(PATIENCE_SECONDS) else []
    )
    task = ask(manager, PROMPT)
    assert task.state is TaskState.PROMOTING
    leased = {key for key, leases in known(manager).items() if leases}
    nearer = states_of(PROMPT[0])
    assert leased == {ALICE + k for k in [*PROMPT[:4], *states_of(PROMPT[3]), *nearer]}
    go.set()
    assert taken(manager, settled(manager, task), PROMPT) == 4


def test_states_are_found_after_a_restart(managers: list[KVManager], tmp_path: Path) -> None:
    manager = open_(managers, 12, tmp_path)
    save(manager, ALICE, PROMPT)
    save_states(manager, PROMPT, 4, 5)
    managers.remove(manager)
    close(manager)
    assert found(open_(managers, 12, tmp_path), PROMPT) == 5


def damage(monkeypatch: pytest.MonkeyPatch, bad: set[StoreKey]) -> None:
    """What the disk has of *bad* is not read."""
    whole = DiskStore.read_into

    def read(
        self: DiskStore, asked: Sequence[StoreKey], buffers: Sequence[memoryview]
    ) -> list[Read]:
        done = whole(self, asked, buffers)
        return [Read.CORRUPT if key in bad else r for key, r in zip(asked, done, strict=True)]

    monkeypatch.setattr(DiskStore, "read_into", read)


@pytest.mark.parametrize("nearer_in_host", [False, True])
@pytest.mark.parametrize("what", ["a state", "the last block", "a block in the middle"])
def test_what_cannot_be_read_leaves_a_nearer_end(
    managers: list[KVManager],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    nearer_in_host: bool,
) -> None:
    manager = open_(managers, 16, tmp_path)
    save(manager, ALICE, PROMPT)
    save_states(manager, PROMPT, 1, 3, 5)
    push_out(manager)
    if nearer_in_host:
        assert found(manager, PROMPT[:3]) == 3
    bad = {
        "a state": states_of(PROMPT[4])[1],
        "the last block": PROMPT[4],
        "a block in the middle": PROMPT[3],
    }[what]
    damage(monkeypatch, {ALICE + bad})
    task = ask(manager, PROMPT)
    assert task.matched_blocks == 5
    assert len(task.slots) == (5 if nearer_in_host else 0)
    assert taken(manager, settled(manager, task), PROMPT) == 3
    assert found(manager, PROMPT) == 3


def test_nearer_ends_are_tried_one_after_another(
    managers: list[KVManager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = open_(managers, 20, tmp_path)
    save(manager, ALICE, PROMPT)
    save_states(manager, PROMPT, 1, 2, 3, 4, 5)
    push_out(manager)
    damage(monkeypatch, {ALICE + states_of(PROMPT[end - 1])[0] for end in (3, 4, 5)})
    assert found(manager, PROMPT) == 2


def test_nothing_is_found_where_no_state_can_be_read(
    managers: list[KVManager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = open_(managers, 16, tmp_path)
    save(manager, ALICE, PROMPT)
    save_states(manager, PROMPT, 2, 4)
    push_out(manager)
    damage(monkeypatch, {ALICE + states_of(PROMPT[end - 1])[0] for end in (2, 4)})
    task = settled(manager, ask(manager, PROMPT))
    assert (task.state, task.slots, task.matched_blocks) == (TaskState.READY, [], 0)
    manager.cancel([task.task_id])


def test_without_room_for_the_last_end_a_nearer_one_is_taken(
    managers: list[KVManager], tmp_path: Path
) -> None:
    manager = open_(managers, 6, tmp_path)
    save(manager, ALICE, PROMPT[:3])
    save_states(manager, PROMPT, 1)
    written(manager)
    save_states(manager, PROMPT, 3)
    push_out(manager)
    assert found(manager, PROMPT[:1]) == 1
    save(manager, BOB, keys(5, 5, 5))
    held = manager.get_match(BOB, keys(5, 5, 5))
    assert (held.state, len(held.slots)) == (TaskState.READY, 3)
    assert found(manager, PROMPT) == 1
    manager.cancel([held.task_id])


def test_get_does_not_wait_for_what_it_would_fall_back_on(
    managers: list[KVManager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of the nearer end are read for another one, which alone is told of them."""
    manager = open_(managers, 20, tmp_path)
    save(manager, ALICE, PROMPT)
    save_states(manager, PROMPT, 2, 4)
    push_out(manager)
    brought = manager.get_match(ALICE, PROMPT)
    manager.cancel([settled(manager, brought).task_id])
    gate, nearer = threading.Event(), {ALICE + state for state in states_of(PROMPT[1])}
    whole = DiskStore.read_into

    def read(
        self: DiskStore, asked: Sequence[StoreKey], buffers: Sequence[memoryview]
    ) -> list[Read]:
        assert nearer.isdisjoint(asked) or gate.wait(PATIENCE_SECONDS)
        return whole(self, asked, buffers)

    monkeypatch.setattr(DiskStore, "read_into", read)
    first, second = ask(manager, PROMPT[:2]), ask(manager, PROMPT)
    assert (first.state, second.state) == (TaskState.PROMOTING, TaskState.PROMOTING)
    try:
        second = settled(manager, second)
        assert second.state is TaskState.READY
        assert taken(manager, second, PROMPT) == 4
    finally:
        gate.set()
    assert taken(manager, settled(manager, first), PROMPT) == 2


# -- a remote tier -------------------------------------------------------------------------------


def other_node(values: dict[StoreKey, Value], *ends: int, blocks: int = 6) -> None:
    """Another node leaves the prompt in the store, with its states."""
    node = KVManager(config(32), block_bytes=BLOCK_BYTES, remote=GatedStore(values))
    save(node, ALICE, PROMPT[:blocks])
    save_states(node, PROMPT, *ends)
    written(node)
    node.close()
    assert len(values) == blocks + GROUPS * len(ends)


def test_blocks_and_states_of_another_node_are_found(
    managers: list[KVManager], values: dict[StoreKey, Value], store: GatedStore
) -> None:
    other_node(values, 2, 5)
    manager = open_(managers, remote=store)
    task = ask(manager, PROMPT)
    assert (task.state, task.slots) == (TaskState.SEARCHING, [])
    task = settled(manager, task)
    assert (task.state, task.matched_blocks, task.remote_blocks) == (TaskState.READY, 5, 5)
    assert taken(manager, task, PROMPT) == 5
    assert found(manager, PROMPT) == 5


def test_states_are_asked_for_all_at_once(
    managers: list[KVManager], values: dict[StoreKey, Value], monkeypatch: pytest.MonkeyPatch
) -> None:
    other_node(values, 2, 5)
    asked: list[int] = []
    exists = GatedStore.exists

    def counted(self: GatedStore, some: Sequence[StoreKey]) -> list[bool]:
        asked.append(len(some))
        return exists(self, some)

    monkeypatch.setattr(GatedStore, "exists", counted)
    manager = open_(managers, remote=GatedStore(values))
    assert found(manager, PROMPT) == 5
    assert asked == [6, GROUPS * 6]


def test_missing_remote_state_does_not_hide_what_is_here(
    managers: list[KVManager], values: dict[StoreKey, Value], store: GatedStore
) -> None:
    other_node(values)
    manager = open_(managers, remote=store)
    save(manager, ALICE, PROMPT[:3])
    save_states(manager, PROMPT, 2)
    assert found(manager, PROMPT) == 2


def test_remote_state_of_blocks_that_are_here_is_found(
    managers: list[KVManager], values: dict[StoreKey, Value], store: GatedStore
) -> None:
    other_node(values, 2, 4)
    manager = open_(managers, remote=store)
    save(manager, ALICE, PROMPT)
    task = settled(manager, ask(manager, PROMPT))
    assert (task.matched_blocks, task.remote_blocks) == (4, 0)
    assert taken(manager, task, PROMPT) == 4


def test_remote_state_that_is_gone_when_it_is_read_leaves_a_nearer_end(
    managers: list[KVManager], values: dict[StoreKey, Value], store: GatedStore
) -> None:
    other_node(values, 2, 4, 6)
    manager = open_(managers, remote=store)
    store.reads.clear()
    task = ask(manager, PROMPT)
    eventually(lambda: manager.try_wait([task.task_id])[task.task_id].matched_blocks == 6, "search")
    for end in (4, 6):
        del values[ALICE + states_of(PROMPT[end - 1])[1]]
    store.reads.set()
    assert taken(manager, settled(manager, task), PROMPT) == 2


def test_nearer_state_that_is_being_saved_meanwhile_is_left_alone(
    managers: list[KVManager], values: dict[StoreKey, Value], store: GatedStore
) -> None:
    """It has a host slot by then, and another would be read into."""
    other_node(values, 2, 5)
    manager = open_(managers, remote=store)
    store.reads.clear()
    task = ask(manager, PROMPT)
    eventually(lambda: store.begun_reads > 0, "nothing is read")
    put = manager.put_match(ALICE, states_of(PROMPT[1]), parent=PROMPT[1])
    assert len(put.slots) == GROUPS
    del values[ALICE + states_of(PROMPT[4])[1]]
    store.reads.set()
    assert taken(manager, settled(manager, task), PROMPT) == 0
    manager.check()
    manager.fail([put.task_id])


def test_store_that_goes_away_leaves_the_end_that_is_here(
    managers: list[KVManager], values: dict[StoreKey, Value], store: GatedStore
) -> None:
    other_node(values, 4, 5)
    manager = open_(managers, remote=store)
    save(manager, ALICE, PROMPT[:3])
    save_states(manager, PROMPT, 2)
    written(manager)
    store.reads.clear()
    task = ask(manager, PROMPT)
    eventually(lambda: store.begun_reads > 0, "nothing is read")
    store.away = True
    store.reads.set()
    assert taken(manager, settled(manager, task), PROMPT) == 2


def test_launched_during_the_search_takes_the_end_that_is_here(
    managers: list[KVManager], values: dict[StoreKey, Value], store: GatedStore
) -> None:
    other_node(values, 5)
    manager = open_(managers, remote=store)
    save(manager, ALICE, PROMPT[:3])
    save_states(manager, PROMPT, 2)
    store.searches.clear()
    task = ask(manager, PROMPT)
    assert (task.state, task.matched_blocks, len(task.slots)) == (TaskState.SEARCHING, 2, 4)
    manager.launch([task.task_id])
    store.searches.set()
    manager.complete([task.task_id])
    assert hit_count(manager, "loaded_blocks_total") == 2
    eventually(lambda: hit_count(manager, "lookup_blocks_total{tier=none}") == 4, "not counted")


def test_reset_during_the_search_finds_nothing(
    managers: list[KVManager], values: dict[StoreKey, Value], store: GatedStore
) -> None:
    other_node(values, 5)
    manager = open_(managers, remote=store)
    save(manager, ALICE, PROMPT[:3])
    store.searches.clear()
    task = ask(manager, PROMPT)
    manager.reset(ALICE)
    store.searches.set()
    task = settled(manager, task)
    assert (task.state, task.slots) == (TaskState.READY, [])
    manager.cancel([task.task_id])


@pytest.mark.parametrize("end", ["cancel", "fail"])
def test_task_that_ends_during_its_search_keeps_no_lease(
    managers: list[KVManager], values: dict[StoreKey, Value], store: GatedStore, end: str
) -> None:
    other_node(values, 5)
    manager = open_(managers, remote=store)
    save(manager, ALICE, PROMPT[:3])
    save_states(manager, PROMPT, 1, 2)
    store.searches.clear()
    task = ask(manager, PROMPT)
    getattr(manager, end)([task.task_id])
    store.searches.set()


def test_end_that_is_lost_during_the_search_is_not_found(
    managers: list[KVManager],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    store: GatedStore,
) -> None:
    manager = open_(managers, 20, tmp_path)
    save(manager, ALICE, PROMPT[:4])
    save_states(manager, PROMPT, 4)
    written(manager)
    managers.remove(manager)
    close(manager)
    manager = open_(managers, 20, tmp_path, store)  # which has nothing of it
    damage(monkeypatch, {ALICE + PROMPT[3]})
    store.searches.clear()
    task = ask(manager, PROMPT)
    assert (task.state, task.matched_blocks) == (TaskState.SEARCHING, 4)
    eventually(lambda: not reads_running(manager), "a promotion does not end")
    store.searches.set()
    task = settled(manager, task)
    assert (task.state, task.matched_blocks) == (TaskState.READY, 0)
    manager.cancel([task.task_id])
    counted = [hit_count(manager, f"lookup_blocks_total{{tier={t}}}") for t in ("disk", "none")]
    assert counted == [4, 2]


def test_remote_state_that_is_also_something_else_is_none(
    managers: list[KVManager], values: dict[StoreKey, Value], store: GatedStore
) -> None:
    first, second = states_of(PROMPT[0])
    asked = [state_keys(as_key_array([second]), 0).tobytes(), PROMPT[0]]
    node = KVManager(config(32), block_bytes=BLOCK_BYTES, remote=GatedStore(values))
    for some in (asked, states_of(asked[0]), [first, second]):
        save(node, ALICE, some)
    written(node)
    node.close()
    manager = open_(managers, remote=store)
    task = settled(manager, ask(manager, asked))
    assert (task.state, task.matched_blocks) == (TaskState.READY, 0)
    manager.cancel([task.task_id])
    assert known(manager) == {}


# -- anything ------------------------------------------------------------------------------------

_PATHS = [keys(0, 0, 0, 0), keys(0, 0, 1, 1), keys(0, 1, 1, 1)]
_saves = st.tuples(
    st.integers(0, 2), st.integers(1, 4), st.sampled_from(["blocks", "0", "1", "01"])
)


@given(
    did=st.lists(st.one_of(_saves, st.integers(0, 2)), max_size=40), lower=st.sampled_from([0, 1])
)
def test_any_lookup_gives_a_prefix_with_its_states(
    tmp_path_factory: pytest.TempPathFactory,
    did: list[tuple[int, int, str] | int],
    lower: int,
) -> None:
    """With room for all, the longest; with little, one that was saved, rightly there."""
    disk = tmp_path_factory.mktemp("disk") if lower else None
    manager = KVManager(
        config(7 if lower else 64, disk, recompute="never"), block_bytes=BLOCK_BYTES
    )
    manager.memory.mapping.data[:] = 0xEE
    saved: set[BlockKey] = set()
    for each in did:
        if isinstance(each, int):
            asked = _PATHS[each]
            prefix = next((i for i, k in enumerate(asked) if k not in saved), len(asked))
            ends = [n for n in range(1, prefix + 1) if saved.issuperset(states_of(asked[n - 1]))]
            blocks = found(manager, asked)
            assert blocks in {0, *ends}
            if not lower:
                assert blocks == max(ends, default=0)
            continue
        path, count, what = each
        blocks_of_path = _PATHS[path][:count]
        if what == "blocks":
            new, parent = blocks_of_path, None
        else:
            new = [states_of(blocks_of_path[-1])[int(group)] for group in what]
            parent = blocks_of_path[-1]
        task = save(manager, ALICE, new, parent=parent)
        saved.update(new)
        assert task.state in {TaskState.READY, TaskState.DONE, TaskState.FAILED}
    close(manager)


def test_states_are_looked_for_from_the_end_on(
    manager: KVManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, of which few are needed where states are; of the second group where the first is."""
    asked: list[BlockKey] = keys(*[3] * 20)
    save(manager, ALICE, asked)
    save_states(manager, asked, 18)
    looked_up: list[int] = []
    find = PrefixIndex.find

    def counted(self: PrefixIndex, namespace: NamespaceId, some: KeyArray) -> BlockIds:
        looked_up.append(len(some))
        return find(self, namespace, some)

    monkeypatch.setattr(PrefixIndex, "find", counted)
    assert found(manager, asked) == 18
    assert looked_up == [20, 1]
