"""Random additions, removals and look-ups: the table of fingerprints against a list."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.machines import machine_settings

from kvstrata.blend.fingerprints import Prints
from kvstrata.blend.print_table import PrintTable
from kvstrata.core.errors import InvariantViolated

CAPACITY = 12
# Those of the first half share a bucket; of the first quarter, also the bit of a mark.
PRINTS = [*range(4), *(3 << 56 | n << 58 for n in range(2)), 1 << 63, 5 << 60, (1 << 64) - 1]

prints = st.sampled_from(PRINTS)


def array(values: list[int]) -> Prints:
    return np.array(values, np.uint64)


class PrintTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = PrintTable(CAPACITY)
        self.entries: dict[int, tuple[int, int, int]] = {}

    @rule(values=st.lists(prints, max_size=5), owner=st.integers(0, 1 << 40))
    def add(self, values: list[int], owner: int) -> None:
        places = np.arange(len(values)) + 7
        if len(self.entries) + len(values) > CAPACITY:
            with pytest.raises(InvariantViolated, match="too small"):
                self.table.add(array(values), owner, places)
            return
        ids = self.table.add(array(values), owner, places).tolist()
        assert not set(ids) & set(self.entries)
        for at, (entry, value) in enumerate(zip(ids, values, strict=True)):
            self.entries[entry] = (value, owner, at + 7)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        chosen = st.lists(st.sampled_from(sorted(self.entries) or [0]), unique=True)
        ids = [entry for entry in data.draw(chosen) if entry]
        self.table.remove(np.array(ids, np.int32))
        for entry in ids:
            del self.entries[entry]

    @rule(values=st.lists(prints, max_size=9))
    def find(self, values: list[int]) -> None:
        held = {value for value, _, _ in self.entries.values()}
        rows, ids = self.table.find(array(values))
        assert rows.tolist() == [row for row, value in enumerate(values) if value in held]
        assert [self.entries[entry][0] for entry in ids.tolist()] == [values[r] for r in rows]

    @rule(values=st.lists(prints, max_size=5, unique=True))
    def find_all(self, values: list[int]) -> None:
        expected = sorted(e for e, (value, _, _) in self.entries.items() if value in values)
        assert sorted(self.table.find_all(array(values)).tolist()) == expected

    @rule(owner=st.integers(0, 3))
    def owned(self, owner: int) -> None:
        ids = np.array(sorted(self.entries), np.int32)
        expected = [entry for entry in sorted(self.entries) if self.entries[entry][1] == owner]
        assert self.table.owned(ids, owner).tolist() == expected

    @invariant()
    def entries_are_as_they_were_added(self) -> None:
        assert len(self.table) == len(self.entries)
        owners, places = self.table.holders(np.array(list(self.entries), np.int32))
        held = [(owner, place) for _, owner, place in self.entries.values()]
        assert list(zip(owners, places, strict=True)) == held


TestPrintTableMachine = PrintTableMachine.TestCase
TestPrintTableMachine.settings = machine_settings(examples=60, steps=30)
