"""Fingerprints beside sums over Python's integers."""

from collections.abc import Callable

import numpy as np
import pytest

from kvstrata.blend.fingerprints import PIECE_WINDOWS, Fingerprints, Tokens, tokens_of

SECRET = bytes(range(24))


def tokens(count: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)


def by_hand(window: Tokens, seed: np.uint32) -> int:
    base, factor = (int.from_bytes(SECRET[at : at + 8], "little") | 1 for at in (0, 8))
    numbers: list[int] = window.tolist()
    terms = ((token ^ int(seed)) * base**power for power, token in enumerate(numbers))
    value: int = factor * sum(terms) % (1 << 64)
    return value


def test_lists_of_ids_become_arrays_of_the_same_tokens() -> None:
    found = tokens_of([0, 7, (1 << 32) - 1])
    assert found.dtype == np.uint32
    assert found.tolist() == [0, 7, 4294967295]
    assert tokens_of([]).tolist() == []
    for wrong in (-1, 1 << 32):
        with pytest.raises(OverflowError):
            tokens_of([7, wrong])


@pytest.mark.parametrize("width", [1, 5, 64])
def test_a_fingerprint_is_that_sum_at_every_offset(width: int) -> None:
    fingerprints = Fingerprints(width, SECRET)
    some, seed = tokens(150), fingerprints.seed(b"tenant")
    found = fingerprints.rolling(some, seed).tolist()
    assert found == [by_hand(some[at : at + width], seed) for at in range(150 - width + 1)]
    assert fingerprints.grid(some, seed).tolist() == found[::width]


def test_the_longest_piece_has_the_same_fingerprints_at_its_end() -> None:
    fingerprints = Fingerprints(64)
    some, seed = tokens(PIECE_WINDOWS + 63), fingerprints.seed(b"")
    found = fingerprints.rolling(some, seed)
    assert len(found) == PIECE_WINDOWS
    assert found[::64].tolist() == fingerprints.grid(some, seed).tolist()


def test_what_was_given_out_stays_as_it_is() -> None:
    fingerprints = Fingerprints(4)
    seed = fingerprints.seed(b"")
    first = fingerprints.rolling(tokens(20), seed)
    before = first.copy()
    fingerprints.rolling(tokens(20, seed=1), seed)
    assert (first == before).all()


def test_other_domains_and_other_secrets_have_other_fingerprints() -> None:
    fingerprints, others = Fingerprints(64), Fingerprints(64)
    some = tokens(64)
    prints = {
        fingerprints.grid(some, fingerprints.seed(b"")).item(),
        fingerprints.grid(some, fingerprints.seed(b"tenant")).item(),
        others.grid(some, others.seed(b"")).item(),
    }
    assert len(prints) == 3
    same = Fingerprints(64, SECRET), Fingerprints(64, SECRET)
    assert len({f.grid(some, f.seed(b"t")).item() for f in same}) == 1


@pytest.mark.parametrize("kind", ["small", "repeated", "ascending", "powers of two"])
def test_high_bits_tell_windows_apart_whatever_the_tokens(kind: str) -> None:
    count = 1 << 10
    made: dict[str, Callable[[], Tokens]] = {
        "small": lambda: tokens(count * 64) % 2,
        "repeated": lambda: np.repeat(np.arange(count, dtype=np.uint32), 64),
        "ascending": lambda: np.arange(count * 64, dtype=np.uint32),
        "powers of two": lambda: np.uint32(1) << (tokens(count * 64) % 32),
    }
    rows, pairs = made[kind](), 0
    for number in range(20):
        fingerprints = Fingerprints(64, np.random.default_rng(number).bytes(24))
        prints = fingerprints.grid(rows, fingerprints.seed(b""))
        shared = np.bincount((prints >> np.uint64(64 - 10)).astype(np.intp))
        pairs += int((shared * (shared - 1) // 2).sum())
    at_random = count * (count - 1) / 2 / count
    assert pairs / 20 < 2 * at_random  # what multiply-shift promises


def test_windows_of_no_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="windows of 0 tokens"):
        Fingerprints(0)


def test_there_are_no_windows_in_less_than_one() -> None:
    fingerprints = Fingerprints(64)
    assert len(fingerprints.grid(tokens(63), fingerprints.seed(b""))) == 0
