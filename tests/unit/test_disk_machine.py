"""Random operations, restarts and kills: the disk store and a dict must agree."""

import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.disks import listed

from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage import journal
from kvstrata.storage.disk import DiskStore

NAMESPACES = (b"a" * 16, b"b" * 16)
keys = st.builds(
    lambda namespace, number: namespace + bytes([number]) * 32,
    st.sampled_from(NAMESPACES),
    st.integers(0, 4),
)
batches = st.lists(keys, max_size=5)


class DiskMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.lives = 0
        self.writes = 0
        self.model: dict[StoreKey, tuple[bytes, StoreKey | None]] = {}

    @initialize(block_bytes=st.sampled_from([4096, 5000]), slots=st.integers(1, 6))
    def make(self, block_bytes: int, slots: int) -> None:
        self.block_bytes = block_bytes
        self.slots = slots
        self.open()

    def open(self) -> None:
        self.store = DiskStore(
            [self.root / str(self.lives)],
            block_bytes=self.block_bytes,
            capacity_bytes=self.slots * (-(-self.block_bytes // 4096) * 4096 + 4096),
            max_blocks_per_file=4,
            lock_timeout_seconds=0,
        )
        assert dict(listed(self.store)) == {key: parent for key, (_, parent) in self.model.items()}

    @rule(wanted=batches, parent=st.none() | keys, is_aligned=st.booleans())
    def write(self, wanted: list[StoreKey], parent: StoreKey | None, is_aligned: bool) -> None:
        expected, payloads, buffers = [], [], []
        for key in wanted:
            self.writes += 1
            payloads.append(self.writes.to_bytes(4, "big") * (self.block_bytes // 4))
            buffers.append(self.buffer(is_aligned))
            buffers[-1][:] = payloads[-1]
            fits = len(self.model) < self.slots
            fate = Write.EXISTS if key in self.model else Write.STORED if fits else Write.FULL
            expected.append(fate)
            if fate is Write.STORED:
                self.model[key] = (payloads[-1], parent)
        assert self.store.write(wanted, [parent] * len(wanted), buffers) == expected

    @rule(wanted=batches, is_aligned=st.booleans())
    def read(self, wanted: list[StoreKey], is_aligned: bool) -> None:
        buffers = [self.buffer(is_aligned) for _ in wanted]
        fates = self.store.read_into(wanted, buffers)
        assert fates == [Read.HIT if key in self.model else Read.MISS for key in wanted]
        for key, buffer in zip(wanted, buffers, strict=True):
            assert key not in self.model or buffer == self.model[key][0]

    @rule(wanted=batches)
    def remove(self, wanted: list[StoreKey]) -> None:
        expected = [self.model.pop(key, None) is not None for key in wanted]
        assert self.store.remove(wanted) == expected

    @rule(namespace=st.sampled_from(NAMESPACES))
    def drop(self, namespace: bytes) -> None:
        victims = [key for key in self.model if key.startswith(namespace)]
        assert self.store.drop_namespace(namespace) == len(victims)
        for key in victims:
            del self.model[key]

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.open()

    @rule(more=st.integers(0, 3))
    def grow(self, more: int) -> None:
        self.store.close()
        self.slots += more
        self.open()

    @rule()
    def kill(self) -> None:
        """Go on with the directory as a killed process would leave it now."""
        shutil.copytree(self.root / str(self.lives), self.root / str(self.lives + 1))
        self.store.close()
        self.lives += 1
        self.open()

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "store"):
            statistics = self.store.statistics()
            assert statistics.blocks == len(self.model) <= statistics.capacity_blocks == self.slots
            assert statistics.corrupt_blocks == 0

    def buffer(self, is_aligned: bool) -> memoryview:
        skip_bytes = 0 if is_aligned else 1
        buffer = memoryview(mmap.mmap(-1, self.block_bytes + skip_bytes))[skip_bytes:]
        buffer[:] = b"\xee" * self.block_bytes
        return buffer

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.root)


@pytest.fixture(autouse=True)
def _fast_disk_and_short_journal() -> Iterator[None]:
    """A kill loses nothing that was written, synced or not: syncing would only be slow here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda _: None)
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(journal, "COMPACT_RECORDS", 8)  # so that running stores compact
        yield


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
