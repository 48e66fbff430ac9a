"""Free slots are handed out once, in runs where there are runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.errors import InvariantViolated
from kvstrata.storage.disk_free import FreeSlots


def test_a_batch_gets_neighbours_in_ascending_order() -> None:
    free = FreeSlots(100, [])
    assert free.take(3) == [0, 1, 2]
    assert free.take(2) == [3, 4]


def test_a_hole_that_fits_is_filled_before_a_larger_run_is_cut() -> None:
    free = FreeSlots(100, [4, *range(9, 20)])  # free: 0-3, 5-8, 20-99
    assert free.take(4) in ([0, 1, 2, 3], [5, 6, 7, 8])
    assert free.take(40) == list(range(20, 60))


def test_neighbours_that_were_freed_one_by_one_are_one_run_again() -> None:
    free = FreeSlots(6, range(6))
    for slot in (4, 2, 3):
        free.give([slot])
    assert free.take(3) == [2, 3, 4]


def test_without_a_long_run_the_batch_gets_the_pieces_there_are() -> None:
    free = FreeSlots(9, [2, 5])  # free: 0-1, 3-4, 6-8
    assert sorted(free.take(20)) == [0, 1, 3, 4, 6, 7, 8]
    assert free.take(1) == []


def test_a_slot_freed_twice_is_a_bug() -> None:
    free = FreeSlots(4, [1, 2, 3])
    free.give([2])
    with pytest.raises(InvariantViolated, match="slot 2 is freed but was free"):
        free.give([2])


def test_a_slot_freed_twice_at_once_is_a_bug() -> None:
    free = FreeSlots(4, [1, 2, 3])
    with pytest.raises(InvariantViolated, match="twice in one call"):
        free.give([2, 3, 2])


def test_runs_that_are_freed_together_are_runs() -> None:
    free = FreeSlots(12, range(12))
    free.give([7, 2, 1, 3, 8])
    assert free.take(2) == [7, 8]
    assert free.take(3) == [1, 2, 3]


@given(
    slots=st.integers(1, 40),
    used=st.sets(st.integers(0, 39)),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60),
)
def test_no_slot_is_free_twice_or_lost(
    slots: int, used: set[int], steps: list[tuple[bool, int]]
) -> None:
    taken = {slot for slot in used if slot < slots}
    free = FreeSlots(slots, sorted(taken))
    for takes, number in steps:
        if takes:
            got = free.take(number)
            assert len(set(got)) == len(got) == min(number, slots - len(taken))
            assert not taken & set(got)
            taken |= set(got)
        else:
            given = sorted(taken)[number : number + 3]
            taken.difference_update(given)
            free.give(given[::-1])
        assert free.free == slots - len(taken)
    assert set(free.take(slots)) == set(range(slots)) - taken
