"""Blocks in host memory and on disk: what moves when a tier is full, forgotten or cannot write."""

from collections.abc import Iterator

import pytest
from tests.caches import ALICE, BLOCK_BYTES, BOB, key

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.types import StoredBlock
from kvstrata.index.prefix_index import NO_SLOT, Entry
from kvstrata.manager.residency import Residency
from kvstrata.observe.metrics import Counters
from kvstrata.storage.host import HostMemory


class Bench:
    def __init__(self, slots: int, disk_blocks: int) -> None:
        self.memory = HostMemory(
            capacity_bytes=slots * 4096, block_bytes=BLOCK_BYTES, server_id=b"s"
        )
        self.counters = Counters()
        self.cache = Residency(self.memory, self.counters, disk_capacity_blocks=disk_blocks)

    def put(self, name: int, parent: int | None = None, namespace: bytes = ALICE) -> Entry:
        slot = self.cache.take_slot()
        assert slot is not None
        above = None if parent is None else namespace + key(parent)
        entry = self.cache.index.insert(namespace + key(name), above)
        self.cache.put_in_host(entry, slot)
        return entry

    def cascade(self) -> None:
        for entry in self.cache.next_unwritten("disk", 99):
            self.cache.written("disk", entry, stored=True)

    def count(self, name: str) -> int:
        return self.counters.snapshot().get(f"kvstrata_{name}", 0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(slots=2, disk_blocks=3)
    yield made
    made.cache.check([])
    made.memory.close()


def test_full_host_memory_gives_up_the_oldest_and_its_slot_has_a_new_generation(
    bench: Bench,
) -> None:
    a, b = bench.put(1), bench.put(2)
    assert (a.host_slot, b.host_slot) == (0, 1)
    before = bench.memory.generation(0)
    bench.cascade()
    c = bench.put(3)
    assert c.host_slot == 0
    assert bench.memory.generation(0) > before
    assert (a.host_slot, a.on_disk) == (NO_SLOT, True)
    assert bench.count("evicted_blocks_total{tier=host}") == 1
    assert bench.count("lost_blocks_total") == 0


def test_block_that_leaves_before_it_reached_the_disk_is_lost_and_counted(bench: Bench) -> None:
    a = bench.put(1)
    bench.put(2)
    bench.put(3)
    assert a.forgotten
    assert bench.cache.index.get(a.key) is None
    assert bench.count("lost_blocks_total") == 1
    assert bench.cache.unwritten("disk") == 2


def test_leased_blocks_stay_and_then_there_is_no_room(bench: Bench) -> None:
    entries = [bench.put(1), bench.put(2)]
    for entry in entries:
        bench.cache.lease(entry)
    assert bench.cache.take_slot() is None
    assert bench.cache.host_used == 2
    for entry in entries:
        bench.cache.unlease(entry)
    assert bench.put(3).host_slot == 0


def test_last_copy_of_a_parent_stays_until_its_child_has_left(bench: Bench) -> None:
    parent = bench.put(1)
    child = bench.put(2, parent=1)
    bench.put(3)
    assert (child.forgotten, parent.host_slot) == (True, 0)


def test_returning_a_lease_that_was_not_taken_is_a_bug(bench: Bench) -> None:
    entry = bench.put(1)
    with pytest.raises(InvariantViolated, match="not taken"):
        bench.cache.unlease(entry)


def test_dropping_a_leased_block_is_a_bug(bench: Bench) -> None:
    entry = bench.put(1)
    bench.cache.lease(entry)
    with pytest.raises(InvariantViolated, match="leased block is dropped"):
        bench.cache.drop_from_host(entry)


def test_full_disk_gives_up_the_oldest_that_are_not_being_used(bench: Bench) -> None:
    entries = []
    for name in (1, 2, 3):
        entries.append(bench.put(name))
        bench.cascade()
    assert bench.cache.disk_used == 3
    bench.cache.lease(entries[0])
    assert bench.cache.make_disk_room(1) == [entries[1]]
    assert bench.count("evicted_blocks_total{tier=disk}") == 1
    assert bench.cache.make_disk_room(1) == []
    bench.cache.unlease(entries[0])


def test_disk_whose_blocks_are_all_in_use_makes_no_room(bench: Bench) -> None:
    bench.cache.restore([StoredBlock(ALICE + key(n), None) for n in (1, 2, 3)])
    for entry in bench.cache.index:
        bench.cache.lease(entry)
    assert bench.cache.make_disk_room(2) == []
    for entry in bench.cache.index:
        bench.cache.unlease(entry)
    assert len(bench.cache.make_disk_room(2)) == 2


def test_block_that_the_disk_has_no_room_for_stays_in_host_memory(bench: Bench) -> None:
    entry = bench.put(1)
    (batched,) = bench.cache.next_unwritten("disk", 9)
    assert (batched, entry.leases) == (entry, 1)
    bench.cache.written("disk", entry, stored=False)
    assert (entry.on_disk, entry.leases, entry.host_slot) == (False, 0, 0)


def test_block_that_could_not_be_written_waits_again(bench: Bench) -> None:
    entry = bench.put(1)
    assert bench.cache.next_unwritten("disk", 9) == [entry]
    assert bench.cache.unwritten("disk") == 0
    bench.cache.write_later("disk", entry)
    assert (bench.cache.unwritten("disk"), entry.leases) == (1, 0)
    assert bench.cache.next_unwritten("disk", 9) == [entry]
    bench.cache.written("disk", entry, stored=True)
    assert entry.on_disk


def test_no_disk_no_waiting() -> None:
    bench = Bench(slots=1, disk_blocks=0)
    bench.put(1)
    assert bench.cache._unwritten == {}
    bench.put(2)
    assert bench.count("lost_blocks_total") == 0
    bench.cache.check([])
    bench.memory.close()


def test_forgetting_takes_one_namespace_and_frees_its_slots(bench: Bench) -> None:
    ours, theirs = bench.put(1), bench.put(1, namespace=BOB)
    bench.cascade()
    assert bench.cache.forget(ALICE) == 1
    assert (ours.forgotten, ours.on_disk, ours.host_slot) == (True, False, NO_SLOT)
    assert (theirs.forgotten, theirs.on_disk, theirs.host_slot) == (False, True, 1)
    assert (bench.cache.host_used, bench.cache.disk_used) == (1, 1)


def test_slot_of_a_forgotten_block_is_free_when_its_last_reader_is_done(bench: Bench) -> None:
    entry = bench.put(1)
    bench.cache.lease(entry)
    bench.cache.lease(entry)
    bench.cache.forget(ALICE)
    bench.cache.check([])
    assert bench.cache.host_used == 1
    bench.cache.unlease(entry)
    assert bench.cache.host_used == 1
    generation = bench.memory.generation(0)
    bench.cache.unlease(entry)
    assert bench.cache.host_used == 0
    assert bench.memory.generation(0) > generation


@pytest.mark.parametrize("stored", [True, False])
def test_write_that_ends_after_its_block_was_forgotten_does_not_count(
    bench: Bench, stored: bool
) -> None:
    entry = bench.put(1)
    bench.cache.next_unwritten("disk", 9)
    bench.cache.forget(ALICE)
    bench.cache.check([])
    bench.cache.written("disk", entry, stored=stored)
    assert not entry.on_disk
    assert (bench.cache.host_used, bench.cache.disk_used, bench.cache.unwritten("disk")) == (
        0,
        0,
        0,
    )


def test_write_that_failed_after_its_block_was_forgotten_is_not_tried_again(bench: Bench) -> None:
    entry = bench.put(1)
    bench.cache.next_unwritten("disk", 9)
    bench.cache.forget(ALICE)
    bench.cache.write_later("disk", entry)
    assert (bench.cache.host_used, bench.cache.unwritten("disk")) == (0, 0)


def test_restored_blocks_are_on_disk_under_their_parents(bench: Bench) -> None:
    bench.cache.restore(
        [StoredBlock(ALICE + key(1), None), StoredBlock(ALICE + key(2), ALICE + key(1))]
    )
    parent, child = bench.cache.index.longest_prefix([ALICE + key(1), ALICE + key(2)])
    assert (parent.on_disk, parent.children, child.parent) == (True, 1, parent)
    assert bench.cache.disk_used == 2
    assert bench.cache.make_disk_room(2) == [child]


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


def test_check_finds_a_slot_that_nobody_accounts_for(bench: Bench) -> None:
    slot = bench.cache.take_slot()
    assert slot == 0
    with pytest.raises(InvariantViolated, match="1 slots are used, 0 are accounted for"):
        bench.cache.check([])
    bench.cache.check([0])
    bench.cache.release_slot(0)


def test_check_finds_a_slot_in_two_blocks(bench: Bench) -> None:
    a, b = bench.put(1), bench.put(2)
    b.host_slot = a.host_slot
    with pytest.raises(InvariantViolated, match="two blocks"):
        bench.cache.check([])
    b.host_slot = 1
