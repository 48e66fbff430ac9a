"""A store in a directory of a shared file system, used by several nodes at once.

``docs/shared-file-system.md`` describes the directory and what a mount has to keep.
"""

import itertools
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Final

from kvstrata.core.errors import ConfigError, InvariantViolated, TierUnavailable
from kvstrata.core.types import (
    NAMESPACE_ID_BYTES,
    NamespaceId,
    Read,
    StoreKey,
    Write,
)
from kvstrata.storage.batch import check_keys, check_lengths
from kvstrata.storage.shared_fs_census import Held, delete_namespace, unlink
from kvstrata.storage.shared_fs_directory import make_shard, open_directory
from kvstrata.storage.shared_fs_file import (
    HEADER_BYTES,
    NOT_THERE,
    header_of,
    is_page_aligned,
    publish,
    read_value,
    reads_directly,
)
from kvstrata.storage.shared_fs_lease import NO_ROOM
from kvstrata.storage.shared_fs_quota import Quota, Times
from kvstrata.storage.store import StoreStatistics

__all__ = ["SharedFsStore", "Times"]

_log = logging.getLogger(__name__)

_DEFAULT_TIMES: Final = Times()
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_ATTEMPTS: Final = 3  # at a directory that others remove while it is empty


class SharedFsStore:
    """A persistent, *variable* ``Store``: one file a block, shared by all nodes that mount it.

    * What one node has ``STORED`` every node finds, as soon as its mount shows it.
    * Every read is proved by key, length and checksum. What fails is ``Read.CORRUPT``, removed
      and counted. A block that another node removes during a read is right or a miss.
    * Of two writers of one key the last wins; they are expected to write the same.
    * Above its capacity the directory loses the blocks used longest ago, if some node calls
      ``sweep`` every few seconds. A write that finds no room is ``Write.FULL``; so is one whose
      directory another node has removed, as long as the mount shows it as if it were there.
    * A mount that hangs blocks the calling thread: the file system knows no deadline.
    """

    def __init__(
        self,
        path: Path,
        *,
        block_bytes: int,
        capacity_bytes: int | None = None,
        times: Times = _DEFAULT_TIMES,
    ) -> None:
        """Open the store in *path*, or make it there; its parent must exist.

        *capacity_bytes* bounds the block files of the whole directory, headers included, and
        should be the same on all nodes; ``None`` leaves the bound to the file system. Raises
        ``ConfigError`` (``FormatError`` for what the directory holds) and then has changed
        nothing that was there; ``TierUnavailable`` if the file system fails later on.
        """
        file_bytes = HEADER_BYTES + block_bytes
        if block_bytes < 1 or (capacity_bytes is not None and capacity_bytes < file_bytes):
            raise ConfigError(
                f"a shared store of {capacity_bytes} bytes for blocks of {block_bytes} bytes",
                hint=f"set the capacity of the shared store to at least {file_bytes} bytes",
            )
        self._path = path
        self._block_bytes = block_bytes
        self._times = times
        self._node = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._names = open_directory(path, block_bytes, self._node)
        with self._faults("opened"):
            self._direct = reads_directly(self._names.marker)
            self._quota = Quota(self._names, self._node, capacity_bytes, times)
            self._capacity_blocks = (capacity_bytes or _total_bytes(path)) // file_bytes
        self._lock = Lock()  # guards the next
        self._corrupt_blocks = 0
        self._closed = False

    @property
    def direct(self) -> bool:
        """Whether page-aligned data bypasses the page cache (``O_DIRECT``)."""
        return self._direct

    def exists(self, keys: Sequence[StoreKey]) -> list[bool]:
        check_keys(keys)
        with self._call("looked up"):
            found = [_file_bytes(self._names.block(key)) is not None for key in keys]
            if not all(found):
                self._check_mounted()
            return found

    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        check_keys(keys)
        check_lengths(buffers, self._block_bytes, variable=True)
        with self._call("read"):
            fates = [self._read(*block) for block in zip(keys, buffers, strict=True)]
            if Read.MISS in fates:
                self._check_mounted()
            return fates

    def write(
        self,
        keys: Sequence[StoreKey],
        parents: Sequence[StoreKey | None],
        buffers: Sequence[memoryview],
    ) -> list[Write]:
        check_keys(keys)
        check_lengths(buffers, self._block_bytes, variable=True)
        check_keys(parents)
        with self._call("written"):
            return [self._write(*block) for block in zip(keys, parents, buffers, strict=True)]

    def remove(self, keys: Sequence[StoreKey]) -> list[bool]:
        check_keys(keys)
        with self._call("changed"):
            found = [self._remove(self._names.block(key)) for key in keys]
            if not all(found):
                self._check_mounted()
            return found

    def drop_namespace(self, namespace_id: NamespaceId) -> int:
        """Forget every block of *namespace_id*, and return how many this call has deleted.

        For all nodes they are gone at once, by one rename; a block that is being written
        meanwhile is forgotten too, or comes after. If the call dies while it deletes, the owner
        deletes the rest.
        """
        if len(namespace_id) != NAMESPACE_ID_BYTES:
            raise InvariantViolated(f"a namespace id of {len(namespace_id)} bytes")
        with self._call("changed"):
            trash = f"{self._names.trash}/{namespace_id.hex()}.{self._unique()}"
            try:
                os.rename(self._names.namespace(namespace_id), trash)
            except FileNotFoundError:
                self._check_mounted()
                return 0
            deleted = delete_namespace(trash)
            self._quota.release(deleted)
            return deleted.blocks

    def sweep(self) -> int:
        """Do this node's share of keeping the directory small; the number of blocks evicted.

        To be called every ``lease_seconds / 4`` or so, from one thread. On all nodes but one it
        costs a few metadata operations; on that one, the owner, it also evicts, and now and then
        walks over all files, which takes minutes where there are millions.
        """
        with self._call("swept"):
            return self._quota.sweep()

    def statistics(self) -> StoreStatistics:
        """As of the last ``sweep``, plus what this node has done since; no I/O."""
        self._check_open()
        return StoreStatistics(
            max(0, self._quota.held.blocks),
            self._capacity_blocks,
            self._block_bytes,
            self._corrupt_blocks,
            variable=True,
        )

    def close(self) -> None:
        """Refuse later calls. No I/O: the lease of an owner runs out by itself."""
        self._closed = True

    def _read(self, key: StoreKey, buffer: memoryview) -> Read:
        path = self._names.block(key)
        try:
            fd = os.open(path, _READ)
            try:
                if read_value(fd, key, buffer, direct=self._direct):
                    self._touch(fd)
                    return Read.HIT
                return self._remove_corrupt(fd, path)
            finally:
                os.close(fd)
        except OSError as e:
            if e.errno in NOT_THERE:
                return Read.MISS
            raise

    def _touch(self, fd: int) -> None:
        """Renew the block's last use, unless that was a moment ago: reads should not write."""
        if time.time() - os.fstat(fd).st_mtime > self._times.touch_seconds:
            with suppress(OSError):  # of a mount that has become read-only, say
                os.utime(fd)

    def _remove_corrupt(self, fd: int, path: str) -> Read:
        """Remove the file behind *fd*, unless *path* names a new one by now."""
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return Read.MISS
        with self._lock:
            self._corrupt_blocks += 1
        _log.warning("shared store %s: %s is damaged", self._path, path)
        with suppress(FileNotFoundError):
            if os.path.samestat(found, os.lstat(path)) and unlink(path):
                self._quota.release(Held(1, found.st_size))
        return Read.CORRUPT

    def _remove(self, path: str) -> bool:
        file_bytes = _file_bytes(path)
        if file_bytes is None or not unlink(path):
            return False
        self._quota.release(Held(1, file_bytes))
        return True

    def _write(self, key: StoreKey, parent: StoreKey | None, value: memoryview) -> Write:
        path = self._names.block(key)
        if _file_bytes(path) is not None:
            return Write.EXISTS
        file_bytes = HEADER_BYTES + value.nbytes
        if not self._quota.reserve(file_bytes):
            return Write.FULL
        published = False
        try:
            self._publish(path, [header_of(key, parent, value), value])
            published = True
        except OSError as e:
            if e.errno in NOT_THERE:
                self._check_mounted()
            elif e.errno not in NO_ROOM:
                raise
        finally:
            if not published:
                self._quota.release(Held(1, file_bytes))
        return Write.STORED if published else Write.FULL

    def _publish(self, path: str, parts: Sequence[memoryview]) -> None:
        direct = self._direct and all(is_page_aligned(part) for part in parts)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                publish(path, f"{path}.{self._unique()}.tmp", parts, direct=direct)
            except FileNotFoundError:
                if attempt == _ATTEMPTS:
                    raise
                make_shard(path)
            else:
                return

    def _unique(self) -> str:
        """A name that nobody else has used, on this node or another."""
        return f"{self._node}-{next(self._numbers)}"

    def _check_mounted(self) -> None:
        """Raise ``OSError`` if what is missing is not a block but the file system."""
        os.stat(self._names.blocks)

    def _check_open(self) -> None:
        if self._closed:
            raise TierUnavailable(f"shared store {self._path} is closed")

    @contextmanager
    def _call(self, done: str) -> Iterator[None]:
        self._check_open()
        with self._faults(done):
            yield

    @contextmanager
    def _faults(self, done: str) -> Iterator[None]:
        """Report what the file system cannot do as ``TierUnavailable``."""
        try:
            yield
        except OSError as e:
            raise TierUnavailable(
                f"shared store {self._path} cannot be {done}: {e}",
                hint="check that its file system is mounted, and that its server answers",
            ) from e


def _file_bytes(path: str) -> int | None:
    """Bytes of the block file *path*; ``None`` if there is none, or none that can hold a value."""
    try:
        found = os.lstat(path)
    except OSError as e:
        if e.errno in NOT_THERE:
            return None
        raise
    whole = stat.S_ISREG(found.st_mode) and found.st_size > HEADER_BYTES
    return found.st_size if whole else None


def _total_bytes(path: Path) -> int:
    room = os.statvfs(path)
    return room.f_blocks * room.f_frsize
