"""The clock, the table and the bound of bench/step_hooks.py; no scheduler."""

import pytest
from bench.step_hooks import Steps, markdown, timed, verdict


class Hooks:
    def __init__(self, clock: "Clock") -> None:
        self._clock = clock

    def build(self, tokens: int, *, idle: bool) -> tuple[int, bool]:
        self._clock.now += 700
        return tokens, idle

    def fail(self) -> None:
        self._clock.now += 50
        raise ValueError("no")

    def other(self) -> None:
        self._clock.now += 10_000


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


def test_only_the_named_hooks_are_timed_and_they_answer_as_before() -> None:
    clock = Clock()
    hooks = Hooks(clock)
    spent = timed(hooks, ("build", "fail"), clock)
    assert hooks.build(3, idle=True) == (3, True)
    hooks.other()
    with pytest.raises(ValueError, match="no"):
        hooks.fail()
    assert spent == [750]


def test_table_and_bound_are_of_steps_with_nothing_to_do() -> None:
    steps = Steps(8, [10.0] * 9 + [90.0], [500.0], [130.0], [100.0])
    assert (
        markdown([steps]).splitlines()[-1] == "| 8 | 10.0 | 10.0 | 90.0 | 500.0 | 100.0 | 130.0 |"
    )
    assert verdict(steps).startswith("met     8 requests")
    slow = Steps(1, [20.0], [], [1.0], [1.0])
    assert verdict(slow).startswith("NOT met 1 requests")
    assert "| 1 | 20.0 | 20.0 | 20.0 | 0.0 |" in markdown([slow])
