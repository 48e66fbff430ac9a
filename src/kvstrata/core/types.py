"""The words that every layer shares."""

import enum
from typing import Final

BlockKey = bytes
"""Identity of a block's content in context, ``BLOCK_KEY_BYTES`` long."""

NamespaceId = bytes
"""Fingerprint of what makes bytes comparable, ``NAMESPACE_ID_BYTES`` long."""

StoreKey = bytes
"""``NamespaceId + BlockKey``: what the index and every store know a block by."""

BLOCK_KEY_BYTES: Final = 32
NAMESPACE_ID_BYTES: Final = 16
STORE_KEY_BYTES: Final = NAMESPACE_ID_BYTES + BLOCK_KEY_BYTES


BlockFormat = str
"""How tiers below host memory keep a block: ``EXACT``, or ``int8`` and an element type."""

EXACT: Final[BlockFormat] = "exact"


class Read(enum.Enum):
    """Fate of one block in a batched read."""

    HIT = "hit"
    MISS = "miss"
    CORRUPT = "corrupt"  # the stored bytes failed a check; the store has dropped them
    FOREIGN = "foreign"  # something that no store of ours wrote has its name, and keeps it
    FAILED = "failed"  # it could not be read, and may be there; others of its batch could


class Write(enum.Enum):
    """Fate of one block in a batched write."""

    STORED = "stored"
    EXISTS = "exists"  # the key was there already; nothing was written
    FULL = "full"  # no room; the caller evicts and tries again, or gives up
    FAILED = "failed"  # it could not be written; others of its batch could
