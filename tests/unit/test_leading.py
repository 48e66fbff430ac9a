"""A batch of reads that fails still gives what lies before the block that cannot be read."""

from collections.abc import Sequence

import pytest

from kvstrata.core.errors import FaultCause, TierUnavailable
from kvstrata.core.types import Read, StoreKey
from kvstrata.storage.wrap import LeadingStore
from kvstrata.testing.memory import MemoryStore
from kvstrata.testing.samples import key

BYTES = 4096
KEYS = [key(n) for n in range(5)]


class BadSectors(MemoryStore):
    """Raises for a batch with a block that cannot be read; each call takes *seconds*."""

    def __init__(self, seconds: float) -> None:
        super().__init__(block_bytes=BYTES, capacity_blocks=8)
        self.bad: set[StoreKey] = set()
        self.cause: FaultCause = "io"
        self.calls: list[int] = []
        self.now = 0.0
        self.seconds = seconds
        self.write(KEYS, [None] * 5, [memoryview(bytes([n]) * BYTES) for n in range(5)])

    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        self.calls.append(len(keys))
        self.now += self.seconds
        if self.bad & set(keys):
            raise TierUnavailable("a sector cannot be read", cause=self.cause)
        return super().read_into(keys, buffers)


def read(store: BadSectors) -> tuple[list[Read], list[bytes]]:
    buffers = [bytearray(b"\xee" * BYTES) for _ in KEYS]
    wrapped = LeadingStore(store, clock=lambda: store.now)
    fates = wrapped.read_into(KEYS, [memoryview(buffer) for buffer in buffers])
    return fates, [bytes(buffer[:1]) for buffer in buffers]


def test_batch_that_succeeds_is_one_call() -> None:
    store = BadSectors(0.0)
    assert read(store)[0] == [Read.HIT] * 5
    assert store.calls == [5]


@pytest.mark.parametrize("bad", [1, 2, 4])
def test_blocks_before_the_one_that_fails_are_read(bad: int) -> None:
    store = BadSectors(0.0)
    store.bad = {KEYS[bad]}
    store.remove([KEYS[0]])
    fates, first_bytes = read(store)
    assert fates == [Read.MISS] + [Read.HIT] * (bad - 1) + [Read.FAILED] * (5 - bad)
    assert first_bytes[1:bad] == [b"\1", b"\2", b"\3", b"\4"][: bad - 1]
    assert store.calls == [5] + [1] * (bad + 1)


def test_store_that_gives_not_even_the_first_block_has_failed() -> None:
    store = BadSectors(0.0)
    store.bad = {KEYS[0]}
    with pytest.raises(TierUnavailable):
        read(store)
    assert store.calls == [5, 1]


def test_store_that_is_slow_to_fail_is_not_asked_again() -> None:
    store = BadSectors(1.5)
    store.bad = {KEYS[4]}
    with pytest.raises(TierUnavailable):
        read(store)
    assert store.calls == [5]


def test_store_that_does_not_let_us_in_is_not_asked_again() -> None:
    store = BadSectors(0.0)
    store.bad, store.cause = {KEYS[4]}, "credentials"
    with pytest.raises(TierUnavailable):
        read(store)
    assert store.calls == [5]


def test_no_block_is_begun_after_the_deadline() -> None:
    store = BadSectors(0.4)
    store.bad = {KEYS[4]}
    assert read(store)[0] == [Read.HIT] * 2 + [Read.FAILED] * 3
    assert store.calls == [5, 1, 1]
