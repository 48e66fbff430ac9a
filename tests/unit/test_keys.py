"""Keys as arrays, and keys from tokens."""

import numpy as np
import pytest

from kvstrata.core.keys import BlockHasher, StoreKeys, as_index, as_key_array

SPACE, OTHER = b"s" * 16, b"o" * 16


def test_keys_become_rows() -> None:
    keys = [bytes([n] * 32) for n in range(3)]
    array = as_key_array(keys)
    assert array.shape == (3, 32)
    assert [row.tobytes() for row in array] == keys
    assert as_key_array(array) is array
    assert as_key_array([]).shape == (0, 32)


def test_rows_that_do_not_lie_side_by_side_are_copied() -> None:
    wide = np.arange(3 * 48, dtype=np.uint8).reshape(3, 48)
    keys = as_key_array(wide[:, 16:])
    assert keys.flags.c_contiguous
    assert keys.tolist() == wide[:, 16:].tolist()


def test_store_keys_are_those_of_the_blocks_of_a_namespace() -> None:
    keys = [bytes([n] * 32) for n in range(4)]
    stored = StoreKeys(SPACE, as_key_array(keys))
    assert list(stored) == [SPACE + key for key in keys]
    assert (len(stored), stored[-1]) == (4, SPACE + keys[3])
    assert list(stored[1:3]) == [SPACE + key for key in keys[1:3]]


def test_what_is_not_a_list_of_keys() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        as_key_array([b"a" * 31, b"b" * 33])
    with pytest.raises(ValueError, match="shape"):
        as_key_array(np.zeros((2, 31), np.uint8))
    with pytest.raises(ValueError, match="int64"):
        as_key_array(np.zeros((2, 32), np.int64))


@pytest.mark.parametrize(
    ("ids", "is_slice"),
    [
        ([], False),
        ([5], True),
        ([0], True),
        ([0, 1, 2], True),
        ([7, 8, 9], True),
        ([9, 8, 7], True),
        ([2, 1, 0], True),
        ([1, 0], True),
        ([0, 2, 1, 3], False),
        ([3, 1, 2, 0], False),
        ([4, 4], False),
        ([1, 3], False),
    ],
)
def test_an_index_picks_what_the_ids_name(ids: list[int], is_slice: bool) -> None:
    numbers = np.arange(10, 20)
    index = as_index(np.array(ids, np.int32))
    assert isinstance(index, slice) == is_slice
    assert numbers[index].tolist() == [10 + block_id for block_id in ids]


def test_a_key_stands_for_everything_up_to_its_end() -> None:
    hasher = BlockHasher(SPACE, 4)
    keys = hasher.keys(range(12))
    assert keys.shape == (3, 32)
    assert hasher.keys(range(15)).tolist() == keys.tolist()
    changed = hasher.keys([0, 1, 2, 3, 99, 5, 6, 7, 8, 9, 10, 11])
    assert (changed == keys).all(axis=1).tolist() == [True, False, False]
    assert hasher.keys([1, 2]).shape == (0, 32)


def test_keys_go_on_after_a_block() -> None:
    hasher = BlockHasher(SPACE, 4)
    keys = hasher.keys(np.arange(12, dtype=np.int32))
    rest = hasher.keys([4, 5, 6, 7, 8, 9, 10, 11], after=keys[0].tobytes())
    assert rest.tolist() == keys[1:].tolist()


def test_namespaces_and_salts_have_keys_of_their_own() -> None:
    hasher = BlockHasher(SPACE, 4)
    plain = hasher.keys(range(8))
    salted = hasher.keys(range(8), after=hasher.root(b"tenant"))
    assert not (plain == salted).all(axis=1).any()
    assert hasher.keys(range(8), after=hasher.root()).tolist() == plain.tolist()
    assert not (plain == BlockHasher(OTHER, 4).keys(range(8))).all(axis=1).any()


def test_keys_are_the_same_everywhere_and_for_ever() -> None:
    first = BlockHasher(bytes(16), 2).keys([1, 2])[0].tobytes().hex()
    assert first == "9f765e5fd6da86c517e088303cfff2b39d749f56933a3176210a1f22757c57eb"


def test_impossible_arguments() -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        BlockHasher(SPACE, 0)
    with pytest.raises(ValueError, match="shape"):
        BlockHasher(SPACE, 4).keys([[1, 2], [3, 4]])
