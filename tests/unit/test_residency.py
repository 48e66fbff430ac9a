"""Blocks in host memory and on disk: what moves when a tier is full, forgotten or cannot write."""

from collections.abc import Iterator

import numpy as np
import pytest
from tests.caches import ALICE, BLOCK_BYTES, BOB, key

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.keys import ABSENT, BlockIds, as_key_array
from kvstrata.core.write_rule import WriteRule
from kvstrata.index import tree
from kvstrata.index.places import ARRIVING, DISK, HOST, NO_SLOT, REMOTE, WRITING
from kvstrata.index.policies import LRU
from kvstrata.manager.residency import Residency
from kvstrata.manager.writes import LowerTier
from kvstrata.observe.metrics import Counters
from kvstrata.storage.host import HostMemory


class Bench:
    def __init__(
        self, slots: int, disk_blocks: int, rule: WriteRule | None = None, *, remote: bool = False
    ) -> None:
        self.memory = HostMemory(
            capacity_bytes=slots * 4096, block_bytes=BLOCK_BYTES, server_id=b"s"
        )
        self.counters = Counters()
        self.woken: list[str] = []
        write: dict[LowerTier, WriteRule] = {"disk": rule or WriteRule()} if disk_blocks else {}
        if remote:
            write["remote"] = WriteRule()
        self.cache = Residency(
            self.memory,
            self.counters,
            lambda _, index, blocks: LRU(index.capacity),
            disk_capacity_blocks=disk_blocks,
            write=write,
            wake=self.woken.append,
        )
        self.index = self.cache.index

    def insert(self, name: int, parent: BlockIds | None = None, ns: bytes = ALICE) -> BlockIds:
        above = ABSENT if parent is None else int(parent[0])
        return self.index.insert(ns, as_key_array([key(name)]), above)

    def put(self, name: int, parent: BlockIds | None = None, namespace: bytes = ALICE) -> BlockIds:
        slots = self.cache.take_slots(namespace, 1)
        assert len(slots) == 1
        block = self.insert(name, parent, namespace)
        self.cache.reserve(block, slots, WRITING)
        self.cache.fill(block, WRITING)
        return block

    def find(self, name: int, namespace: bytes = ALICE) -> int:
        return int(self.index.find(namespace, as_key_array([key(name)]))[0])

    def where(self, block: BlockIds) -> int:
        return int(self.index.where[block[0]])

    def slot(self, block: BlockIds) -> int:
        return int(self.index.host_slot[block[0]])

    def generation(self, slot: int) -> int:
        return int(self.memory.generations(np.array([slot]))[0])

    def cascade(self, *, stored: bool = True) -> BlockIds:
        blocks = self.cache.next_unwritten("disk", 99)
        self.cache.make_disk_room(blocks)
        self.cache.written("disk", blocks, np.full(len(blocks), stored))
        return blocks

    def count(self, name: str) -> int:
        return self.counters.snapshot().get(f"kvstrata_{name}", 0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(slots=2, disk_blocks=3)
    yield made
    made.cache.check([])
    made.memory.close()


# -- host memory -----------------------------------------------------------------------------


def test_full_host_memory_gives_up_the_oldest_and_its_slot_has_a_new_generation(
    bench: Bench,
) -> None:
    a, b = bench.put(1), bench.put(2)
    assert (bench.slot(a), bench.slot(b)) == (0, 1)
    before = bench.generation(0)
    bench.cascade()
    c = bench.put(3)
    assert bench.slot(c) == 0
    assert bench.generation(0) > before
    assert (bench.slot(a), bench.where(a)) == (NO_SLOT, DISK)
    assert bench.count("evicted_blocks_total{tier=host}") == 1
    assert bench.count("lost_blocks_total") == 0


def test_block_that_leaves_before_it_reached_the_disk_is_lost_and_counted(bench: Bench) -> None:
    for name in (1, 2, 3):
        bench.put(name)
    assert bench.find(1) == ABSENT
    assert bench.count("lost_blocks_total") == 1
    assert bench.cache.writes.waiting("disk") == 2


def test_leased_blocks_stay_and_then_there_is_no_room(bench: Bench) -> None:
    blocks = np.concatenate([bench.put(1), bench.put(2)])
    bench.cache.lease(blocks)
    assert len(bench.cache.take_slots(ALICE, 1)) == 0
    assert bench.cache.host_used == 2
    bench.cache.unlease(blocks)
    assert bench.slot(bench.put(3)) == 0


def test_last_copy_of_a_parent_stays_until_its_child_has_left(bench: Bench) -> None:
    parent = bench.put(1)
    bench.put(2, parent)
    bench.put(3)
    assert (bench.find(2), bench.slot(parent)) == (ABSENT, 0)


def test_what_can_never_fit_takes_a_tenth_from_others() -> None:
    bench = Bench(slots=20, disk_blocks=0)
    kept = [bench.put(name) for name in range(20)]
    slots = bench.cache.take_slots(ALICE, 21)
    assert len(slots) == 2
    assert sum(bench.where(block) == HOST for block in kept) == 18
    bench.cache.release_slots(slots)
    bench.memory.close()


def test_returning_a_lease_that_was_not_taken_is_a_bug(bench: Bench) -> None:
    block = bench.put(1)
    with pytest.raises(InvariantViolated, match="not taken"):
        bench.cache.unlease(block)


def test_dropping_a_leased_block_is_a_bug(bench: Bench) -> None:
    block = bench.put(1)
    bench.cache.lease(block)
    with pytest.raises(InvariantViolated, match="leased block is dropped"):
        bench.cache.drop_from_host(block)


def test_block_that_is_abandoned_was_never_there(bench: Bench) -> None:
    slots = bench.cache.take_slots(ALICE, 1)
    block = bench.insert(1)
    bench.cache.reserve(block, slots, WRITING)
    bench.cache.check([])
    assert bench.cache.abandon(block).tolist() == slots.tolist()
    assert bench.find(1) == ABSENT
    bench.cache.check(slots.tolist())
    bench.cache.release_slots(slots)


def test_block_that_others_are_reading_is_not_doubted_away(bench: Bench) -> None:
    blocks = np.concatenate([bench.put(1), bench.put(2)])
    bench.cache.lease(blocks[:1])
    bench.cache.doubt(blocks)
    assert [bench.find(1) == ABSENT, bench.find(2) == ABSENT] == [False, True]


# -- on their way up -------------------------------------------------------------------------


def arriving(bench: Bench, block: BlockIds) -> None:
    bench.cache.reserve(block, bench.cache.take_slots(ALICE, 1), ARRIVING)


def test_block_from_disk_is_in_both_tiers(bench: Bench) -> None:
    block = bench.put(1)
    bench.cascade()
    bench.cache.drop_from_host(block)
    arriving(bench, block)
    bench.cache.check([])
    bench.cache.fill(block, ARRIVING)
    assert bench.where(block) == HOST | DISK
    assert bench.cache.writes.waiting("disk") == 0


@pytest.mark.parametrize("absent", [True, False])
def test_block_that_the_disk_does_not_give_stays_there_unless_it_is_gone(
    bench: Bench, absent: bool
) -> None:
    block = bench.put(1)
    bench.cascade()
    bench.cache.drop_from_host(block)
    arriving(bench, block)
    bench.cache.disappoint(block, np.array([absent]), "disk")
    assert (bench.find(1) == ABSENT, bench.cache.disk_used) == (absent, int(not absent))
    assert bench.cache.host_used == 0


@pytest.mark.parametrize("absent", [True, False])
def test_block_that_only_the_remote_tier_had_is_known_while_it_arrives(
    bench: Bench, absent: bool
) -> None:
    block = bench.insert(1)
    bench.index.set_where(block, REMOTE)
    arriving(bench, block)
    bench.cache.check([])
    bench.cache.disappoint(block, np.array([absent]), "remote")
    assert bench.find(1) == ABSENT


def absent(count: int) -> BlockIds:
    """So many blocks that are to be written; which ones does not matter here."""
    return np.arange(900, 900 + count, dtype=np.int32)


# -- on their way down -----------------------------------------------------------------------


def test_full_disk_gives_up_the_oldest_that_are_not_being_used(bench: Bench) -> None:
    blocks = []
    for name in (1, 2, 3):
        blocks.append(bench.put(name))
        bench.cascade()
    assert bench.cache.disk_used == 3
    bench.cache.lease(blocks[0])
    assert bench.cache.make_disk_room(absent(1)) == [ALICE + key(2)]
    assert bench.count("evicted_blocks_total{tier=disk}") == 1
    assert bench.cache.make_disk_room(absent(1)) == []
    bench.cache.unlease(blocks[0])


def test_disk_whose_blocks_are_all_in_use_makes_no_room(bench: Bench) -> None:
    restore(bench, [(1, None), (2, None), (3, None)])
    blocks = np.concatenate(list(bench.index.ids()))
    bench.cache.lease(blocks)
    assert bench.cache.make_disk_room(absent(2)) == []
    bench.cache.unlease(blocks)
    assert len(bench.cache.make_disk_room(absent(2))) == 2


def test_block_that_the_disk_has_no_room_for_stays_in_host_memory(bench: Bench) -> None:
    block = bench.put(1)
    batch = bench.cache.next_unwritten("disk", 9)
    assert (batch.tolist(), bench.index.leases[batch].tolist()) == (block.tolist(), [1])
    bench.cache.written("disk", batch, np.array([False]))
    assert (bench.where(block), int(bench.index.leases[block[0]])) == (HOST, 0)


def test_block_that_could_not_be_written_waits_again(bench: Bench) -> None:
    block = bench.put(1)
    assert bench.cache.next_unwritten("disk", 9).tolist() == block.tolist()
    assert bench.cache.writes.waiting("disk") == 0
    bench.cache.write_later("disk", block)
    assert (bench.cache.writes.waiting("disk"), int(bench.index.leases[block[0]])) == (1, 0)
    assert bench.cascade().tolist() == block.tolist()
    assert bench.where(block) == HOST | DISK


def test_writers_are_woken_when_there_is_something_to_write() -> None:
    bench = Bench(slots=2, disk_blocks=2, remote=True)
    bench.put(1)
    assert bench.woken == ["disk", "remote"]
    bench.memory.close()


def test_no_disk_no_waiting() -> None:
    bench = Bench(slots=1, disk_blocks=0)
    bench.put(1)
    assert bench.woken == []
    bench.put(2)
    assert bench.count("lost_blocks_total") == 0
    bench.cache.check([])
    bench.memory.close()


def test_what_is_asked_for_once_is_not_written_if_so_wished() -> None:
    bench = Bench(slots=4, disk_blocks=4, rule=WriteRule("reused"))
    a, b = bench.put(1), bench.put(2)
    assert bench.cache.writes.waiting("disk") == 0
    bench.cache.touch(b)
    assert bench.cascade().tolist() == b.tolist()
    bench.cache.touch(np.concatenate([a, b]))
    assert bench.cascade().tolist() == a.tolist()
    bench.cache.drop_from_host(a)
    assert bench.cache.disk_used == 2
    bench.memory.close()


def test_what_is_found_too_seldom_is_not_written_if_so_wished() -> None:
    bench = Bench(slots=2, disk_blocks=4, rule=WriteRule("reused", 3))
    a, b = bench.put(1), bench.put(2)
    for finds, written in ((1, []), (2, []), (3, a.tolist()), (4, [])):
        bench.cache.touch(a)
        assert bench.cascade().tolist() == written, finds
    bench.cache.touch(b)
    bench.cache.drop_from_host(b)
    b = bench.put(2)  # it has come again, and nobody has found it since
    bench.cache.touch(b)
    bench.cache.touch(b)
    assert bench.cache.writes.waiting("disk") == 0
    for _ in range(300):
        bench.cache.touch(np.concatenate([a, b]))
    assert bench.cascade().tolist() == b.tolist()
    bench.memory.close()


def test_written_before_it_leaves_if_so_wished() -> None:
    bench = Bench(slots=2, disk_blocks=4, rule=WriteRule("evicted"))
    a = bench.put(1)
    assert (bench.woken, bench.cache.writes.waiting("disk")) == ([], 0)
    b = bench.put(2)
    assert bench.woken == ["disk"]  # one more has no room
    assert len(bench.cache.take_slots(ALICE, 2)) == 0  # and the oldest has to be written first
    assert bench.cascade().tolist() == [*a.tolist(), *b.tolist()]
    assert bench.slot(bench.put(3)) == 0
    assert bench.where(a) == DISK
    assert bench.count("lost_blocks_total") == 0
    bench.cache.check([])
    bench.memory.close()


@pytest.mark.parametrize("quota", [None, 0.5])
def test_what_is_saved_steadily_finds_room_while_blocks_are_written_late(
    quota: float | None,
) -> None:
    """What leaves next is written before it has to: only then can the next prompt be saved whole."""
    bench = Bench(slots=8, disk_blocks=99, rule=WriteRule("evicted"))
    if quota:
        bench.cache.limit(ALICE, quota)
    for first in range(0, 60, 3):
        slots = bench.cache.take_slots(ALICE, 3)
        assert len(slots) == 3
        ids = bench.index.insert(ALICE, as_key_array([key(first + i) for i in range(3)]))
        bench.cache.reserve(ids, slots, WRITING)
        bench.cache.fill(ids, WRITING)
        bench.cascade()
    assert bench.count("lost_blocks_total") == 0
    bench.cache.check([])
    bench.memory.close()


def test_what_was_never_to_be_written_is_not_lost() -> None:
    bench = Bench(slots=2, disk_blocks=4, rule=WriteRule("reused", 2))
    a, b = bench.put(1), bench.put(2)
    for found in (a, b, b):
        bench.cache.touch(found)
    bench.cache.drop_from_host(a)
    assert bench.count("lost_blocks_total") == 0
    bench.cache.drop_from_host(b)  # it waits
    assert bench.count("lost_blocks_total") == 1
    bench.memory.close()


def test_parents_leave_after_they_were_written_though_their_children_are_below() -> None:
    bench = Bench(slots=3, disk_blocks=9, rule=WriteRule("evicted"))
    parent = None
    for name in range(3):
        parent = bench.put(name, parent)
    for name in range(3, 9):
        if not len(slots := bench.cache.take_slots(ALICE, 1)):
            bench.cascade()
            slots = bench.cache.take_slots(ALICE, 1)
        bench.cache.release_slots(slots)
        parent = bench.put(name, parent)
    assert bench.count("lost_blocks_total") == 0
    assert all(bench.find(name) != ABSENT for name in range(9))
    bench.cache.check([])
    bench.memory.close()


def test_prompt_that_was_written_when_it_left_loses_its_end_first() -> None:
    """Its end leaves host memory first, and must not count as the older part on disk."""
    bench = Bench(slots=4, disk_blocks=4, rule=WriteRule("evicted"))
    prompt = bench.index.insert(ALICE, as_key_array([key(name) for name in range(4)]))
    bench.cache.reserve(prompt, bench.cache.take_slots(ALICE, 4), WRITING)
    bench.cache.fill(prompt, WRITING)
    assert len(bench.cache.take_slots(BOB, 4)) == 0
    assert len(bench.cascade()) == 4
    bench.cache.make_disk_room(bench.insert(9, ns=BOB))
    assert bench.index.where[prompt].tolist() == [HOST | DISK] * 3 + [HOST]
    bench.memory.close()


def test_host_memory_turns_over_while_a_tier_that_is_written_late_is_away() -> None:
    bench = Bench(slots=1, disk_blocks=4, rule=WriteRule("evicted"))
    bench.put(1)
    bench.cache.writes.stopped_if("disk", lambda: True)
    assert bench.slot(bench.put(2)) == 0
    assert bench.count("lost_blocks_total") == 1
    bench.memory.close()


def test_block_that_a_tier_has_refused_leaves_and_is_offered_anew_when_it_comes_again() -> None:
    bench = Bench(slots=1, disk_blocks=4, rule=WriteRule("evicted"))
    bench.put(1)
    for lost in (1, 2):
        assert len(bench.cache.take_slots(ALICE, 1)) == 0
        bench.cascade(stored=False)
        bench.put(2 * lost)
        assert bench.count("lost_blocks_total") == lost
        bench.cascade()
        bench.put(1)
    bench.memory.close()


def test_late_blocks_are_written_at_the_end() -> None:
    bench = Bench(slots=2, disk_blocks=4, rule=WriteRule("evicted"))
    block = bench.put(1)
    bench.cache.write_late_blocks()
    assert bench.cascade().tolist() == block.tolist()
    bench.memory.close()


# -- quotas ----------------------------------------------------------------------------------


def test_namespace_at_its_quota_makes_room_among_its_own_blocks() -> None:
    bench = Bench(slots=4, disk_blocks=4)
    theirs = bench.put(9, namespace=BOB)
    bench.cache.limit(ALICE, 0.5)
    for name in (1, 2, 3):
        bench.put(name)
    bench.cascade()
    assert (bench.find(1), bench.cache.host_used) == (ABSENT, 3)
    assert bench.where(theirs) == HOST | DISK
    for name in (4, 5):
        bench.put(name)
        bench.cascade()
    assert bench.index.counts(ALICE).disk == 2
    assert bench.where(theirs) == HOST | DISK
    bench.cache.check([])
    bench.memory.close()


def test_quota_counts_what_was_there_before_it() -> None:
    bench = Bench(slots=4, disk_blocks=0)
    for name in (1, 2, 3):
        bench.put(name)
    bench.cache.limit(ALICE, 0.5)
    bench.put(4)
    assert [bench.find(name) == ABSENT for name in (1, 2, 3, 4)] == [True, True, False, False]
    bench.memory.close()


def test_full_tier_takes_from_namespaces_without_a_quota_first() -> None:
    bench = Bench(slots=3, disk_blocks=0)
    bench.cache.limit(ALICE, 0.7)
    bench.put(1)
    bench.put(2)
    bench.put(9, namespace=BOB)
    bench.put(8, namespace=BOB)
    assert bench.index.counts(ALICE).host == 2
    bench.cache.lease(np.concatenate(list(bench.index.ids(BOB))))
    bench.put(7, namespace=BOB)
    assert bench.index.counts(ALICE).host == 1
    bench.memory.close()


def test_namespace_whose_quota_is_in_use_gets_no_more() -> None:
    bench = Bench(slots=4, disk_blocks=0)
    bench.cache.limit(ALICE, 0.5)
    blocks = np.concatenate([bench.put(1), bench.put(2)])
    bench.cache.lease(blocks)
    assert len(bench.cache.take_slots(ALICE, 2)) == 0
    bench.cache.unlease(blocks)
    bench.memory.close()


def test_forgotten_namespace_has_no_quota_left() -> None:
    bench = Bench(slots=4, disk_blocks=0)
    bench.cache.limit(ALICE, 0.25)
    bench.put(1)
    forget(bench)
    assert bench.cache._host.limited == []
    bench.put(1)
    bench.put(2)
    assert bench.cache.host_used == 2
    bench.cache.check([])
    bench.memory.close()


# -- whole namespaces ------------------------------------------------------------------------


def forget(bench: Bench, namespace: bytes = ALICE) -> int:
    blocks = bench.cache.forget(namespace)
    in_vain = 0
    while in_vain < bench.cache.reap_calls:
        in_vain = 0 if bench.cache.reap() else in_vain + 1
    return blocks


def test_forgetting_takes_one_namespace_and_frees_its_slots(bench: Bench) -> None:
    bench.put(1)
    theirs = bench.put(1, namespace=BOB)
    bench.cascade()
    assert forget(bench) == 1
    assert (bench.find(1), bench.find(1, BOB)) == (ABSENT, int(theirs[0]))
    assert bench.where(theirs) == HOST | DISK
    assert (bench.cache.host_used, bench.cache.disk_used) == (1, 1)


def test_forgotten_blocks_are_found_wherever_they_are(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "_REAP_PIECE", 1)
    monkeypatch.setattr(tree, "_REAP_PIECES", 1)
    bench.put(1, namespace=BOB)
    bench.put(1)
    assert bench.cache.reap_calls > 1
    forget(bench)
    assert bench.cache.host_used == 1


def test_forgotten_blocks_make_room_before_others_have_to_leave() -> None:
    bench = Bench(slots=4, disk_blocks=0)
    oldest = [bench.put(name, namespace=BOB) for name in (1, 2)]
    forgotten = [bench.slot(bench.put(name)) for name in (3, 4)]
    bench.cache.forget(ALICE)  # and nothing is reaped yet
    slots = bench.cache.take_slots(BOB, 2)
    assert sorted(slots.tolist()) == forgotten
    assert [bench.where(block) for block in oldest] == [HOST, HOST]
    assert bench.count("evicted_blocks_total{tier=host}") == 0
    bench.cache.check(slots.tolist())
    bench.memory.close()


def test_slot_of_a_forgotten_block_is_free_when_its_last_reader_is_done(bench: Bench) -> None:
    block = bench.put(1)
    bench.cache.lease(block)
    bench.cache.lease(block)
    forget(bench)
    bench.cache.check([])
    assert bench.cache.host_used == 1
    bench.cache.unlease(block)
    assert bench.cache.host_used == 1
    generation = bench.generation(0)
    bench.cache.unlease(block)
    assert bench.cache.host_used == 0
    assert bench.generation(0) > generation


@pytest.mark.parametrize("stored", [True, False])
def test_write_that_ends_after_its_block_was_forgotten_does_not_count(
    bench: Bench, stored: bool
) -> None:
    bench.put(1)
    batch = bench.cache.next_unwritten("disk", 9)
    forget(bench)
    bench.cache.check([])
    bench.cache.written("disk", batch, np.array([stored]))
    assert (bench.cache.host_used, bench.cache.disk_used, len(bench.index)) == (0, 0, 0)
    assert bench.cache.writes.waiting("disk") == 0


def test_write_that_failed_after_its_block_was_forgotten_is_not_tried_again(bench: Bench) -> None:
    bench.put(1)
    batch = bench.cache.next_unwritten("disk", 9)
    forget(bench)
    bench.cache.write_later("disk", batch)
    assert (bench.cache.host_used, bench.cache.writes.waiting("disk")) == (0, 0)


def test_block_that_is_being_read_when_it_is_forgotten_is_not_written(bench: Bench) -> None:
    block = bench.put(1)
    bench.cache.lease(block)
    forget(bench)
    other = bench.put(1, namespace=BOB)
    batches = [bench.cache.next_unwritten("disk", 1).tolist() for _ in range(2)]
    assert batches == [other.tolist(), []]
    bench.cache.written("disk", other, np.array([True]))
    bench.cache.unlease(block)
    assert (bench.cache.host_used, bench.cache.disk_used) == (1, 1)


def test_block_that_is_being_saved_when_it_is_forgotten_does_not_become_visible(
    bench: Bench,
) -> None:
    block = bench.insert(1)
    bench.cache.reserve(block, bench.cache.take_slots(ALICE, 1), WRITING)
    forget(bench)
    bench.cache.check([])
    again = bench.put(1)
    bench.cache.fill(block, WRITING)
    assert bench.find(1) == int(again[0])
    assert bench.cache.host_used == 1


@pytest.mark.parametrize("absent", [True, False])
def test_read_that_failed_after_its_block_was_forgotten_leaves_nothing(
    bench: Bench, absent: bool
) -> None:
    block = bench.put(1)
    bench.cascade()
    bench.cache.drop_from_host(block)
    bench.cache.reserve(block, bench.cache.take_slots(ALICE, 1), ARRIVING)
    forget(bench)
    bench.cache.disappoint(block, np.array([absent]), "disk")
    assert (bench.cache.host_used, bench.cache.disk_used, len(bench.index)) == (0, 0, 0)
    bench.cache.check([])


def test_forgotten_blocks_that_leave_the_disk_take_no_others_of_their_keys_with_them() -> None:
    """Their store forgets them with the namespace, and may have saved the same prompt again."""
    bench = Bench(slots=4, disk_blocks=2)
    bench.put(1)
    bench.cascade()
    bench.cache.forget(ALICE)  # and nothing is reaped yet
    bench.put(1)
    bench.put(2)
    fresh = bench.cache.next_unwritten("disk", 9)
    assert bench.cache.make_disk_room(fresh) == []
    bench.cache.written("disk", fresh, np.array([True, True]))
    assert bench.cache.disk_used == 2
    bench.cache.check([])
    bench.memory.close()


def restore(bench: Bench, blocks: list[tuple[int, int | None]]) -> None:
    rows = [ALICE + key(name) for name, _ in blocks]
    parents = [ALICE + key(parent) if parent else bytes(48) for _, parent in blocks]
    bench.cache.restore(
        np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 48),
        np.frombuffer(b"".join(parents), np.uint8).reshape(-1, 48),
        np.array([parent is not None for _, parent in blocks]),
    )


