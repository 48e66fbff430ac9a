"""Random histories: each policy against a plain one that meets one block at a time."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray
from tests.machines import machine_settings
from tests.property.policy_models import Model, PlainCostAware, PlainLRU, PlainS3FIFO

from kvstrata.core.keys import BlockIds
from kvstrata.index.policies import LRU, S3FIFO, CostAware, EvictionPolicy

IDS = 24
COSTS = [1.0 + block % 5 for block in range(IDS)]
batches = st.lists(st.integers(0, IDS - 1), max_size=8, unique=True)


def array(ids: list[int]) -> BlockIds:
    return np.array(ids, np.int32)


def prints(ids: BlockIds) -> NDArray[np.uint64]:
    """Spread over the buckets of the table of ghosts, so that none overflows."""
    return ids.astype(np.uint64) * np.uint64((1 << 32) + (1 << 32) // IDS)


class PolicyMachine(RuleBasedStateMachine):
    """Blocks 3n+1 and 3n+2 continue from block 3n, which may not leave before they have."""

    def __init__(self, policy: EvictionPolicy, model: Model) -> None:
        super().__init__()
        self.policy = policy
        self.model = model
        self.tier: set[int] = set()
        self.leased: set[int] = set()

    def may_leave_one(self, block: int, gone: list[int]) -> bool:
        children = {block + 1, block + 2} if block % 3 == 0 else set()
        return block not in self.leased and not children & self.tier - set(gone)

    def may_leave(self, ids: BlockIds) -> NDArray[np.bool_]:
        gone: list[int] = []
        for block in ids.tolist():
            gone += [block] if self.may_leave_one(block, gone) else []
        return np.isin(ids, gone)

    @rule(ids=batches)
    def admit(self, ids: list[int]) -> None:
        new = [block for block in ids if block not in self.tier]
        self.policy.admit(array(new))
        self.model.admit(new)
        self.tier |= set(new)

    @rule(ids=batches)
    def touch(self, ids: list[int]) -> None:
        self.policy.touch(array(ids))
        self.model.touch(ids)

    @rule(ids=batches)
    def remove(self, ids: list[int]) -> None:
        self.policy.remove(array(ids))
        self.model.remove(ids)
        self.tier -= set(ids)

    @rule(ids=st.sets(st.integers(0, IDS - 1)))
    def lease(self, ids: set[int]) -> None:
        self.leased = ids

    @rule(count=st.integers(0, 6), evict=st.booleans())
    def victims(self, count: int, evict: bool) -> None:
        expected = self.model.victims(count, self.may_leave_one)
        victims = self.policy.victims(count, self.may_leave)
        assert victims.tolist() == expected
        if evict:
            self.remove(expected)

    @invariant()
    def agrees(self) -> None:
        self.policy.check()
        assert len(self.policy) == len(self.tier)


class LRUMachine(PolicyMachine):
    def __init__(self) -> None:
        super().__init__(LRU(IDS), PlainLRU())


class CostAwareMachine(PolicyMachine):
    def __init__(self) -> None:
        super().__init__(CostAware(IDS, np.array(COSTS).__getitem__), PlainCostAware(COSTS))


class S3FIFOMachine(PolicyMachine):
    def __init__(self) -> None:
        super().__init__(S3FIFO(IDS, 20, prints), PlainS3FIFO(2, 18))

    def may_leave_one(self, block: int, gone: list[int]) -> bool:
        del block, gone
        return True


class S3FIFORefusalsMachine(PolicyMachine):
    """Whoever may not leave does not, and whoever may without others is found."""

    def __init__(self) -> None:
        super().__init__(S3FIFO(IDS, 20, prints), PlainLRU())

    @rule(count=st.integers(0, 6), evict=st.booleans())
    def victims(self, count: int, evict: bool) -> None:
        victims = self.policy.victims(count, self.may_leave).tolist()
        assert len(victims) <= count
        if len(victims) < count:
            assert {b for b in self.tier if self.may_leave_one(b, [])} <= set(victims)
        assert len(set(victims)) == len(victims)
        assert set(victims) <= self.tier
        assert self.may_leave(array(victims)).all()
        if evict:
            self.remove(victims)


TestLRU = LRUMachine.TestCase
TestLRU.settings = machine_settings(examples=100, steps=25)
TestCostAware = CostAwareMachine.TestCase
TestCostAware.settings = machine_settings(examples=100, steps=25)
TestS3FIFO = S3FIFOMachine.TestCase
TestS3FIFO.settings = machine_settings(examples=100, steps=25)
TestS3FIFORefusals = S3FIFORefusalsMachine.TestCase
TestS3FIFORefusals.settings = machine_settings(examples=100, steps=25)
