"""Quantised blocks: the bound on the error, what is kept exactly, the frame."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.errors import ConfigError
from kvstrata.core.types import Read, Write
from kvstrata.storage.checksum import seal
from kvstrata.storage.quantize import GROUP, ElementType, QuantizedStore, quantized_bytes
from kvstrata.testing import LyingStore, MemoryStore

KEY = b"n" * 16 + b"k" * 32
TYPES: list[ElementType] = ["bfloat16", "float16", "float32"]
BITS: dict[ElementType, int] = {"bfloat16": 16, "float16": 16, "float32": 32}

Array = np.ndarray[Any, np.dtype[Any]]


def to_float64(raw: bytes, kind: ElementType) -> Array:
    if kind == "bfloat16":
        numbers: Array = (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    else:
        numbers = np.frombuffer(raw, "<f2" if kind == "float16" else "<f4")
    with np.errstate(invalid="ignore"):  # signalling NaN
        return numbers.astype(np.float64)


def make(block_bytes: int, kind: ElementType) -> tuple[MemoryStore, QuantizedStore]:
    inner = MemoryStore(block_bytes=quantized_bytes(block_bytes, kind), capacity_blocks=4)
    return inner, QuantizedStore(inner, kind, block_bytes=block_bytes)


def round_trip(raw: bytes, kind: ElementType) -> tuple[bytes, bytes]:
    """The frame of a block, and what it is read as."""
    inner, store = make(len(raw), kind)
    assert store.write([KEY], [None], [memoryview(raw)]) == [Write.STORED]
    buffer = memoryview(bytearray(b"\xee" * len(raw)))
    assert store.read_into([KEY], [buffer]) == [Read.HIT]
    return inner.values[KEY].content, bytes(buffer)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[ElementType, bytes]:
    """Groups of any bits at all, or of numbers of one magnitude."""
    kind = draw(st.sampled_from(TYPES))
    size = BITS[kind] // 8
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            groups.append(draw(st.binary(min_size=GROUP * size, max_size=GROUP * size)))
        else:
            seed, top = draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 255))
            bits = np.random.default_rng(seed).integers(0, 2 ** BITS[kind], GROUP, np.uint64)
            shift = BITS[kind] - 9  # the sign and the first 8 bits of what follows it
            bits = (bits & ~np.uint64(0xFF << shift)) | np.uint64(top << shift)
            groups.append(bits.astype(f"<u{size}").tobytes())
    return kind, b"".join(groups)


@given(blocks())
def test_an_error_is_at_most_half_a_step_of_its_group(case: tuple[ElementType, bytes]) -> None:
    kind, raw = case
    frame, read = round_trip(raw, kind)
    before, after = (to_float64(each, kind).reshape(-1, GROUP) for each in (raw, read))
    groups = len(before)
    steps = 2.0 ** np.frombuffer(frame, np.int8)[12 : 12 + groups].astype(np.float64)
    finite = np.isfinite(before)
    assert (np.isfinite(after) == finite).all()
    before, after = np.where(finite, before, 0), np.where(finite, after, 0)
    assert (np.abs(before - after) <= steps[:, None] / 2).all()
    largest = np.abs(before).max(axis=1)
    is_close = np.maximum(largest, 63 * 2.0**-126) >= 63 * steps
    assert (is_close | (largest == 0)).all()


@given(blocks())
def test_infinity_and_nan_come_back_as_such(case: tuple[ElementType, bytes]) -> None:
    kind, raw = case
    _, read = round_trip(raw, kind)
    before, after = to_float64(raw, kind), to_float64(read, kind)
    assert (np.isnan(before) == np.isnan(after)).all()
    assert (np.isposinf(before) == np.isposinf(after)).all()
    assert (np.isneginf(before) == np.isneginf(after)).all()


@given(blocks())
def test_a_block_gives_the_same_frame_each_time_and_loses_only_once(
    case: tuple[ElementType, bytes],
) -> None:
    kind, raw = case
    frame, read = round_trip(raw, kind)
    assert round_trip(raw, kind) == (frame, read)
    _, again = round_trip(read, kind)
    assert again == read


@pytest.mark.parametrize("kind", TYPES)
def test_small_whole_numbers_and_zeros_are_exact(kind: ElementType) -> None:
    numbers = np.arange(-126, 127, dtype=np.float32)
    numbers = np.concatenate([numbers, np.zeros(256 - len(numbers), np.float32)])
    raw = numbers.astype("<f2" if kind == "float16" else "<f4").tobytes()
    if kind == "bfloat16":
        raw = (numbers.view("<u4") >> 16).astype("<u2").tobytes()
    _, read = round_trip(raw, kind)
    assert read == raw


@pytest.mark.parametrize("kind", TYPES)
def test_infinities_and_nan_leave_the_numbers_beside_them_alone(kind: ElementType) -> None:
    numbers = np.array([1.0, np.inf, -np.inf, np.nan, -np.nan, -63.0] + [0.0] * 58, np.float32)
    raw = numbers.astype("<f2" if kind == "float16" else "<f4").tobytes()
    if kind == "bfloat16":
        raw = (numbers.view("<u4") >> 16).astype("<u2").tobytes()
    _, read = round_trip(raw, kind)
    expected = [1.0, np.inf, -np.inf, np.nan, np.nan, -63.0] + [0.0] * 58
    np.testing.assert_array_equal(to_float64(read, kind), expected)


@pytest.mark.parametrize("kind", TYPES)
def test_the_largest_numbers_do_not_become_infinite(kind: ElementType) -> None:
    largest = {"bfloat16": b"\x7f\x7f", "float16": b"\xff\x7b", "float32": b"\xff\xff\x7f\x7f"}[
        kind
    ]
    _, read = round_trip(largest * GROUP, kind)
    assert read == largest * GROUP


@pytest.mark.parametrize(
    ("kind", "block_bytes", "expected"),
    [("bfloat16", 128, 93), ("float16", 4096, 2108), ("float32", 4096, 1068)],
)
def test_the_room_that_a_block_takes(kind: ElementType, block_bytes: int, expected: int) -> None:
    assert quantized_bytes(block_bytes, kind) == expected


@pytest.mark.parametrize("block_bytes", [0, 64, 129])
def test_blocks_that_are_not_whole_groups_are_refused(block_bytes: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 128 bytes"):
        quantized_bytes(block_bytes, "bfloat16")


def test_a_store_of_another_size_is_refused_with_the_right_one() -> None:
    inner = MemoryStore(block_bytes=4096, capacity_blocks=1)
    with pytest.raises(ConfigError, match="hint: open it with block_bytes=2108"):
        QuantizedStore(inner, "bfloat16", block_bytes=4096)


def test_any_damaged_byte_of_a_frame_is_corrupt_and_the_block_gone() -> None:
    size = quantized_bytes(128, "bfloat16")
    for position in range(size):
        lying = LyingStore(MemoryStore(block_bytes=size, capacity_blocks=1))
        store = QuantizedStore(lying, "bfloat16", block_bytes=128)
        store.write([KEY], [None], [memoryview(bytes(range(128)))])
        lying.lies_about, lying.position = {KEY}, position
        assert store.read_into([KEY], [memoryview(bytearray(128))]) == [Read.CORRUPT]
        assert store.exists([KEY]) == [False]
        assert store.statistics().corrupt_blocks == 1


def test_a_frame_of_another_element_type_is_corrupt() -> None:
    inner, store = make(128, "bfloat16")
    store.write([KEY], [None], [memoryview(bytes(128))])
    other = QuantizedStore(inner, "float16", block_bytes=128)
    assert other.read_into([KEY], [memoryview(bytearray(128))]) == [Read.CORRUPT]


def test_a_frame_of_version_1_is_read() -> None:
    """Exponents -1 and 3; codes 0 to 63, and infinity, minus infinity, NaN, then 5s."""
    header = b"KVQ1" + bytes([3, 0, 0, 0]) + (512).to_bytes(4, "little")
    codes = bytes(range(64)) + bytes([127, 256 - 127, 128]) + b"\x05" * 61
    inner, store = make(512, "float32")
    frame = seal(header + bytes([255, 3]) + codes)
    inner.write([KEY], [None], [memoryview(frame)])
    buffer = memoryview(bytearray(512))
    assert store.read_into([KEY], [buffer]) == [Read.HIT]
    numbers = np.frombuffer(buffer, "<f4")
    assert numbers[:64].tolist() == [0.5 * number for number in range(64)]
    assert numbers[64:66].tolist() == [np.inf, -np.inf]
    assert np.isnan(numbers[66])
    assert numbers[67:].tolist() == [40.0] * 61
