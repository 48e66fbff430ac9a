"""The tree of blocks: matches, links, and who may leave which tier."""

import pytest

from kvstrata.core.errors import InvariantViolated
from kvstrata.index.prefix_index import NO_SLOT, Entry, PrefixIndex

A, B, C = (bytes([n]) * 48 for n in (1, 2, 3))


def chain(index: PrefixIndex, *keys: bytes) -> list[Entry]:
    entries, parent = [], None
    for slot, key in enumerate(keys):
        entry = index.insert(key, parent)
        entry.host_slot = slot
        entries.append(entry)
        parent = key
    index.check()
    return entries


def test_match_ends_at_the_first_missing_block_even_if_later_ones_are_there() -> None:
    index = PrefixIndex()
    a, b, c = chain(index, A, B, C)
    assert index.longest_prefix([A, B, C]) == [a, b, c]
    index.remove(b)
    assert index.longest_prefix([A, B, C]) == [a]
    assert index.longest_prefix([C]) == [c]
    assert index.longest_prefix([]) == []


def test_match_changes_nothing() -> None:
    index = PrefixIndex()
    chain(index, A, B)
    before = [(e.key, e.children, e.leases, e.host_slot) for e in index]
    index.longest_prefix([A, B, C])
    assert [(e.key, e.children, e.leases, e.host_slot) for e in index] == before
    assert len(index) == 2


def test_inserting_twice_gives_the_same_entry_and_counts_one_child() -> None:
    index = PrefixIndex()
    a, b = chain(index, A, B)
    assert index.insert(B, A) is b
    assert a.children == 1


def test_block_whose_parent_is_absent_is_a_first_block() -> None:
    index = PrefixIndex()
    entry = index.insert(B, A)
    entry.on_disk = True
    assert entry.parent is None
    index.check()


def test_removed_entry_is_forgotten_and_its_parent_counts_one_child_less() -> None:
    index = PrefixIndex()
    a, b = chain(index, A, B)
    index.remove(b)
    assert b.forgotten
    assert a.children == 0
    assert index.get(B) is None
    index.check()


def test_children_of_a_removed_entry_stay_and_can_be_removed_later() -> None:
    index = PrefixIndex()
    a, b, c = chain(index, A, B, C)
    index.remove(b)
    index.check()
    assert index.get(C) is c
    again = index.insert(B, A)
    again.host_slot = 7
    assert (again.children, a.children) == (0, 1)
    index.remove(c)
    assert (again.children, a.children) == (0, 1)
    index.check()


def test_removing_twice_is_a_bug() -> None:
    index = PrefixIndex()
    (a,) = chain(index, A)
    index.remove(a)
    with pytest.raises(InvariantViolated, match="does not hold"):
        index.remove(a)


@pytest.mark.parametrize(
    ("tier", "host_slot", "on_disk", "children", "leases", "may_leave"),
    [
        ("host", 3, False, 0, 0, True),
        ("host", 3, False, 1, 0, False),
        ("host", 3, True, 1, 0, True),
        ("host", 3, True, 0, 1, False),
        ("disk", NO_SLOT, True, 0, 0, True),
        ("disk", NO_SLOT, True, 1, 0, False),
        ("disk", 3, True, 1, 0, True),
        ("disk", 3, True, 0, 2, False),
    ],
)
def test_only_childless_unleased_blocks_leave_their_last_tier(
    tier: str, host_slot: int, on_disk: bool, children: int, leases: int, may_leave: bool
) -> None:
    entry = Entry(A, None, children, host_slot, on_disk, leases=leases)
    assert PrefixIndex().may_leave(entry, tier) is may_leave  # type: ignore[arg-type]  # a literal


def test_namespace_finds_its_blocks_and_no_others() -> None:
    index = PrefixIndex()
    ours = [b"n" * 16 + bytes([i]) * 32 for i in range(2)]
    theirs = b"m" * 16 + bytes([0]) * 32
    for key in (*ours, theirs):
        index.insert(key, None).on_disk = True
    assert sorted(e.key for e in index.namespace(b"n" * 16)) == ours


def test_check_finds_a_wrong_count_of_children() -> None:
    index = PrefixIndex()
    a, _ = chain(index, A, B)
    a.children = 2
    with pytest.raises(InvariantViolated, match="counts 2 children wrongly"):
        index.check()


def test_check_finds_an_entry_that_is_nowhere() -> None:
    index = PrefixIndex()
    index.insert(A, None)
    with pytest.raises(InvariantViolated, match="nowhere"):
        index.check()
