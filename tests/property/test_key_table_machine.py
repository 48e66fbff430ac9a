"""Random batches of additions, removals and look-ups: the key table against a dict."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.machines import machine_settings

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.key_table import KeyTable
from kvstrata.core.keys import ABSENT, BlockIds, as_key_array

CAPACITY = 12
SPACES = [bytes([n] * 16) for n in range(3)]
# The last eight differ in their middle bytes only: what a bucket is chosen by is the same.
KEYS = [bytes([n]).rjust(32, b"k") for n in range(12)]
KEYS += [bytes(8) + bytes([n] * 16) + bytes(8) for n in range(8)]

spaces = st.sampled_from(SPACES)
batches = st.lists(st.sampled_from(KEYS), max_size=8, unique=True)


class KeyTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = KeyTable(CAPACITY)
        self.ids: dict[tuple[bytes, bytes], int] = {}
        self.retired: set[int] = set()  # ids in use that nothing finds

    def room(self) -> int:
        return CAPACITY - len(self.ids) - len(self.retired)

    def take_in(self, space: bytes, keys: list[bytes], ids: list[int]) -> None:
        for key, block_id in zip(keys, ids, strict=True):
            assert block_id not in self.ids.values()
            assert block_id not in self.retired
            self.ids[space, key] = block_id

    @rule(space=spaces, keys=batches)
    def add(self, space: bytes, keys: list[bytes]) -> None:
        absent = [key for key in keys if (space, key) not in self.ids]
        taken = absent[: self.room()]
        self.take_in(space, taken, self.table.add(space, as_key_array(absent)).tolist())

    @rule(space=spaces, keys=batches)
    def find_or_add(self, space: bytes, keys: list[bytes]) -> None:
        expected = []
        room = self.room()
        for key in keys:
            new = (space, key) not in self.ids
            if new and not room:
                break
            room -= new
            expected.append(new)
        ids, is_new = self.table.find_or_add(space, as_key_array(keys))
        assert is_new.tolist() == expected
        for key, block_id, new in zip(keys, ids.tolist(), expected, strict=False):
            if new:
                self.take_in(space, [key], [block_id])
            else:
                assert self.ids[space, key] == block_id

    @rule(space=spaces, key=st.sampled_from(KEYS), others=batches)
    def add_twice(self, space: bytes, key: bytes, others: list[bytes]) -> None:
        keys = [key, *(other for other in others if other != key), key]
        if any((space, k) in self.ids for k in keys) or len(keys) > self.room():
            return
        with pytest.raises(InvariantViolated, match="twice"):
            self.table.add(space, as_key_array(keys))

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        in_use = sorted(self.ids.values()) + sorted(self.retired)
        if not in_use:
            return
        ids = data.draw(st.lists(st.sampled_from(in_use), unique=True, max_size=8))
        self.table.remove(_array(ids))
        self.retired -= set(ids)
        self.ids = {key: block_id for key, block_id in self.ids.items() if block_id not in ids}

    @rule(ids=st.lists(st.integers(-1, CAPACITY), min_size=1, max_size=4))
    def remove_what_is_not_there(self, ids: list[int]) -> None:
        in_use = self.retired | set(self.ids.values())
        if set(ids) <= in_use and len(set(ids)) == len(ids):
            return
        with pytest.raises(InvariantViolated):
            self.table.remove(_array(ids))

    @rule(space=spaces)
    def retire(self, space: bytes) -> None:
        number = self.table.namespace_number(space)
        assert self.table.retire(space) == number
        gone = {key: block_id for key, block_id in self.ids.items() if key[0] == space}
        assert (number == ABSENT) == (not gone)
        self.retired |= set(gone.values())
        self.ids = {key: block_id for key, block_id in self.ids.items() if key[0] != space}
        if gone:
            found = [i for piece in self.table.ids_of_number(number) for i in piece.tolist()]
            assert found == sorted(gone.values())

    @rule(space=spaces, keys=batches)
    def find(self, space: bytes, keys: list[bytes]) -> None:
        expected = [self.ids.get((space, key), ABSENT) for key in keys]
        assert self.table.find(space, as_key_array(keys)).tolist() == expected
        leading = expected.index(ABSENT) if ABSENT in expected else len(expected)
        prefix = self.table.longest_prefix(space, as_key_array(keys)).tolist()
        assert prefix == expected[:leading]

    @rule(wanted=st.lists(st.tuples(spaces, st.sampled_from(KEYS)), max_size=8))
    def find_mixed(self, wanted: list[tuple[bytes, bytes]]) -> None:
        expected = [self.ids.get(pair, ABSENT) for pair in wanted]
        assert self.table.find_mixed([b"".join(pair) for pair in wanted]).tolist() == expected

    @rule(wanted=st.lists(st.tuples(spaces, st.sampled_from(KEYS)), max_size=8, unique=True))
    def add_mixed(self, wanted: list[tuple[bytes, bytes]]) -> None:
        absent = [pair for pair in wanted if pair not in self.ids]
        ids = self.table.add_mixed([b"".join(pair) for pair in absent]).tolist()
        assert len(ids) == min(len(absent), self.room())
        for (space, key), block_id in zip(absent, ids, strict=False):
            self.take_in(space, [key], [block_id])

    @invariant()
    def agrees(self) -> None:
        self.table.check()
        assert len(self.table) == len(self.ids) + len(self.retired)
        names = self.table.namespaces
        for space in SPACES:
            number = self.table.namespace_number(space)
            expected = sorted(i for (s, _), i in self.ids.items() if s == space)
            found = [i for piece in self.table.ids(space) for i in piece.tolist()]
            assert found == expected
            assert (number == ABSENT) == (not expected)
            if expected:
                assert names[number] == space
                assert self.table.count(number) == len(expected)
        keys = list(self.ids)
        ids = _array([self.ids[key] for key in keys])
        assert self.table.store_keys(ids) == [space + key for space, key in keys]


def _array(ids: list[int]) -> BlockIds:
    return np.array(ids, np.int32)


TestKeyTableMachine = KeyTableMachine.TestCase
TestKeyTableMachine.settings = machine_settings(examples=100, steps=25)
