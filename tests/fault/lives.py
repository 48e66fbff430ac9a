"""A scripted life of a disk store, and a diary of what must, may and must not be there after it."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random

from kvstrata.core.types import NAMESPACE_ID_BYTES, NamespaceId, Read, StoreKey, Write
from kvstrata.storage.disk import DiskStore
from kvstrata.storage.disk_system import FileSystem

BLOCK_BYTES = 4096 + 512
SLOT_BYTES = 3 * 4096
SLOTS = 12
NAMESPACES: tuple[NamespaceId, ...] = (b"a" * 16, b"b" * 16)
KEYS: list[StoreKey] = [name + bytes([n]) * 32 for name in NAMESPACES for n in range(9)]


def make(
    paths: Sequence[Path],
    system: FileSystem | None = None,
    *,
    slots: int = SLOTS,
    discard: bool = False,
) -> DiskStore:
    return DiskStore(
        paths,
        block_bytes=BLOCK_BYTES,
        capacity_bytes=slots * SLOT_BYTES,
        max_blocks_per_file=4,
        discard=discard,
        lock_timeout_seconds=0,
        system=system,
    )


class Life:
    """Uses a store, and knows which content of each key is right after a crash.

    Every block written has a content of its own, so that an older one of the same key shows.
    """

    def __init__(self, seed: int) -> None:
        self._choose = Random(seed)
        self._written = 0
        self.possible: dict[StoreKey, set[bytes]] = defaultdict(set)  # may be served
        self.stored: dict[StoreKey, bytes] = {}  # served unless the power fails
        self.durable: dict[StoreKey, bytes] = {}  # served even then

    def write(self, store: DiskStore, count: int) -> None:
        keys = self._choose.sample(KEYS, count)
        contents = [self._content(key) for key in keys]
        for key, content in zip(keys, contents, strict=True):
            self.possible[key].add(content)
        fates = store.write(keys, [None] * count, [memoryview(content) for content in contents])
        for key, content, fate in zip(keys, contents, fates, strict=True):
            if fate is Write.STORED:
                self.stored[key] = content

    def remove(self, store: DiskStore, count: int) -> None:
        keys = self._choose.sample(KEYS, count)
        for key in keys:
            self.stored.pop(key, None)
            self.durable.pop(key, None)
        store.remove(keys)

    def drop(self, store: DiskStore) -> None:
        """Drop a namespace; when that returns, the whole journal is durable."""
        namespace = self._choose.choice(NAMESPACES)
        for blocks in (self.stored, self.durable):
            for key in [key for key in blocks if key[:NAMESPACE_ID_BYTES] == namespace]:
                del blocks[key]
        store.drop_namespace(namespace)
        for key in [key for key in self.possible if key[:NAMESPACE_ID_BYTES] == namespace]:
            del self.possible[key]
        self.durable = dict(self.stored)

    def run(self, store: DiskStore, steps: int) -> None:
        """Some of everything, and the end of the store; nothing wrong is served meanwhile."""
        for step in range(steps):
            self.write(store, 1 + step % 4)
            assert self.wrong(read(store)) == 0
            if step % 2:
                self.remove(store, 3)
            if step % 3 == 2:
                self.drop(store)
        store.close()
        self.durable = dict(self.stored)

    def wrong(self, found: dict[StoreKey, bytes]) -> int:
        """How many blocks of *found* have a content that was never theirs, or was dropped."""
        return sum(content not in self.possible[key] for key, content in found.items())

    def _content(self, key: StoreKey) -> bytes:
        self._written += 1
        mark = key + self._written.to_bytes(16, "big")
        return (mark * (BLOCK_BYTES // len(mark) + 1))[:BLOCK_BYTES]


def read(store: DiskStore) -> dict[StoreKey, bytes]:
    """What the store serves, read in one batch into dirty buffers."""
    buffers = [memoryview(bytearray(b"\xee" * BLOCK_BYTES)) for _ in KEYS]
    fates = store.read_into(KEYS, buffers)
    return {
        key: bytes(buffer)
        for key, buffer, fate in zip(KEYS, buffers, fates, strict=True)
        if fate is Read.HIT
    }


def fill(store: DiskStore) -> None:
    """Every slot of the store can be used: none is missing."""
    store.remove(KEYS)
    contents = [memoryview(bytes([n]) * BLOCK_BYTES) for n in range(SLOTS)]
    fates = store.write(KEYS[:SLOTS], [None] * SLOTS, contents)
    assert fates == [Write.STORED] * SLOTS
    assert list(read(store).values()) == contents
