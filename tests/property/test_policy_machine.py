"""Random histories: each policy against a plain one that meets one block at a time."""

from collections import OrderedDict

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray

from kvstrata.core.keys import BlockIds
from kvstrata.index.policies import LRU

IDS = 24
batches = st.lists(st.integers(0, IDS - 1), max_size=8, unique=True)


def array(ids: list[int]) -> BlockIds:
    return np.array(ids, np.int32)


class Tier:
    """Blocks 3n+1 and 3n+2 continue from block 3n, which may not leave before they have."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.leased: set[int] = set()

    def may_leave_one(self, block: int, gone: set[int]) -> bool:
        children = {block + 1, block + 2} if block % 3 == 0 else set()
        return block not in self.leased and not (children & self.blocks - gone)

    def may_leave(self, ids: BlockIds) -> NDArray[np.bool_]:
        gone: set[int] = set()
        answers = []
        for block in ids.tolist():
            answers.append(self.may_leave_one(block, gone))
            if answers[-1]:
                gone.add(block)
        return np.array(answers, np.bool_)


class LRUMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.policy = LRU(IDS)
        self.tier = Tier()
        self.order: OrderedDict[int, None] = OrderedDict()

    @rule(ids=batches)
    def admit(self, ids: list[int]) -> None:
        self.policy.admit(array(ids))
        for block in reversed(ids):
            self.order[block] = None
            self.order.move_to_end(block)
        self.tier.blocks |= set(ids)

    @rule(ids=batches)
    def touch(self, ids: list[int]) -> None:
        self.policy.touch(array(ids))
        for block in reversed(ids):
            if block in self.order:
                self.order.move_to_end(block)

    @rule(ids=batches)
    def remove(self, ids: list[int]) -> None:
        self.policy.remove(array(ids))
        for block in ids:
            self.order.pop(block, None)
        self.tier.blocks -= set(ids)

    @rule(ids=st.sets(st.integers(0, IDS - 1)))
    def lease(self, ids: set[int]) -> None:
        self.tier.leased = ids

    @rule(count=st.integers(0, 6), evict=st.booleans())
    def victims(self, count: int, evict: bool) -> None:
        expected: list[int] = []
        refused_in_a_row = 0
        while len(expected) < count and refused_in_a_row < len(self.order) - len(expected):
            block = next(b for b in self.order if b not in expected)
            if self.tier.may_leave_one(block, set(expected)):
                expected.append(block)
                refused_in_a_row = 0
            else:
                self.order.move_to_end(block)
                refused_in_a_row += 1
        victims = self.policy.victims(count, self.tier.may_leave)
        assert victims.tolist() == expected
        if evict:
            self.remove(expected)

    @invariant()
    def agrees(self) -> None:
        self.policy.check()
        assert len(self.policy) == len(self.order)
        everything = self.policy.victims(IDS, lambda ids: np.ones(len(ids), np.bool_))
        assert everything.tolist() == list(self.order)


TestLRUMachine = LRUMachine.TestCase
TestLRUMachine.settings = settings(stateful_step_count=40)
