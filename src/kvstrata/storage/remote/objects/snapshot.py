"""What a namespace of an object store held when it was last listed, as a Bloom filter.

`kvstrata gc --snapshot` lists the bucket and writes one object a namespace; a node that trusts it
asks for no block that is not in it. (B. Bloom, CACM 13(7), 1970.)
"""

import logging
import math
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

from kvstrata.core.types import NAMESPACE_ID_BYTES, NamespaceId, Read, StoreKey
from kvstrata.storage.remote.value import HEADER_BYTES, header_of, judge_header, judge_value

if TYPE_CHECKING:
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from kvstrata.storage.remote.objects.library import Fetched, Library
    from kvstrata.storage.remote.objects.values import Names

__all__ = ["Snapshot", "Snapshots", "seed_of"]

_log = logging.getLogger(__name__)

_HEAD: Final = struct.Struct("<dQQ")  # when the listing began, blocks, bits; then the bits
_BITS_A_BLOCK: Final = 10
_PROBES: Final = 7  # bits a block; with 10 bits a block 0.8 % of absent ones look present
_MOST_BYTES: Final = 256 << 20  # of an object: 200 million blocks
_LOOKS: Final = 8  # for a new one, while one would be trusted
_CLOCK_SECONDS: Final = 60.0  # that nodes' clocks, and the listing's order, may differ by
_MOST_WRITTEN: Final = 1 << 16  # keys of this node's own that are remembered


def snapshot_key(namespace: NamespaceId) -> StoreKey:
    """The key that the object of *namespace* is proved by; no block has it."""
    return namespace + b"snapshot".ljust(32, b"\0")


class Snapshot:
    """The blocks of one namespace at one time. An absent block may look present, never the reverse."""

    def __init__(self, listed_seconds: float, blocks: int, bits: "NDArray[np.uint8]") -> None:
        self.listed_seconds = listed_seconds  # of the epoch, when the listing began
        self.blocks = blocks
        self._bits = bits

    @classmethod
    def of(cls, listed_seconds: float, seeds: bytes | bytearray) -> "Snapshot":
        """A snapshot of the blocks whose ``seed_of`` are joined in *seeds*."""
        blocks = len(seeds) // 8
        bits = np.zeros(math.ceil(max(1, blocks) * _BITS_A_BLOCK / 8), np.uint8)
        snapshot = cls(listed_seconds, blocks, bits)
        for positions in snapshot._positions(seeds):
            np.bitwise_or.at(bits, positions >> 3, _masks(positions))
        return snapshot

    @classmethod
    def parse(cls, namespace: NamespaceId, stored: bytes) -> "Snapshot | None":
        """The snapshot that ``to_object`` has made *stored* of; ``None`` if that is damaged."""
        header, value = stored[:HEADER_BYTES], memoryview(stored)[HEADER_BYTES:]
        key = snapshot_key(namespace)
        if (
            judge_header(header, key, len(stored), len(stored)) is not Read.HIT
            or judge_value(header, value) is not Read.HIT
            or value.nbytes <= _HEAD.size
        ):
            return None
        listed_seconds, blocks, n_bytes = _HEAD.unpack_from(value)
        bits = np.frombuffer(value, np.uint8, offset=_HEAD.size)
        return cls(listed_seconds, blocks, bits) if bits.size == n_bytes else None

    def to_object(self, namespace: NamespaceId) -> tuple[bytes, bytes]:
        """The header and the value of the object that ``parse`` reads."""
        head = _HEAD.pack(self.listed_seconds, self.blocks, self._bits.size)
        value = head + self._bits.tobytes()
        return header_of(snapshot_key(namespace), None, memoryview(value)), value

    def may_have(self, keys: Sequence[StoreKey]) -> list[bool]:
        """Whether each key may have been there; ``False`` means that it was not."""
        there = np.ones(len(keys), bool)
        for positions in self._positions(b"".join(map(seed_of, keys))):
            there &= self._bits[positions >> 3] & _masks(positions) != 0
        return there.tolist()

    def _positions(self, seeds: bytes | bytearray) -> "Iterator[NDArray[np.uint64]]":
        """The bits of all seeds, one of each at a time (Kirsch and Mitzenmacher, ESA 2006)."""
        first, step = np.frombuffer(seeds, "<u4").astype(np.uint64).reshape(-1, 2).T
        size = np.uint64(self._bits.size * 8)
        for probe in range(_PROBES):
            yield (first + np.uint64(probe) * (step | np.uint64(1))) % size