def test_restored_blocks_are_on_disk_under_their_parents(bench: Bench) -> None:
    restore(bench, [(1, None), (2, 1)])
    ids = bench.index.longest_prefix(ALICE, as_key_array([key(1), key(2)]))
    parent, child = ids.tolist()
    assert (bench.index.where[ids].tolist(), bench.index.children[parent]) == ([DISK, DISK], 1)
    assert bench.index.parent[child] == parent
    assert bench.cache.disk_used == 2
    assert bench.cache.make_disk_room(absent(2)) == [ALICE + key(2)]


def test_description_counts_blocks_by_namespace_and_names_the_empty_ones(bench: Bench) -> None:
    bench.put(1)
    bench.put(2)
    bench.cascade()
    bench.put(3, namespace=BOB)
    reports = {r.namespace: r for r in bench.cache.describe({ALICE: {"model": "m"}, b"z" * 16: {}})}
    alice, bob, empty = reports[ALICE.hex()], reports[BOB.hex()], reports[(b"z" * 16).hex()]
    assert (alice.parts, alice.blocks, alice.host_blocks, alice.disk_blocks) == (
        {"model": "m"},
        2,
        1,
        2,
    )
    assert (bob.parts, bob.blocks, bob.host_blocks, bob.disk_blocks) == ({}, 1, 1, 0)
    assert empty.blocks == 0


