"""The form of a value in a remote engine: nothing is believed that it does not prove."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.types import Read
from kvstrata.storage.remote.value import HEADER_BYTES, Proof, header_of, judge_header, judge_value
from kvstrata.testing.samples import key

VALUE = bytes(range(256)) * 4
STORED = header_of(key(1), key(0), memoryview(VALUE)) + VALUE
BUFFER_BYTES = 4096


def judge(stored: bytes, number: int = 1) -> Read:
    fate = judge_header(stored[:HEADER_BYTES], key(number), len(stored), BUFFER_BYTES)
    if fate is Read.HIT:
        fate = judge_value(stored[:HEADER_BYTES], memoryview(stored)[HEADER_BYTES:])
    return fate


def test_a_value_is_itself() -> None:
    assert judge(STORED) is Read.HIT


@given(st.integers(0, len(STORED) - 1), st.integers(1, 255))
def test_any_changed_byte_is_seen(position: int, change: int) -> None:
    changed = bytearray(STORED)
    changed[position] ^= change
    assert judge(bytes(changed)) is (Read.FOREIGN if position < 8 else Read.CORRUPT)


@given(st.integers(0, len(STORED) - 1))
def test_a_value_cut_short_is_ours_and_damaged(length: int) -> None:
    assert judge(STORED[:length]) is Read.CORRUPT


@given(st.binary(min_size=1, max_size=4000).filter(lambda data: data[:1] != b"K"))
def test_what_others_wrote_is_foreign(data: bytes) -> None:
    assert judge(data) is Read.FOREIGN


def test_the_value_of_another_key_is_damage() -> None:
    assert judge(STORED, number=2) is Read.CORRUPT


def test_more_than_the_value_is_damage() -> None:
    assert judge(STORED + b"x") is Read.CORRUPT


def test_no_value_at_all_is_damage() -> None:
    assert judge(header_of(key(1), None, memoryview(b""))) is Read.CORRUPT


def test_a_buffer_too_short_for_a_whole_value_is_a_bug() -> None:
    with pytest.raises(InvariantViolated, match="a buffer of 1023 bytes for a value of 1024"):
        judge_header(STORED[:HEADER_BYTES], key(1), len(STORED), 1023)


@given(st.integers(0, len(STORED) - 1), st.integers(0, 255), st.integers(1, 300))
def test_a_value_in_pieces_is_judged_as_the_whole(position: int, change: int, step: int) -> None:
    changed = bytearray(STORED)
    changed[position] ^= change
    header, value = changed[:HEADER_BYTES], memoryview(changed)[HEADER_BYTES:]
    proof = Proof(header)
    for start in range(0, len(value), step):
        proof.add(value[start : start + step])
    assert proof.verdict() is judge_value(header, value)
