"""Identities of blocks: 64 bits each while a trace is read, keys of the index when it is replayed.

Among *n* different blocks of a trace two have the same identity with a probability of n² / 2⁶⁵:
one in 370,000 for ten million. That is good enough to count hits, and never to serve bytes.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.types import BLOCK_KEY_BYTES

__all__ = ["Identities", "chain", "identities_of_keys", "keys_of_identities"]

Identities = NDArray[np.uint64]

_STEP: Final = np.uint64(0x9E3779B97F4A7C15)  # odd: consecutive multiples never repeat
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
_WORDS: Final = BLOCK_KEY_BYTES // 8
_LANES: Final = np.arange(1, _WORDS, dtype=np.uint64) * _STEP


def chain(ids: Identities) -> Identities:
    """The identity of each block of a prompt: of the id that a trace gives it and of all before.

    So it does not matter whether the ids of a trace are chained themselves.
    """
    places = np.arange(1, len(ids) + 1, dtype=np.uint64) * _STEP
    return _mix(np.cumsum(_mix(ids + places)))


def identities_of_keys(namespace: bytes, keys: bytes) -> Identities:
    """The identities of *keys*, which lie side by side; equal ones of two namespaces differ."""
    identities = chain(np.frombuffer(namespace, np.uint64))[-1:]
    for word in np.frombuffer(keys, np.uint64).reshape(-1, _WORDS).T:
        identities = _mix(identities ^ word)
    return identities


def keys_of_identities(identities: Identities) -> NDArray[np.uint8]:
    """A key for each identity, of shape (n, 32); equal exactly where identities are."""
    words = np.empty((len(identities), _WORDS), np.uint64)
    words[:, 0] = identities
    words[:, 1:] = _mix(identities[:, np.newaxis] + _LANES)
    return words.view(np.uint8)


def _mix(words: Identities) -> Identities:
    """A permutation of 64-bit words after which close ones are far apart (SplitMix64's last step)."""
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))