def seed_of(key: StoreKey) -> bytes:
    """The 8 bytes that the bits of *key* follow from."""
    return xxhash.xxh3_64_digest(key)


class Snapshots:
    """The newest snapshots of the namespaces that are asked for. Thread-safe.

    They are read on the library's threads: nobody waits for one. While there is none, or it was
    listed longer ago than *trusted_seconds*, all blocks may be there.
    """

    def __init__(self, library: "Library", names: "Names", *, trusted_seconds: float) -> None:
        self._library = library
        self._names = names
        self._trusted_seconds = trusted_seconds
        self._lock = threading.Lock()  # guards the two below
        self._newest: dict[NamespaceId, _Newest] = {}
        self._written: OrderedDict[StoreKey, float] = OrderedDict()  # by this node, and when

    def may_have(self, keys: Sequence[StoreKey]) -> list[bool]:
        """Whether each of *keys* may be there; what is ``False`` need not be asked for."""
        with self._lock:
            known = {
                namespace: self._trusted(namespace)
                for namespace in {key[:NAMESPACE_ID_BYTES] for key in keys}
            }
            may = [key in self._written for key in keys]
        for namespace, snapshot in known.items():
            ours = [at for at, key in enumerate(keys) if key[:NAMESPACE_ID_BYTES] == namespace]
            held = snapshot.may_have([keys[at] for at in ours]) if snapshot else repeat(True)
            for at, is_held in zip(ours, held, strict=False):
                may[at] |= is_held
        return may

    def wrote(self, keys: Sequence[StoreKey]) -> None:
        """*keys* are there from now on, whatever a snapshot says that does not know them yet."""
        now = time.time()
        with self._lock:
            for key in keys:
                self._written[key] = now
                self._written.move_to_end(key)
            while len(self._written) > _MOST_WRITTEN:
                self._written.popitem(last=False)

    def _trusted(self, namespace: NamespaceId) -> Snapshot | None:
        """The snapshot of *namespace* if it is young enough. Needs the lock."""
        newest = self._newest.setdefault(namespace, _Newest())
        if newest.fetch is not None and newest.fetch.done():
            self._take(namespace, newest, newest.fetch)
        if newest.fetch is None and time.monotonic() >= newest.look_at:
            newest.look_at = time.monotonic() + self._trusted_seconds / _LOOKS
            newest.fetch = self._library.fetch(
                self._names.snapshot(namespace), _MOST_BYTES, unless=newest.e_tag
            )
        snapshot = newest.snapshot
        is_young = snapshot and time.time() - snapshot.listed_seconds <= self._trusted_seconds
        return snapshot if is_young else None

    def _take(
        self, namespace: NamespaceId, newest: "_Newest", fetch: "Future[Fetched | None]"
    ) -> None:
        from kvstrata.storage.remote.objects.faults import FAULTS

        newest.fetch = None
        try:
            fetched = fetch.result()
        except FAULTS:  # whoever asks for blocks now finds out, too
            return
        if fetched is None:
            return
        name = self._names.snapshot(namespace)
        newest.e_tag = fetched.e_tag
        newest.snapshot = Snapshot.parse(namespace, fetched.stored)
        if newest.snapshot is None:
            _log.warning("the snapshot %s is damaged, or longer than any: not used", name)
            return
        _log.info("snapshot %s: %d blocks", name, newest.snapshot.blocks)
        known_until = newest.snapshot.listed_seconds - _CLOCK_SECONDS
        for key, when in list(self._written.items()):
            if when < known_until and key[:NAMESPACE_ID_BYTES] == namespace:
                del self._written[key]


class _Newest:
    """What is known of one namespace."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self.e_tag = ""  # of the object it was read from
        self.look_at = 0.0  # when the next look is due
        self.fetch: Future[Fetched | None] | None = None


def _masks(positions: "NDArray[np.uint64]") -> "NDArray[np.uint8]":
    masks: NDArray[np.uint8] = np.uint8(1) << (positions & np.uint64(7)).astype(np.uint8)
    return masks
