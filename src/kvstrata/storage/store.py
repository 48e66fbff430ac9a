"""The contract of a place that holds blocks by key."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from kvstrata.core.errors import FaultCause
from kvstrata.core.types import NamespaceId, Read, StoreKey, Write

MOST_CALLS: Final = 16
"""Of a server to one store at a time: searches, reads and writes."""


class StoreStatistics(NamedTuple):
    """A snapshot of one store."""

    blocks: int
    capacity_blocks: int  # 0: no bound of its own
    block_bytes: int
    corrupt_blocks: int  # found damaged and dropped since the store was opened
    variable: bool = False  # holds values of 1 to block_bytes bytes; else of block_bytes only
    search_width: int = 64  # keys of one ``exists`` that take hardly longer than one key
    # In calls that did not fail otherwise, since the store was opened:
    failed_blocks: Mapping[FaultCause, int] = MappingProxyType({})


class Store(Protocol):
    """A flat map from ``StoreKey`` to exactly ``block_bytes`` bytes, or to fewer if *variable*.

    * Methods block the calling thread and may be called from several threads at once.
    * Batches are not transactions: each block succeeds or fails alone. A key may be in a batch
      twice, and a batch may be empty.
    * A missing block is a value (``Read.MISS``); an unreachable store raises ``TierUnavailable``
      and leaves the buffers undefined. What the call was to do may be done in part. One that can
      be reached, but not for some blocks, may report those as ``FAILED`` instead,
      and to ``exists`` as ``None``.
    * Buffers belong to the caller, are bytes in one piece, and nothing of them is kept after the
      call. A key or a buffer of a wrong length is a bug of the caller: ``InvariantViolated``.

    ``kvstrata.testing.StoreConformance`` checks all of this for any store.
    """

    def exists(self, keys: Sequence[StoreKey]) -> Sequence[bool | None]:
        """Whether each key would be found; None where nobody can tell now.

        May be wrong by the time of the read.
        """
        ...

    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        """Copy block ``keys[i]`` into ``buffers[i]``, each exactly ``block_bytes`` long.

        A *variable* store takes buffers of 1 to ``block_bytes`` bytes, fills the first bytes and
        leaves the rest undefined: the caller knows the length from the value itself. A buffer
        shorter than its value raises ``InvariantViolated``.

        Returns one ``Read`` per key, in order. Buffers whose block is not ``HIT`` hold garbage.
        """
        ...

    def write(
        self,
        keys: Sequence[StoreKey],
        parents: Sequence[StoreKey | None],
        buffers: Sequence[memoryview],
    ) -> list[Write]:
        """Store ``buffers[i]`` under ``keys[i]``; ``parents[i]`` is kept with it.

        Buffers are ``block_bytes`` long; a *variable* store takes 1 to ``block_bytes`` bytes and
        keeps the length. A key that is there already keeps its value (``EXISTS``).
        A block that is reported ``STORED`` is found by every later call, also after a restart
        if the store is persistent.
        """
        ...

    def remove(self, keys: Sequence[StoreKey]) -> list[bool]:
        """Forget the keys; whether each was there. Its room can be used again."""
        ...

    def drop_namespace(self, namespace_id: NamespaceId) -> int:
        """Forget every block of *namespace_id*, durably; how many there were.

        Blocks of it that are being written meanwhile are forgotten too, or come after.
        """
        ...

    def statistics(self) -> StoreStatistics: ...

    def close(self) -> None:
        """Release every resource. Later calls raise ``TierUnavailable``. Idempotent."""
        ...
