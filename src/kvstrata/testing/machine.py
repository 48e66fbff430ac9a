"""Random calls to a store and to a dict: their answers must agree."""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage.store import Store
from kvstrata.testing.samples import ONE, OTHER, MakeValue, dirty, key, random_value

KEYS: Final = [key(number, namespace) for namespace in (ONE, OTHER) for number in range(6)]

_keys = st.sampled_from(KEYS)
_batches = st.lists(_keys, max_size=8)
_writes = st.lists(
    st.tuples(_keys, st.integers(0, 3), st.floats(0, 1), st.none() | _keys), max_size=8
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a store promises beyond the contract."""

    persistent: bool = False  # opened again at the same place it has its blocks
    variable: bool = False  # as its statistics say
    bounded: bool = True  # FULL at statistics().capacity_blocks, and never before
    counts: bool = True  # statistics().blocks is exact


class StoreMachine(RuleBasedStateMachine):
    """One store and its model; ``store_machine`` makes subclasses of it."""

    opener: Callable[[Path], Store]
    traits: Traits
    value: MakeValue

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp(prefix="kvstrata-machine-"))
        self.model: dict[StoreKey, bytes] = {}

    @initialize()
    def open(self) -> None:
        self.store = type(self).opener(self.place)
        size = self.store.statistics()
        self.block_bytes = size.block_bytes
        self.variable = size.variable
        self.capacity = size.capacity_blocks if self.traits.bounded else 0

    @rule(batch=_writes)
    def write(self, batch: list[tuple[StoreKey, int, float, StoreKey | None]]) -> None:
        contents = [self.content(version, share) for _, version, share, _ in batch]
        keys = [wanted for wanted, *_ in batch]
        buffers = [memoryview(bytearray(content)) for content in contents]
        expected = []
        for wanted, content in zip(keys, contents, strict=True):
            fate = Write.STORED
            if wanted in self.model:
                fate = Write.EXISTS
            elif self.capacity and len(self.model) == self.capacity:
                fate = Write.FULL
            else:
                self.model[wanted] = content
            expected.append(fate)
        assert self.store.write(keys, [parent for *_, parent in batch], buffers) == expected
        for buffer in buffers:
            buffer[:] = b"\xdd" * len(buffer)  # the store has kept nothing of it

    def content(self, version: int, share: float) -> bytes:
        length = max(1, round(share * self.block_bytes)) if self.variable else self.block_bytes
        return type(self).value(version, length)

    @rule()
    def read_all(self) -> None:
        self.read(KEYS)

    @rule(wanted=_batches)
    def read_some(self, wanted: list[StoreKey]) -> None:
        self.read(wanted)

    def read(self, wanted: Sequence[StoreKey]) -> None:
        buffers = [dirty(self.block_bytes) for _ in wanted]
        fates = self.store.read_into(wanted, buffers)
        assert fates == [Read.HIT if each in self.model else Read.MISS for each in wanted]
        for each, buffer in zip(wanted, buffers, strict=True):
            if each in self.model:
                assert buffer[: len(self.model[each])] == self.model[each]

    @rule(wanted=_batches)
    def exists(self, wanted: list[StoreKey]) -> None:
        assert self.store.exists(wanted) == [each in self.model for each in wanted]

    @rule(wanted=_batches)
    def remove(self, wanted: list[StoreKey]) -> None:
        expected = [self.model.pop(each, None) is not None for each in wanted]
        assert self.store.remove(wanted) == expected

    @precondition(lambda self: self.traits.persistent)
    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()

    @invariant()
    def nothing_is_damaged_and_counts_agree(self) -> None:
        statistics = self.store.statistics()
        assert statistics.corrupt_blocks == 0
        if self.traits.counts:
            assert statistics.blocks == len(self.model)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.place)


def store_machine(
    open_store: Callable[[Path], Store],
    traits: Traits = Traits(),
    value: MakeValue = random_value,
) -> type[StoreMachine]:
    """A Hypothesis state machine that holds stores against a dict.

    *open_store* makes the store that lives at a path, an empty folder when it is new. Run it as
    ``TestMyStore = store_machine(open_my_store).TestCase``.
    """
    members: dict[str, Any] = {
        "opener": staticmethod(open_store),
        "traits": traits,
        "value": staticmethod(value),
    }
    return type("StoreMachine", (StoreMachine,), members)
