"""Who asks for little does not wait for those who ask for much."""

import pytest

from kvstrata.server.fair import FairQueue


def served(queue: FairQueue[str], seconds: dict[str, float], times: int) -> str:
    """Who is served, when everybody in *seconds* always wants more."""
    order = ""
    for _ in range(times):
        for name in seconds:
            queue.add(name)
        item = queue.pop()
        queue.charge(item, seconds[item])
        order += item
    return order


def test_equals_take_turns() -> None:
    assert served(FairQueue(), {"a": 1.0, "b": 1.0, "c": 1.0}, 9) == "abcabcabc"


def test_time_is_shared_not_turns() -> None:
    order = served(FairQueue(), {"a": 4.0, "b": 1.0}, 100)
    assert order.count("b") == 80


def test_one_that_comes_now_and_then_waits_for_nobody_but_the_one_being_served() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(100):
        served(queue, {"a": 1.01, "b": 1.0003, "c": 1.00007}, 7)
        queue.add("rare")
        assert queue.pop() == "rare"
        queue.charge("rare", 0.001)


def test_time_is_not_saved_up() -> None:
    """One that was away for long does not hold the others up afterwards."""
    queue: FairQueue[str] = FairQueue()
    queue.add("late")
    queue.pop()
    served(queue, {"a": 1.0, "b": 1.0}, 1000)
    assert served(queue, {"late": 1.0, "a": 1.0, "b": 1.0}, 6).count("late") == 2


def test_one_that_comes_again_as_another_gains_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    order = ""
    for life in range(50):
        order += served(queue, {"a": 1.0, chr(200 + life): 1.0}, 2)
        queue.forget(chr(200 + life))
    assert order.count("a") == 50


def test_forgotten_ones_are_not_served() -> None:
    queue: FairQueue[str] = FairQueue()
    for name in "abc":
        queue.add(name)
        queue.add(name)
    queue.forget("a")
    assert "a" not in queue
    assert "b" in queue
    assert [queue.pop(), queue.pop()] == ["b", "c"]
    assert not queue
    with pytest.raises(IndexError):
        queue.pop()
    queue.forget("a")
    assert (queue._waiting, queue._heap) == (set(), [])


def test_one_that_comes_back_after_it_was_forgotten_is_served_once() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.add("a")
    queue.forget("a")
    queue.add("a")
    assert queue.pop() == "a"
    assert not queue
