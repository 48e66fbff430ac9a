"""Which node of a shared store evicts: small sealed files by which nodes tell each other.

The lease of that node, the owner, is a file with its id and a number that grows with each renewal.
A node that sees the same number for ``lease_seconds`` by its own clock takes over: no two clocks
are compared. Two owners at once only evict more than one would.
"""

import errno
import struct
import time
from pathlib import Path
from typing import Final, NamedTuple

from kvstrata.storage.checksum import DIGEST_BYTES, is_sealed, seal
from kvstrata.storage.shared_fs_census import Held
from kvstrata.storage.shared_fs_file import NOT_THERE, publish

TEMPORARY_SUFFIX: Final = ".tmp"
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})

_MAGIC: Final = b"KVSLEASE"
_LEASE: Final = struct.Struct("<8sIIQ16sqq")
_VERSION: Final = 1
_RENEWALS_PER_LEASE: Final = 4


def tell(path: str, node: str, body: bytes) -> None:
    """Replace the small file *path* by *body*, sealed; a full file system keeps the old one."""
    try:
        publish(path, f"{path}.{node}{TEMPORARY_SUFFIX}", [memoryview(seal(body))])
    except OSError as e:
        if e.errno not in NO_ROOM:
            raise


def told(path: str) -> bytes | None:
    """What was told in *path*; ``None`` if nothing was, or if it is damaged."""
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        if e.errno in NOT_THERE:
            return None
        raise
    return data[:-DIGEST_BYTES] if len(data) > DIGEST_BYTES and is_sealed(data) else None


class Lease(NamedTuple):
    """What the owner tells: that it lives, and what the directory holds."""

    owner: str
    beat: int
    held: Held


class Election:
    """One node's view of the lease in file *path*."""

    def __init__(self, path: str, node: str, lease_seconds: float) -> None:
        self._path = path
        self._node = node
        self._lease_seconds = lease_seconds
        self._beat = 0
        self._renewed = 0.0
        self._watched: tuple[str, int] | None = None
        self._watched_since = 0.0

    def lease(self) -> Lease | None:
        """The lease as it is now, whoever holds it."""
        body = told(self._path)
        if body is None or len(body) != _LEASE.size or not body.startswith(_MAGIC):
            return None
        _, version, _, beat, owner, blocks, file_bytes = _LEASE.unpack(body)
        if version != _VERSION:
            return None
        return Lease(owner.decode("ascii", "replace"), beat, Held(blocks, file_bytes))

    def is_ours_to_take(self, lease: Lease) -> bool:
        """Whether this node is the owner, or is to replace one that shows no sign of life."""
        if lease.owner == self._node:
            return True
        sign = (lease.owner, lease.beat)
        if sign != self._watched:
            self._watched, self._watched_since = sign, time.monotonic()
        return time.monotonic() - self._watched_since >= self._lease_seconds

    def renew(self, held: Held) -> None:
        """Be the owner, and tell what the directory holds."""
        self._beat += 1
        self._renewed = time.monotonic()
        node = self._node.encode("ascii")
        tell(self._path, self._node, _LEASE.pack(_MAGIC, _VERSION, 0, self._beat, node, *held))

    def keep(self, held: Held) -> None:
        """Renew in the middle of long work, as often as others need to see it."""
        if time.monotonic() - self._renewed > self._lease_seconds / _RENEWALS_PER_LEASE:
            self.renew(held)
