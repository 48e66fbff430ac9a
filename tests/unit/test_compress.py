"""Compressed blocks come back bit for bit; damaged frames do not come back."""

import random
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.errors import ConfigError, InvariantViolated
from kvstrata.core.types import Read, Write
from kvstrata.storage.checksum import seal
from kvstrata.storage.compress import FRAME_OVERHEAD_BYTES, CompressedStore
from kvstrata.testing import LyingStore, MemoryStore

KEY = b"n" * 16 + b"k" * 32
KEYS = [b"n" * 16 + bytes([number]) * 32 for number in range(8)]
BLOCK_BYTES = 4096


def memory(block_bytes: int = BLOCK_BYTES) -> MemoryStore:
    return MemoryStore(
        block_bytes=block_bytes + FRAME_OVERHEAD_BYTES, capacity_blocks=8, variable=True
    )


def put(store: CompressedStore, content: bytes) -> Write:
    (fate,) = store.write([KEY], [None], [memoryview(content)])
    return fate


def fetch(store: CompressedStore, length: int) -> bytes | Read:
    buffer = memoryview(bytearray(b"\xee" * length))
    (fate,) = store.read_into([KEY], [buffer])
    return bytes(buffer) if fate is Read.HIT else fate


def bf16(elements: int) -> bytes:
    """Normally distributed numbers."""
    numbers = np.random.default_rng(7).standard_normal(elements).astype(np.float32)
    return (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()


@given(
    content=st.binary(min_size=1, max_size=BLOCK_BYTES)
    | st.builds(bytes, st.integers(1, BLOCK_BYTES)),
    element_bytes=st.integers(1, 8),
)
def test_any_value_comes_back_bit_for_bit(content: bytes, element_bytes: int) -> None:
    store = CompressedStore(memory(), element_bytes)
    assert put(store, content) is Write.STORED
    assert fetch(store, len(content)) == content


def test_bf16_shrinks_by_a_quarter_and_more() -> None:
    inner, content = memory(1 << 16), bf16(1 << 15)
    put(CompressedStore(inner, 2), content)
    assert len(inner.values[KEY].content) < 0.75 * len(content)


def test_what_does_not_shrink_is_kept_as_it_is() -> None:
    inner, content = memory(), random.Random(3).randbytes(BLOCK_BYTES)
    put(CompressedStore(inner, 2), content)
    frame = inner.values[KEY].content
    assert len(frame) == BLOCK_BYTES + FRAME_OVERHEAD_BYTES
    assert frame[16:-16] == content


def test_a_frame_of_another_element_size_is_read() -> None:
    inner, content = memory(), bf16(BLOCK_BYTES // 2)
    put(CompressedStore(inner, 2), content)
    assert fetch(CompressedStore(inner, 4), BLOCK_BYTES) == content


def test_any_damaged_byte_of_a_frame_is_corrupt_and_the_block_gone() -> None:
    content = bf16(64)
    length = len(_frame_of(content))
    for position in range(length):
        lying = LyingStore(memory())
        store = CompressedStore(lying, 2)
        put(store, content)
        lying.lies_about, lying.position = {KEY}, position
        assert fetch(store, len(content)) is Read.CORRUPT
        assert store.exists([KEY]) == [False]
        assert store.statistics().corrupt_blocks == 1


def _frame_of(content: bytes) -> bytes:
    inner = memory()
    put(CompressedStore(inner, 2), content)
    return inner.values[KEY].content


def _header(magic: bytes, method: int, length: int, payload_bytes: int) -> bytes:
    return struct.pack("<4sBBHII", magic, method, 2, 0, length, payload_bytes)


@pytest.mark.parametrize(
    "frame",
    [
        b"x",
        _frame_of(bf16(64))[:-1],
        seal(_header(b"KVZ9", 0, 4, 4) + b"abcd"),
        seal(_header(b"KVZ1", 2, 4, 4) + b"abcd"),
        _header(b"KVZ1", 0, 4, 0xFFFFFFFF) + b"abcd" * 5,
        _header(b"KVZ1", 0, 4, 4) + b"abcd" + bytes(16),
    ],
    ids=["one byte", "cut off", "another version", "another method", "absurd length", "no digest"],
)
def test_what_is_no_frame_is_corrupt(frame: bytes) -> None:
    inner = memory()
    inner.write([KEY], [None], [memoryview(frame)])
    assert fetch(CompressedStore(inner, 2), BLOCK_BYTES) is Read.CORRUPT
    assert inner.exists([KEY]) == [False]


def test_a_buffer_shorter_than_its_value_is_a_bug() -> None:
    store = CompressedStore(memory(), 2)
    put(store, bf16(64))
    with pytest.raises(InvariantViolated, match="a buffer of 127 bytes for a value of 128"):
        fetch(store, 127)


def test_a_store_of_fixed_blocks_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="cannot hold shorter ones\n  hint: compress in front"):
        CompressedStore(MemoryStore(block_bytes=4096, capacity_blocks=1), 2)


def test_elements_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="elements of 9 bytes"):
        CompressedStore(memory(), 9)


def test_without_zstandard_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'kvstrata\[zstd\]'"):
        CompressedStore(memory(), 2)


def test_a_long_batch_goes_in_parts_of_bounded_memory() -> None:
    class Watched(MemoryStore):
        longest = 0

        def read_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Read]:
            self.longest = max(self.longest, sum(buffer.nbytes for buffer in buffers))
            return super().read_into(keys, buffers)

    block_bytes = 3 << 20
    inner = Watched(block_bytes=block_bytes, capacity_blocks=8, variable=True)
    store = CompressedStore(inner, 2)
    values = [bytes([number]) * 100 for number in range(5)]
    store.write(KEYS[:5], [None] * 5, [memoryview(value) for value in values])
    buffers = [memoryview(bytearray(100)) for _ in values]
    assert store.read_into(KEYS[:5], buffers) == [Read.HIT] * 5
    assert [bytes(buffer) for buffer in buffers] == values
    assert inner.longest == 2 * block_bytes


def test_threads_do_not_share_a_compressor() -> None:
    store = CompressedStore(memory(1 << 16), 2)
    values = [bf16(1 << 14)[number:] for number in range(8)]

    def work(number: int) -> None:
        buffer = memoryview(bytearray(len(values[number])))
        for _ in range(10):
            store.write([KEYS[number]], [None], [memoryview(values[number])])
            assert store.read_into([KEYS[number]], [buffer]) == [Read.HIT]
            assert bytes(buffer) == values[number]
            store.remove([KEYS[number]])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


AS_IT_IS_OF_VERSION_1 = (
    "4b565a310002000006000000060000006162636465661eca7582010687fc74da79d1357fef10"
)
ZSTD_OF_VERSION_1 = (
    "4b565a31010200003c0000001800000028b52ffd203c44000010616101000cc002f2000062010000"
    "1c7983a6cb812d8fd7da8bf2bf9c57c0"
)


@pytest.mark.parametrize(
    ("frame", "value"),
    [(AS_IT_IS_OF_VERSION_1, b"abcdef"), (ZSTD_OF_VERSION_1, b"ab" * 30)],
    ids=["as it is", "zstd"],
)
def test_a_frame_of_version_1_is_read(frame: str, value: bytes) -> None:
    inner = memory()
    inner.write([KEY], [None], [memoryview(bytes.fromhex(frame))])
    assert fetch(CompressedStore(inner, 2), len(value)) == value
