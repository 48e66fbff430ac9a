"""Fingerprints of windows of tokens: of every window of a prompt, or of a grid."""

import os
from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

__all__ = ["PIECE_WINDOWS", "Fingerprints", "Prints", "Tokens", "tokens_of"]

Tokens = NDArray[np.uint32]
"""Token ids, one after the other."""

Prints = NDArray[np.uint64]
"""Fingerprints, whose high bits are the good ones."""

PIECE_WINDOWS: Final = (
    16_000  # in one call of ``rolling``: arrays that malloc has at hand (< 128 KiB)
)

_WORD: Final = 1 << 64


def tokens_of(ids: Sequence[int]) -> Tokens:
    """Return a copy of *ids*, faster than ``np.array`` copies a list.

    Raises:
        OverflowError: one is negative, or does not fit in 32 bits.
    """
    return np.frombuffer(array("I", ids), np.uint32)


class Fingerprints:
    """64-bit fingerprints of windows of *window_tokens* tokens. Not thread-safe.

    Of tokens ``t`` it is ``m * sum((t[j] ^ seed) * b**j)`` modulo 2**64, with ``b`` and ``m`` odd
    and secret: the rolling hash of Karp and Rabin (IBM J. Res. Dev. 31, 1987), whose sums for all
    windows are differences of one prefix sum, times powers of the inverse of ``b``. The factor
    ``m`` makes the high bits depend on all others (multiply-shift: Dietzfelbinger et al., J.
    Algorithms 25, 1997). The low bits are weak, and windows can be made whose fingerprints are
    equal whatever ``b`` is: equal fingerprints prove nothing.

    Args:
        window_tokens: Length of a window.
        secret: 24 bytes, by default random ones. The same secret gives the same fingerprints.
    """

    def __init__(self, window_tokens: int, secret: bytes | None = None) -> None:
        if window_tokens < 1:
            raise ValueError(f"windows of {window_tokens} tokens")
        words = np.frombuffer(os.urandom(24) if secret is None else secret, "<u8")
        base, factor = (int(word) | 1 for word in words[:2])
        self.window_tokens = window_tokens
        self._key = int(words[2])
        self._powers = _powers(1, base, PIECE_WINDOWS + window_tokens - 1)
        self._inverses = _powers(factor, pow(base, -1, _WORD), PIECE_WINDOWS)
        self._weights = _powers(factor, base, window_tokens)
        self._sums = np.zeros(len(self._powers) + 1, np.uint64)

    def seed(self, domain: bytes) -> np.uint32:
        """What sets the fingerprints of *domain* apart from those of others."""
        return np.uint32(xxh3_64_intdigest(domain, self._key) >> 32)

    def rolling(self, tokens: Tokens, seed: np.uint32) -> Prints:
        """Of the windows at every offset of *tokens*, ``PIECE_WINDOWS`` of them at most.

        Returns:
            Shape ``(len(tokens) - window_tokens + 1,)``.
        """
        windows = len(tokens) - self.window_tokens + 1
        sums = self._sums[: len(tokens) + 1]
        terms = (tokens ^ seed).astype(np.uint64)
        terms *= self._powers[: len(tokens)]
        np.cumsum(terms, out=sums[1:])
        prints: Prints = sums[self.window_tokens :] - sums[:windows]
        prints *= self._inverses[:windows]
        return prints

    def grid(self, tokens: Tokens, seed: np.uint32) -> Prints:
        """Of the windows that stand side by side from the first of *tokens* on.

        Returns:
            Shape ``(len(tokens) // window_tokens,)``.
        """
        windows = len(tokens) // self.window_tokens
        rows = tokens[: windows * self.window_tokens].reshape(windows, self.window_tokens)
        prints: Prints = ((rows ^ seed) * self._weights).sum(axis=1, dtype=np.uint64)
        return prints


def _powers(first: int, base: int, count: int) -> Prints:
    """``first * base**i`` modulo 2**64, for *count* numbers from 0 on."""
    factors = np.full(count, base, np.uint64)
    factors[:1] = first
    powers: Prints = np.cumprod(factors)
    return powers
