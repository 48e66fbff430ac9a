"""The slots of a tier are each free or used, never both, never lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.errors import InvariantViolated
from kvstrata.index.slots import SlotPool


def test_fresh_slots_are_handed_out_in_ascending_order() -> None:
    pool = SlotPool(3)
    assert [pool.take(), pool.take(), pool.take()] == [0, 1, 2]


def test_pool_without_a_free_slot_says_so_and_stays_whole() -> None:
    pool = SlotPool(1)
    assert pool.take() == 0
    assert pool.take() is None
    assert pool.free == 0
    pool.check()


def test_released_slot_is_reused_before_a_fresh_one_last_released_first() -> None:
    pool = SlotPool(4)
    for _ in range(3):
        pool.take()
    pool.release(0)
    pool.release(2)
    assert [pool.take(), pool.take(), pool.take(), pool.take()] == [2, 0, 3, None]


def test_longest_free_run_tells_how_scattered_the_free_slots_are() -> None:
    pool = SlotPool(8)
    assert pool.longest_free_run == 8
    for _ in range(8):
        pool.take()
    assert pool.longest_free_run == 0
    for slot in (1, 4, 5, 7):
        pool.release(slot)
    assert (pool.free, pool.longest_free_run) == (4, 2)
    pool.release(6)
    assert pool.longest_free_run == 4


def test_releasing_a_slot_twice_is_a_bug() -> None:
    pool = SlotPool(2)
    pool.take()
    pool.release(0)
    with pytest.raises(InvariantViolated, match="slot 0 is released but was not taken"):
        pool.release(0)
    assert pool.free == 2
    pool.check()


def test_releasing_a_slot_that_was_never_taken_is_a_bug() -> None:
    pool = SlotPool(2)
    with pytest.raises(InvariantViolated, match="slot 1 is released but was not taken"):
        pool.release(1)


def test_pool_of_no_slots_gives_none() -> None:
    pool = SlotPool(0)
    assert pool.free == 0
    assert pool.take() is None
    pool.check()


@given(st.integers(0, 5), st.lists(st.integers(-1, 4), max_size=60))
def test_taken_slots_are_distinct_and_free_plus_used_is_the_capacity(
    capacity: int, script: list[int]
) -> None:
    pool, used = SlotPool(capacity), set[int]()
    for slot in script:
        if slot in used:
            pool.release(slot)
            used.remove(slot)
        else:
            taken = pool.take()
            assert (taken is None) == (len(used) == capacity)
            assert taken not in used
            if taken is not None:
                assert 0 <= taken < capacity
                used.add(taken)
        assert pool.free == capacity - len(used)
        pool.check()


def test_check_finds_a_slot_that_is_free_and_used() -> None:
    pool = SlotPool(2)
    pool.take()
    pool.take()
    pool._released = [1]
    pool._used[1] = 1
    with pytest.raises(InvariantViolated):
        pool.check()


def test_check_finds_a_slot_that_is_free_twice() -> None:
    pool = SlotPool(3)
    for _ in range(3):
        pool.take()
    pool.release(0)
    pool.release(1)
    pool._released = [1, 1]
    with pytest.raises(InvariantViolated, match="free twice"):
        pool.check()
