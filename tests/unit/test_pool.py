"""The order in which slots are handed out; sets of them are tested by a machine."""

import numpy as np
import pytest

from kvstrata.core.errors import InvariantViolated
from kvstrata.index.pool import SlotPool


def test_memory_is_touched_from_its_start_and_used_again_while_warm() -> None:
    pool = SlotPool(8)
    assert pool.take(3).tolist() == [0, 1, 2]
    assert pool.take(2).tolist() == [3, 4]
    pool.release(np.array([1], np.int32))
    pool.release(np.array([4, 3, 2], np.int32))
    assert pool.take(5).tolist() == [2, 3, 4, 1, 5]
    assert pool.take(9).tolist() == [6, 7]
    assert pool.take(1).tolist() == []


@pytest.mark.parametrize("released", [[3, 4, 5], [5, 4, 3], [4, 5, 3]])
def test_neighbours_stay_neighbours(released: list[int]) -> None:
    pool = SlotPool(8)
    pool.take(8)
    pool.release(np.array(released, np.int32))
    assert pool.take(3).tolist() == [3, 4, 5]


@pytest.mark.parametrize(("first", "second"), [(0, 2), (0, 128), (5, 16_389), (0, 29_999)])
def test_a_slot_given_twice_in_one_call_is_refused_as_a_whole(first: int, second: int) -> None:
    pool = SlotPool(40_000)
    slots = pool.take(30_000)
    slots[second] = slots[first]
    with pytest.raises(InvariantViolated, match="twice"):
        pool.release(slots)
    assert pool.used == 30_000
    pool.check()


def test_a_pool_of_nothing() -> None:
    pool = SlotPool(0)
    assert pool.take(1).tolist() == []
    assert pool.longest_free_run == 0
    pool.check()
