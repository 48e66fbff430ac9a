"""Blocks that wait for a tier below: in order, each once, in bounded memory."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.manager.write_queue import WriteQueue

IDS = 8
ids = st.lists(st.integers(0, IDS - 1), unique=True, max_size=5)
calls = st.one_of(
    st.tuples(st.just("add"), ids),
    st.tuples(st.just("discard"), ids),
    st.tuples(st.just("pop"), st.integers(0, 4)),
)


def array(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, np.int32)


@given(st.lists(calls, max_size=60))
def test_queue_is_a_list_without_repetitions(made: list[tuple[str, object]]) -> None:
    queue, expected = WriteQueue(IDS), list[int]()
    for call, argument in made:
        if call == "add":
            assert isinstance(argument, list)
            queue.add(array(argument))
            expected += [block for block in argument if block not in expected]
        elif call == "discard":
            assert isinstance(argument, list)
            queue.discard(array(argument))
            expected = [block for block in expected if block not in argument]
        else:
            assert isinstance(argument, int)
            taken = queue.pop(argument).tolist()
            if call == "pop":
                assert len(taken) == min(argument, len(expected))
                assert set(taken) <= set(expected)
                expected = [block for block in expected if block not in taken]
        assert len(queue) == len(expected)
        assert [block in queue for block in range(IDS)] == [b in expected for b in range(IDS)]


def test_oldest_come_first() -> None:
    queue = WriteQueue(IDS)
    queue.add(array([3, 1]))
    queue.add(array([1, 2]))
    assert queue.pop(2).tolist() == [3, 1]
    assert queue.pop(9).tolist() == [2]
    assert queue.pop(9).tolist() == []


def test_blocks_that_leave_early_do_not_fill_the_memory() -> None:
    """A store that is away for days, while host memory turns over again and again."""
    queue = WriteQueue(4096)
    for _ in range(200):
        queue.add(np.arange(4096, dtype=np.int32))
        queue.discard(np.arange(4096, dtype=np.int32))
    assert queue._recorded <= 2 * 4096 + 1024
    assert queue.pop(1).tolist() == []
