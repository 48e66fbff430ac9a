"""Keys, values and dirty buffers for tests of stores."""

import random
from collections.abc import Callable
from typing import Final

from kvstrata.core.types import BLOCK_KEY_BYTES, NAMESPACE_ID_BYTES, NamespaceId, Read, StoreKey
from kvstrata.storage.store import Store

ONE: Final[NamespaceId] = b"1" * NAMESPACE_ID_BYTES
OTHER: Final[NamespaceId] = b"2" * NAMESPACE_ID_BYTES

MakeValue = Callable[[int, int], bytes]
"""Value number n of a length: the same for the same arguments, others for another n."""


def key(number: int, namespace: NamespaceId = ONE) -> StoreKey:
    return namespace + number.to_bytes(BLOCK_KEY_BYTES, "big")


def random_value(number: int, length: int) -> bytes:
    return random.Random(number).randbytes(length)


def dirty(length: int) -> memoryview:
    """A buffer that holds no zeros: what a store does not fill shows."""
    return memoryview(bytearray(b"\xee" * length))


def fetch(store: Store, wanted: StoreKey) -> bytes | Read:
    """The whole buffer that a hit has filled, or the fate of what is no hit."""
    buffer = dirty(store.statistics().block_bytes)
    (fate,) = store.read_into([wanted], [buffer])
    return bytes(buffer) if fate is Read.HIT else fate
