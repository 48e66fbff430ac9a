"""Rows of keys: comparing them, counting them, sorting them by namespace."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.types import NAMESPACE_ID_BYTES, STORE_KEY_BYTES, NamespaceId, StoreKey

Words = NDArray[np.uint64]
"""Keys as four words each: shape ``(n, 4)``."""

_FOUR_TRUE: Final = np.uint32(0x01010101)


def rows_equal(left: Words, right: Words) -> NDArray[np.bool_]:
    """Row by row; both of four words, C-contiguous."""
    equal: NDArray[np.bool_] = (left == right).view(np.uint32).ravel() == _FOUR_TRUE
    return equal


def leading(flags: NDArray[np.bool_]) -> int:
    """How many of *flags* are set before the first that is not."""
    first = int(flags.argmin()) if len(flags) else 0
    return len(flags) if len(flags) and flags[first] else first


def counted(numbers: NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    """Each different number, and how often it is there."""
    if not len(numbers):
        return
    first = int(numbers[0])
    if (numbers == first).all():
        yield first, len(numbers)
        return
    yield from zip(*(part.tolist() for part in np.unique(numbers, return_counts=True)), strict=True)


def distinct(numbers: NDArray[np.int32]) -> tuple[list[int], NDArray[np.intp]]:
    """The different numbers, and which of them each one is."""
    if len(numbers) and (numbers == numbers[0]).all():
        return [int(numbers[0])], np.zeros(len(numbers), np.intp)
    different, which = np.unique(numbers, return_inverse=True)
    return different.tolist(), which


def store_key_rows(store_keys: Sequence[StoreKey] | NDArray[np.uint8]) -> NDArray[np.uint8]:
    if isinstance(store_keys, np.ndarray):
        if store_keys.dtype.itemsize == STORE_KEY_BYTES:
            store_keys = np.ascontiguousarray(store_keys).view(np.uint8)
        return store_keys.reshape(-1, STORE_KEY_BYTES)
    if not set(map(len, store_keys)) <= {STORE_KEY_BYTES}:
        raise ValueError(f"a store key has {STORE_KEY_BYTES} bytes")
    return np.frombuffer(b"".join(store_keys), np.uint8).reshape(-1, STORE_KEY_BYTES)


def by_namespace(
    rows: NDArray[np.uint8],
) -> Iterator[tuple[NamespaceId, NDArray[np.intp] | slice]]:
    """Each namespace of *rows*, and which rows are of it."""
    if not len(rows):
        return
    heads = np.ascontiguousarray(rows[:, :NAMESPACE_ID_BYTES]).view(np.uint64)
    if (heads == heads[0]).all():
        yield rows[0, :NAMESPACE_ID_BYTES].tobytes(), slice(None)
        return
    order = np.lexsort(heads.T)  # stable, and quick with runs of equals: np.unique is neither
    heads = heads[order]
    starts = np.flatnonzero((heads[1:] != heads[:-1]).any(axis=1)) + 1
    for which in np.split(order, starts):
        yield rows[which[0], :NAMESPACE_ID_BYTES].tobytes(), which
