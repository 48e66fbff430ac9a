"""Queues of a size at which segments fill, empty and join; orders are tested by the policies."""

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstrata.core.keys import BlockIds
from kvstrata.index.order import Order

SEGMENT = 4096


def ids(*values: int) -> BlockIds:
    return np.array(values, np.int32)


def spread(count: int, of: int, seed: int = 0) -> BlockIds:
    return np.random.default_rng(seed).permutation(of)[:count].astype(np.int32)


def moved_to_the_end(order: NDArray[np.int32], moved: BlockIds) -> NDArray[np.int32]:
    return np.concatenate((order[~np.isin(order, moved)], moved))


def test_ids_that_are_given_twice_count_once() -> None:
    order = Order(10)
    order.append(ids(1, 2, 3, 2))
    assert order.ids().tolist() == [1, 3, 2]
    order.append(ids(3, 1, 3))
    assert order.ids().tolist() == [2, 1, 3]
    order.remove(ids(2, 2, 5))
    assert order.ids().tolist() == [1, 3]
    order.check()


def test_an_id_is_in_one_queue_at_most() -> None:
    order = Order(10, queues=2)
    order.append(ids(1, 2, 3), 0)
    order.append(ids(2), 1)
    assert [order.ids(queue).tolist() for queue in (0, 1)] == [[1, 3], [2]]
    assert [order.length(queue) for queue in (0, 1)] == [2, 1]
    assert order.queue_of(ids(1, 2)).tolist() == [0, 1]
    assert order.contains(ids(2, 4)).tolist() == [True, False]
    order.check()


@pytest.mark.parametrize("batch", [1, 7, 100, 3000, 20_000])
def test_many_moves(batch: int) -> None:
    capacity = 20_000
    order = Order(capacity)
    expected = np.arange(capacity, dtype=np.int32)
    order.append(expected)
    for turn in range(60):
        moved = spread(batch, capacity, seed=turn)
        order.append(moved)
        expected = moved_to_the_end(expected, moved)
    order.check()
    assert order.ids().tolist() == expected.tolist()


def test_there_are_no_more_records_than_two_for_an_id() -> None:
    """All that stays of each segment is one id, the worst that can happen to it."""
    capacity = 40 * SEGMENT
    order = Order(capacity)
    order.append(np.arange(capacity, dtype=np.int32))
    for turn in range(10):
        staying = np.arange(turn, capacity, SEGMENT)
        moved = np.delete(np.arange(capacity, dtype=np.int32), staying)
        for part in np.array_split(moved, 100):
            order.append(part)
        order.check()


def test_single_moves_do_not_use_up_the_segments() -> None:
    order = Order(3, queues=2)
    order.append(ids(0, 1, 2))
    for turn in range(100_000):
        order.append(ids(turn % 2), turn // 5 % 2)
    order.check()


def test_segments_that_lose_all_but_a_few_are_joined() -> None:
    capacity = 50 * SEGMENT
    order = Order(capacity)
    order.append(np.arange(capacity, dtype=np.int32))
    kept = np.arange(0, capacity, 100, dtype=np.int32)
    gone = np.setdiff1d(np.arange(capacity, dtype=np.int32), kept)
    for part in np.array_split(gone, 500):
        order.remove(part)
        order.check()
    assert order.ids().tolist() == kept.tolist()
    # Records, not ids, are what a scan has to look at.
    assert order.segments_in_use < 5


def test_a_scan_meets_each_id_once_from_the_oldest() -> None:
    capacity = 5 * SEGMENT
    order = Order(capacity)
    order.append(np.arange(capacity, dtype=np.int32))
    order.append(spread(9000, capacity))
    expected = order.ids()
    for step in (1000, 4096, 50_000):
        scan = order.scan()
        parts = []
        while len(part := scan.next(step)):
            assert len(part) <= step
            parts.append(part)
        assert np.concatenate(parts).tolist() == expected.tolist()


def test_a_scan_meets_what_is_moved_behind_it() -> None:
    order = Order(10_000)
    order.append(np.arange(10_000, dtype=np.int32))
    scan = order.scan()
    first = scan.next(6000)
    order.move(first)
    assert len(scan.next(6000)) == 6000
    assert scan.next(6000).tolist() == first[2000:].tolist()
    assert len(scan.next(1)) == 0
    order.tidy(6000)
    order.check()
