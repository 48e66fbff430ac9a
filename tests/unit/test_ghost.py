"""What has left is remembered for a time; the policy's machine tests it at small sizes."""

import numpy as np
from numpy.typing import NDArray

from kvstrata.index.ghost import Ghosts


def prints(start: int, end: int) -> NDArray[np.uint64]:
    return np.random.default_rng(0).integers(0, 1 << 63, end, np.uint64)[start:]


def test_nearly_all_of_the_last_are_remembered_and_none_before() -> None:
    ghosts = Ghosts(10_000)
    for start in range(0, 50_000, 1000):
        ghosts.add(prints(start, start + 1000))
    assert not ghosts.take(prints(0, 40_000)).any()
    assert ghosts.take(prints(40_000, 50_000)).mean() > 0.95
    assert not ghosts.take(prints(60_000, 70_000)).any()


def test_what_is_taken_is_forgotten() -> None:
    ghosts = Ghosts(100)
    ghosts.add(prints(0, 50))
    assert ghosts.take(prints(10, 20)).all()
    assert not ghosts.take(prints(10, 20)).any()
    assert ghosts.take(prints(0, 10)).all()


def test_what_is_added_again_is_remembered_from_then_on() -> None:
    ghosts = Ghosts(100)
    ghosts.add(prints(0, 1))
    ghosts.add(prints(1, 100))
    ghosts.add(prints(0, 1))
    ghosts.add(prints(100, 150))
    assert ghosts.take(prints(0, 1)).all()


def test_the_clock_may_turn_over() -> None:
    ghosts = Ghosts(100)
    ghosts._clock = (1 << 32) - 30
    ghosts._added[:] = ghosts._clock - 500  # every place was used by then
    ghosts.add(prints(0, 60))
    assert ghosts.take(prints(0, 60)).all()
    ghosts.add(prints(100, 300))
    assert not ghosts.take(prints(0, 60)).any()


def test_a_memory_of_nothing() -> None:
    ghosts = Ghosts(0)
    ghosts.add(prints(0, 5))
    assert not ghosts.take(prints(0, 5)).any()
