"""Many checksums at once say what each says alone."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.storage.crc import all_right


def record(rest: bytes) -> bytes:
    return zlib.crc32(rest).to_bytes(4, "little") + rest


@pytest.mark.parametrize("rest_bytes", [4, 28, 124])
@given(contents=st.lists(st.binary(min_size=124, max_size=124), max_size=9))
def test_right_records_are_right(rest_bytes: int, contents: list[bytes]) -> None:
    data = b"".join(record(content[:rest_bytes]) for content in contents)
    assert all_right(memoryview(data), rest_bytes + 4)


@given(
    contents=st.lists(st.binary(min_size=12, max_size=12), min_size=1, max_size=9),
    damage=st.lists(st.tuples(st.integers(0), st.integers(1, 255)), min_size=1, max_size=6),
)
def test_damage_of_any_bytes_shows(contents: list[bytes], damage: list[tuple[int, int]]) -> None:
    right = b"".join(map(record, contents))
    data = bytearray(right)
    for position, change in damage:
        data[position % len(data)] ^= change
    each = all(
        zlib.crc32(data[start + 4 : start + 16]).to_bytes(4, "little") == data[start : start + 4]
        for start in range(0, len(data), 16)
    )
    assert all_right(memoryview(data), 16) == each


def test_records_in_another_order_are_as_right() -> None:
    """Where a record belongs is for its sequence number to say."""
    one, two = record(b"a" * 12), record(b"b" * 12)
    assert all_right(memoryview(one + two), 16)
    assert all_right(memoryview(two + one), 16)
