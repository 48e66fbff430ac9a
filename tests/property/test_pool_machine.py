"""Random takes and releases: slot pools and free ids against a set."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.machines import machine_settings

from kvstrata.core.errors import InvariantViolated
from kvstrata.index.pool import SlotPool

CAPACITY = 9


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(CAPACITY)
        self.used: set[int] = set()

    @rule(count=st.integers(0, CAPACITY + 1))
    def take(self, count: int) -> None:
        slots = self.pool.take(count).tolist()
        assert len(slots) == min(count, CAPACITY - len(self.used))
        assert not self.used & set(slots)
        self.used |= set(slots)
        assert len(set(slots)) == len(slots)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.used:
            slots = data.draw(st.lists(st.sampled_from(sorted(self.used)), unique=True))
            self.pool.release(np.array(slots, np.int32))
            self.used -= set(slots)

    @rule(slots=st.lists(st.integers(-1, CAPACITY), min_size=1, max_size=3))
    def release_what_nobody_holds(self, slots: list[int]) -> None:
        if set(slots) <= self.used and len(set(slots)) == len(slots):
            return
        with pytest.raises(InvariantViolated):
            self.pool.release(np.array(slots, np.int32))

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert (self.pool.free, self.pool.used) == (CAPACITY - len(self.used), len(self.used))
        free = "".join(" " if slot in self.used else "x" for slot in range(CAPACITY))
        assert self.pool.longest_free_run == max(map(len, free.split() or [""]))
        slots = np.arange(CAPACITY)
        assert set(slots[self.pool.is_used(slots)].tolist()) == self.used


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = machine_settings(examples=100, steps=30)
