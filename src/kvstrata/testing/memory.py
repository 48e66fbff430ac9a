"""The reference: a store that is a dict."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.core.errors import InvariantViolated, TierUnavailable
from kvstrata.core.types import NamespaceId, Read, StoreKey, Write
from kvstrata.storage.batch import check_keys, check_lengths
from kvstrata.storage.checksum import digest
from kvstrata.storage.store import StoreStatistics


@dataclass(slots=True)
class Value:
    """What a ``MemoryStore`` keeps for a key."""

    content: bytes
    digest: bytes
    parent: StoreKey | None


class MemoryStore:
    """A correct ``Store`` in a dict, with a checksum for each block.

    *values* is the dict: a store that is opened with the dict of a closed one holds its blocks.
    """

    def __init__(
        self,
        *,
        block_bytes: int,
        capacity_blocks: int,
        variable: bool = False,
        values: dict[StoreKey, Value] | None = None,
    ) -> None:
        self.values = {} if values is None else values
        self._block_bytes = block_bytes
        self._capacity_blocks = capacity_blocks
        self._variable = variable
        self._lock = threading.Lock()  # guards everything below and the dict
        self._corrupt_blocks = 0
        self._closed = False

    def damage(self, key: StoreKey) -> None:
        """Flip one bit of the block of *key*, as a broken memory would."""
        with self._lock:
            value = self.values[key]
            value.content = bytes([value.content[0] ^ 0x10]) + value.content[1:]

    def exists(self, keys: Sequence[StoreKey]) -> list[bool]:
        check_keys(keys)
        with self._lock:
            self._check_open()
            return [key in self.values for key in keys]

    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        check_keys(keys)
        check_lengths(buffers, self._block_bytes, variable=self._variable)
        with self._lock:
            self._check_open()
            return [self._read_one(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def write(
        self,
        keys: Sequence[StoreKey],
        parents: Sequence[StoreKey | None],
        buffers: Sequence[memoryview],
    ) -> list[Write]:
        check_keys(keys)
        check_keys(parents)
        check_lengths(buffers, self._block_bytes, variable=self._variable)
        with self._lock:
            self._check_open()
            return [
                self._write_one(key, parent, buffer)
                for key, parent, buffer in zip(keys, parents, buffers, strict=True)
            ]

    def remove(self, keys: Sequence[StoreKey]) -> list[bool]:
        check_keys(keys)
        with self._lock:
            self._check_open()
            return [self.values.pop(key, None) is not None for key in keys]

    def statistics(self) -> StoreStatistics:
        with self._lock:
            self._check_open()
            return StoreStatistics(
                len(self.values),
                self._capacity_blocks,
                self._block_bytes,
                self._corrupt_blocks,
                self._variable,
            )

    def drop_namespace(self, namespace_id: NamespaceId) -> int:
        """Forget every block of *namespace_id*; how many there were."""
        with self._lock:
            self._check_open()
            dropped = [key for key in self.values if key.startswith(namespace_id)]
            for key in dropped:
                del self.values[key]
            return len(dropped)

    def close(self) -> None:
        with self._lock:
            self._closed = True

    def _read_one(self, key: StoreKey, buffer: memoryview) -> Read:
        value = self.values.get(key)
        if value is None:
            return Read.MISS
        if digest(value.content) != value.digest:
            del self.values[key]
            self._corrupt_blocks += 1
            return Read.CORRUPT
        if len(value.content) > buffer.nbytes:
            raise InvariantViolated(
                f"a buffer of {buffer.nbytes} bytes for a value of {len(value.content)}"
            )
        buffer[: len(value.content)] = value.content
        return Read.HIT

    def _write_one(self, key: StoreKey, parent: StoreKey | None, buffer: memoryview) -> Write:
        if key in self.values:
            return Write.EXISTS
        if len(self.values) == self._capacity_blocks:
            return Write.FULL
        self.values[key] = Value(bytes(buffer), digest(buffer), parent)
        return Write.STORED

    def _check_open(self) -> None:
        if self._closed:
            raise TierUnavailable("the memory store is closed")
