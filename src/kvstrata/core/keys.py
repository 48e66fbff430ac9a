"""Block keys as arrays, and keys made from tokens."""

from collections.abc import Sequence
from functools import cache
from typing import Final, overload

import numpy as np
from blake3 import blake3
from numpy.typing import ArrayLike, NDArray

from kvstrata.core.types import BLOCK_KEY_BYTES, BlockKey, NamespaceId, StoreKey

KeyArray = NDArray[np.uint8]
"""Block keys, one a row: shape ``(n, BLOCK_KEY_BYTES)``, C-contiguous."""

Keys = Sequence[BlockKey] | KeyArray
"""Block keys in prompt order, as whoever asks has them."""

BlockIds = NDArray[np.int32]
"""Numbers under which a table knows blocks."""

ABSENT: Final = -1
"""Stands where a block has no number."""

Index = slice | NDArray[np.intp]
"""What an array is indexed by."""

_CONTEXT: Final = "kvstrata 2026-11 block keys of a namespace"


def as_key_array(keys: Sequence[BlockKey] | KeyArray) -> KeyArray:
    """*keys* as an array, copied only if need be; ``ValueError`` unless all are of full length."""
    if isinstance(keys, np.ndarray):
        if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != BLOCK_KEY_BYTES:
            raise ValueError(f"keys of type {keys.dtype} and shape {keys.shape}")
        return np.ascontiguousarray(keys)
    if not set(map(len, keys)) <= {BLOCK_KEY_BYTES}:
        raise ValueError(f"a block key has {BLOCK_KEY_BYTES} bytes")
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, BLOCK_KEY_BYTES)


def as_index(ids: BlockIds) -> Index:
    """*ids* in the form in which arrays take them fastest: a slice if they go up or down by one.

    What a slice picks is a view, and changes with the array.
    """
    if not len(ids):
        return ids.astype(np.intp)
    first, last = ids.item(0), ids.item(-1)
    step = 1 if last >= first else -1
    if abs(last - first) == len(ids) - 1:
        run = np.arange(first, last + step, step, dtype=np.int32)
        if ids.tobytes() == run.tobytes():  # memcmp: a third of the time of an elementwise ==
            return slice(first, last + step if last + step >= 0 else None, step)
    return ids.astype(np.intp)


def state_keys(keys: KeyArray, group: int) -> KeyArray:
    """The key of the state of recurrent group *group* at the end of each block of *keys*.

    Without the block's tokens it is as hard to meet as the block's own.
    """
    return keys ^ _state_mask(group)


@cache
def _state_mask(group: int) -> NDArray[np.uint8]:
    return np.frombuffer(blake3(b"kvstrata state of group %d" % group).digest(), np.uint8)


class StoreKeys(Sequence[StoreKey]):
    """The store keys of blocks of a namespace, each made when it is asked for."""

    def __init__(self, namespace: NamespaceId, keys: KeyArray) -> None:
        self._namespace = namespace
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, place: int) -> StoreKey: ...

    @overload
    def __getitem__(self, place: slice) -> "StoreKeys": ...

    def __getitem__(self, place: int | slice) -> "StoreKey | StoreKeys":
        if isinstance(place, slice):
            return StoreKeys(self._namespace, self._keys[place])
        key: StoreKey = self._namespace + self._keys[place].tobytes()
        return key


class BlockHasher:
    """Makes the keys of a prompt's blocks from its tokens, where no engine has made them.

    A key is the BLAKE3 of the key before it and the block's own tokens, under a secret made of
    the namespace: equal keys mean equal tokens from the start, in the same namespace.

    >>> hasher = BlockHasher(bytes(16), tokens_per_block=2)
    >>> keys = hasher.keys([1, 2, 3, 4, 5])
    >>> keys.shape
    (2, 32)
    >>> bool((hasher.keys([3, 4], after=keys[0].tobytes()) == keys[1:]).all())
    True
    """

    def __init__(self, namespace: NamespaceId, tokens_per_block: int) -> None:
        if tokens_per_block < 1:
            raise ValueError(f"{tokens_per_block} tokens per block")
        self.tokens_per_block = tokens_per_block
        self._secret = blake3(namespace, derive_key_context=_CONTEXT).digest()
        self._first = self.root()

    def root(self, salt: bytes = b"") -> BlockKey:
        """What a prompt's first block comes after; *salt* is all that sets its values apart.

        That is whatever changes keys and values besides the tokens, or keeps tenants apart: the
        adapter, images, the salt of a request. Pass it to ``keys`` as *after*.
        """
        return blake3(salt, key=self._secret).digest()

    def keys(self, tokens: Sequence[int] | ArrayLike, after: BlockKey | None = None) -> KeyArray:
        """One key for each whole block of *tokens*, which follow the block of key *after*."""
        numbers: NDArray[np.int64] = np.ascontiguousarray(tokens, "<i8")
        if numbers.ndim != 1:
            raise ValueError(f"tokens of shape {numbers.shape}")
        step = self.tokens_per_block * numbers.itemsize
        blocks = len(numbers) // self.tokens_per_block
        content = memoryview(numbers.tobytes())
        key = self._first if after is None else after
        chained = bytearray()
        for start in range(0, blocks * step, step):
            key = blake3(key, key=self._secret).update(content[start : start + step]).digest()
            chained += key
        return np.frombuffer(bytes(chained), np.uint8).reshape(-1, BLOCK_KEY_BYTES)