# -- check -----------------------------------------------------------------------------------


def test_check_finds_a_slot_that_nobody_accounts_for(bench: Bench) -> None:
    slots = bench.cache.take_slots(ALICE, 1)
    assert slots.tolist() == [0]
    with pytest.raises(InvariantViolated, match="1 slots are used, 0 are accounted for"):
        bench.cache.check([])
    bench.cache.check([0])
    bench.cache.release_slots(slots)


def test_check_finds_a_slot_in_two_blocks(bench: Bench) -> None:
    a, b = bench.put(1), bench.put(2)
    bench.index.host_slot[b] = bench.index.host_slot[a]
    with pytest.raises(InvariantViolated, match="two blocks"):
        bench.cache.check([])
    bench.index.host_slot[b] = 1


def test_a_large_tier_that_is_full_lets_several_blocks_go_at_once() -> None:
    slots = 3 << 12
    bench = Bench(slots, 0)
    blocks = bench.index.insert(ALICE, as_key_array([key(n) for n in range(slots)]), ABSENT)
    bench.cache.reserve(blocks, bench.cache.take_slots(ALICE, slots), WRITING)
    bench.cache.fill(blocks, WRITING)
    used = [bench.cache.host_used]
    for _ in range(4):
        assert len(bench.cache.take_slots(BOB, 1)) == 1
        used.append(bench.cache.host_used)
    assert used == [slots, slots - 2, slots - 1, slots, slots - 2]
