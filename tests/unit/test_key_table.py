"""Key tables of a size at which chains, runs and pieces matter; states are tested by a machine."""

import numpy as np
import pytest

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.key_table import KeyTable
from kvstrata.core.keys import ABSENT, KeyArray

SPACE, OTHER = b"s" * 16, b"o" * 16


def random_keys(count: int, seed: int = 0) -> KeyArray:
    return np.random.default_rng(seed).integers(0, 256, (count, 32), dtype=np.uint8)


def test_ids_are_handed_out_in_runs() -> None:
    table = KeyTable(100)
    keys = random_keys(60)
    assert table.add(SPACE, keys[:20]).tolist() == list(range(20))
    assert table.add(SPACE, keys[20:30]).tolist() == list(range(20, 30))
    # A prompt gives its blocks up from its end.
    table.remove(np.arange(9, 4, -1, dtype=np.int32))
    assert table.add(SPACE, keys[30:36]).tolist() == [5, 6, 7, 8, 9, 30]
    table.remove(np.arange(5, 10, dtype=np.int32))
    assert table.add(SPACE, keys[36:40]).tolist() == [5, 6, 7, 8]


def test_a_full_table_takes_the_leading_keys() -> None:
    table = KeyTable(5)
    keys = random_keys(9)
    assert len(table.add(SPACE, keys[:3])) == 3
    ids, new = table.find_or_add(SPACE, keys[2:])
    assert ids.tolist() == [2, 3, 4]
    assert new.tolist() == [False, True, True]
    assert len(table.add(SPACE, keys[7:])) == 0
    assert table.namespace_number(OTHER) == ABSENT
    assert len(table.add(OTHER, keys[7:])) == 0
    assert table.namespace_number(OTHER) == ABSENT
    table.check()


@pytest.mark.parametrize("capacity", [0, 1])
def test_tables_of_next_to_nothing(capacity: int) -> None:
    table = KeyTable(capacity)
    keys = random_keys(2)
    assert len(table.find(SPACE, keys)) == 2
    assert len(table.add(SPACE, keys)) == capacity
    assert (table.find(SPACE, keys) != ABSENT).sum() == capacity
    assert len(table.longest_prefix(SPACE, keys)) == capacity
    table.check()


def test_the_same_key_in_two_namespaces_is_two_blocks() -> None:
    table = KeyTable(10)
    keys = random_keys(3)
    ids, others = table.add(SPACE, keys), table.add(OTHER, keys)
    assert not set(ids.tolist()) & set(others.tolist())
    table.remove(ids)
    assert (table.find(SPACE, keys) == ABSENT).all()
    assert table.find(OTHER, keys).tolist() == others.tolist()


def test_a_key_that_differs_in_one_bit_is_not_found() -> None:
    table = KeyTable(300)
    key = random_keys(1)
    table.add(SPACE, key)
    flipped = np.repeat(key, 256, axis=0)
    for bit in range(256):
        flipped[bit, bit // 8] ^= 1 << bit % 8
    assert (table.find(SPACE, flipped) == ABSENT).all()


@pytest.mark.parametrize("broken_at", [0, 1, 2, 700, 1023, 1024, 1025, 4999])
def test_the_longest_prefix_ends_where_a_key_is_absent(broken_at: int) -> None:
    table = KeyTable(20_000)
    keys = random_keys(5000)
    table.add(OTHER, random_keys(100, seed=1))
    ids = table.add(SPACE, keys)
    table.remove(ids[broken_at : broken_at + 1])
    assert table.longest_prefix(SPACE, keys).tolist() == ids[:broken_at].tolist()


@pytest.mark.parametrize("run", [1, 3, 75, 600, 1125, 3000, 9000])
def test_prefixes_whose_ids_come_in_runs(run: int) -> None:
    table = KeyTable(20_000)
    keys = random_keys(9000)
    order = np.arange(9000).reshape(-1, run)
    shuffled = np.random.default_rng(0).permutation(order).ravel()
    ids = np.empty(9000, np.int32)
    ids[shuffled] = table.add(SPACE, keys[shuffled])
    assert table.longest_prefix(SPACE, keys).tolist() == ids.tolist()
    table.remove(ids[8500:8501])
    assert table.longest_prefix(SPACE, keys).tolist() == ids[:8500].tolist()


def test_a_run_does_not_cross_into_another_namespace() -> None:
    table = KeyTable(10)
    keys = random_keys(4)
    first = table.add(SPACE, keys[:2])
    table.add(OTHER, keys[2:])
    assert table.longest_prefix(SPACE, keys).tolist() == first.tolist()


def test_a_run_does_not_go_on_with_what_was_removed() -> None:
    table = KeyTable(10)
    keys = random_keys(4)
    ids = table.add(SPACE, keys)
    table.remove(ids[2:])
    assert table.longest_prefix(SPACE, keys).tolist() == ids[:2].tolist()


def test_churn_beyond_the_capacity() -> None:
    table = KeyTable(3000)
    expected: dict[bytes, int] = {}
    rng = np.random.default_rng(0)
    for turn in range(30):
        keys = random_keys(500, seed=turn)
        if len(table) + 500 > table.capacity:
            gone = rng.permutation(np.fromiter(expected.values(), np.int32))[:700]
            table.remove(gone)
            expected = {k: i for k, i in expected.items() if i not in set(gone.tolist())}
        ids = table.add(SPACE, keys).tolist()
        expected |= {key.tobytes(): block_id for key, block_id in zip(keys, ids, strict=True)}
        table.check()
    keys = np.frombuffer(b"".join(expected), np.uint8).reshape(-1, 32)
    assert table.find(SPACE, keys).tolist() == list(expected.values())


def test_a_bulk_load_of_many_namespaces() -> None:
    table = KeyTable(5000)
    rows = np.random.default_rng(0).integers(0, 256, (4000, 48), dtype=np.uint8)
    rows[:, :16] = np.arange(4000)[:, None] % 7
    ids = table.add_mixed(rows)
    assert sorted(ids.tolist()) == list(range(4000))
    assert table.store_key_array(ids).tobytes() == rows.tobytes()
    assert table.find_mixed(rows).tolist() == ids.tolist()
    assert table.find_mixed(rows.view("V48")[:5]).tolist() == ids[:5].tolist()
    assert [table.count(number) for number in range(7)] == [572] * 3 + [571] * 4
    table.check()


def test_ids_are_iterated_in_pieces_while_the_table_changes() -> None:
    table = KeyTable(200_000)
    ids = table.add(SPACE, random_keys(150_000))
    pieces = table.ids(SPACE)
    first = next(pieces)
    assert len(first) < 100_000
    table.remove(ids[len(first) :])
    assert list(pieces) == []


def test_keys_of_wrong_length_are_refused() -> None:
    table = KeyTable(10)
    with pytest.raises(ValueError, match="16 bytes"):
        table.add(b"short", random_keys(1))
    with pytest.raises(ValueError, match="48 bytes"):
        table.find_mixed([b"short"])
    table.check()


def test_keys_of_ids_that_are_not_in_use() -> None:
    table = KeyTable(10)
    ids = table.add(SPACE, random_keys(2))
    table.remove(ids[1:])
    with pytest.raises(InvariantViolated, match="not in use"):
        table.store_keys(ids)


def test_unaligned_keys() -> None:
    table = KeyTable(10)
    buffer = bytearray(1 + 3 * 32)
    keys = np.frombuffer(buffer, np.uint8, offset=1).reshape(3, 32)
    keys[:] = random_keys(3)
    ids = table.add(SPACE, keys)
    assert table.longest_prefix(SPACE, random_keys(3)).tolist() == ids.tolist()
