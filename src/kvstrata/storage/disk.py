"""The disk tier: blocks in fixed slots of preallocated files, found through a journal.

``docs/on-disk-format.md`` describes the directory.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from kvstrata.core.errors import InvariantViolated, TierUnavailable
from kvstrata.core.types import (
    NAMESPACE_ID_BYTES,
    STORE_KEY_BYTES,
    NamespaceId,
    Read,
    StoredBlock,
    StoreKey,
    Write,
)
from kvstrata.storage.disk_directory import Wanted, open_directory
from kvstrata.storage.disk_slots import Identity
from kvstrata.storage.journal import Entry
from kvstrata.storage.store import StoreStatistics

__all__ = ["DiskStore"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Reservation:
    """A slot that is being filled; nobody else sees it until it is published."""

    position: int  # in the batch
    key: StoreKey
    entry: Entry
    dropped: bool = False
    published: bool = False


class DiskStore:
    """A persistent ``Store`` in one directory, used by one process at a time.

    * A block that was reported ``STORED`` survives the death of the process at any moment; a
      power failure may lose the last writes, but never serves a wrong byte.
    * Every read is proved by key, generation and checksum; what fails is ``Read.CORRUPT``,
      forgotten and counted.
    * A failed batch raises ``TierUnavailable``; a failed write keeps nothing of its batch.
    * A slot that is being read is not reused before the read ends.
    """

    def __init__(
        self,
        path: Path,
        *,
        block_bytes: int,
        capacity_bytes: int,
        max_blocks_per_file: int = 32000,
        lock_timeout_seconds: float = 10.0,
    ) -> None:
        """Open the store in *path*, or make it, or grow it to *capacity_bytes*.

        *capacity_bytes* bounds the slot files; one slot is ``block_bytes`` rounded up to 4 KiB,
        plus 4 KiB. Raises ``ConfigError`` (``FormatError`` for what the directory holds) and
        then has changed nothing. Waits up to *lock_timeout_seconds* for another process.
        """
        wanted = Wanted(block_bytes, capacity_bytes, max_blocks_per_file)
        self._path = path
        self._block_bytes = block_bytes
        self._directory = open_directory(path, wanted, lock_timeout_seconds)
        self._files = self._directory.files
        self._journal = self._directory.journal
        self._slots = self._directory.superblock.slots
        replay = self._directory.replay

        # Taken first, held while the journal and then the maps change: their orders agree.
        self._journal_lock = Lock()
        # Guards everything below; never held over I/O.
        self._lock = Lock()
        self._entries: dict[StoreKey, Entry] = replay.entries
        self._generation = replay.generation
        self._reservations: set[_Reservation] = set()
        self._readers: dict[int, int] = {}
        self._parting: set[int] = set()  # free as soon as their readers are gone
        self._never_used, self._free = _free_slots(self._entries)
        self._corrupt_blocks = self._directory.lost_blocks
        self._active_calls = 0
        self._closed = False

    @property
    def direct(self) -> bool:
        """Whether data bypasses the page cache (``O_DIRECT``)."""
        return self._files.direct

    def blocks(self) -> Iterator[StoredBlock]:
        """Every block held at the time of the call, a parent before its children."""
        with self._call("looked up"), self._lock:
            entries = dict(self._entries)
        return _parents_first(entries)

    def exists(self, keys: Sequence[StoreKey]) -> list[bool]:
        with self._call("looked up"), self._lock:
            return [key in self._entries for key in keys]

    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        self._check_batch(keys, buffers)
        with self._call("read"):
            entries = self._pin(keys)
            try:
                return [
                    self._read_one(key, entry, buffer)
                    for key, entry, buffer in zip(keys, entries, buffers, strict=True)
                ]
            finally:
                self._unpin(entries)

    def write(
        self,
        keys: Sequence[StoreKey],
        parents: Sequence[StoreKey | None],
        buffers: Sequence[memoryview],
    ) -> list[Write]:
        self._check_batch(keys, buffers)
        _check_keys([parent for parent in parents if parent is not None])
        with self._call("written"):
            fates, reserved = self._reserve(keys, parents)
            try:
                for reservation in reserved:
                    key, entry = reservation.key, reservation.entry
                    identity = Identity(key, entry.parent, entry.generation)
                    self._files.write(entry.slot, identity, buffers[reservation.position])
                self._files.sync(reservation.entry.slot for reservation in reserved)
                self._publish(reserved, fates)
            finally:
                self._release_unpublished(reserved)
            return fates

    def remove(self, keys: Sequence[StoreKey]) -> list[bool]:
        with self._call("changed"), self._journal_lock:
            with self._lock:
                found = {key: self._entries[key] for key in keys if key in self._entries}
            if found:
                self._forget(found)
            unreported = set(found)
            return [_take(unreported, key) for key in keys]

    def drop_namespace(self, namespace_id: NamespaceId) -> int:
        """Forget every block of *namespace_id*, durably, and return how many there were.

        Blocks of it that other threads are still writing are forgotten too. On
        ``TierUnavailable`` they may be back after a restart: call again until it succeeds.
        """
        if len(namespace_id) != NAMESPACE_ID_BYTES:
            raise InvariantViolated(f"a namespace id of {len(namespace_id)} bytes")
        with self._call("changed"), self._journal_lock:
            self._journal.drop(namespace_id)
            with self._lock:
                for reservation in self._reservations:
                    reservation.dropped |= reservation.key.startswith(namespace_id)
                victims = [key for key in self._entries if key.startswith(namespace_id)]
                for key in victims:
                    self._free_slot(self._entries.pop(key).slot)
            self._journal.sync()
            return len(victims)

    def statistics(self) -> StoreStatistics:
        with self._call("looked up"), self._lock:
            return StoreStatistics(
                len(self._entries), self._slots, self._block_bytes, self._corrupt_blocks
            )

    def close(self) -> None:
        """Refuse later calls and release the directory, at the latest when running calls end."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = self._active_calls == 0
        if idle:
            self._directory.close()

    @contextmanager
    def _call(self, done: str) -> Iterator[None]:
        """Keep the files open during a call and report a failing disk as ``TierUnavailable``."""
        with self._lock:
            if self._closed:
                raise TierUnavailable(f"disk store {self._path} is closed")
            self._active_calls += 1
        try:
            yield
        except OSError as e:
            raise TierUnavailable(f"disk store {self._path} cannot be {done}: {e}") from e
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._active_calls -= 1
            last = self._closed and self._active_calls == 0
        if last:
            self._directory.close()

    def _check_batch(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> None:
        _check_keys(keys)
        for buffer in buffers:
            if buffer.nbytes != self._block_bytes:
                raise InvariantViolated(
                    f"a buffer of {buffer.nbytes} bytes for blocks of {self._block_bytes}"
                )

    def _pin(self, keys: Sequence[StoreKey]) -> list[Entry | None]:
        with self._lock:
            entries = [self._entries.get(key) for key in keys]
            for entry in entries:
                if entry is not None:
                    self._readers[entry.slot] = self._readers.get(entry.slot, 0) + 1
        return entries

    def _unpin(self, entries: Sequence[Entry | None]) -> None:
        with self._lock:
            for entry in entries:
                if entry is None:
                    continue
                slot = entry.slot
                self._readers[slot] -= 1
                if not self._readers[slot]:
                    del self._readers[slot]
                    if slot in self._parting:
                        self._parting.remove(slot)
                        self._free.append(slot)

    def _read_one(self, key: StoreKey, entry: Entry | None, buffer: memoryview) -> Read:
        if entry is None:
            return Read.MISS
        if self._files.read(entry.slot, Identity(key, entry.parent, entry.generation), buffer):
            return Read.HIT
        with self._journal_lock:
            with self._lock:
                current = self._entries.get(key) is entry
            if current:
                self._forget({key: entry})
                with self._lock:
                    self._corrupt_blocks += 1
                _log.warning("disk store %s: slot %d is damaged", self._path, entry.slot)
        return Read.CORRUPT

    def _reserve(
        self, keys: Sequence[StoreKey], parents: Sequence[StoreKey | None]
    ) -> tuple[list[Write], list[_Reservation]]:
        fates, reserved = [], []
        taken: set[StoreKey] = set()
        with self._lock:
            for position, (key, parent) in enumerate(zip(keys, parents, strict=True)):
                fate = Write.EXISTS
                if key not in self._entries and key not in taken:
                    slot = self._take_slot()
                    fate = Write.FULL if slot is None else Write.STORED
                    if slot is not None:
                        entry = Entry(slot, self._generation, parent)
                        self._generation += 1
                        reserved.append(_Reservation(position, key, entry))
                        taken.add(key)
                fates.append(fate)
            self._reservations.update(reserved)
        return fates, reserved

    def _publish(self, reserved: Sequence[_Reservation], fates: list[Write]) -> None:
        """Make written blocks visible, except where another thread or a drop came first."""
        with self._journal_lock:
            fresh = []
            with self._lock:
                for reservation in reserved:
                    if reservation.key in self._entries:
                        fates[reservation.position] = Write.EXISTS
                    elif not reservation.dropped:
                        fresh.append(reservation)
            if not fresh:
                return
            self._journal.put((reservation.key, reservation.entry) for reservation in fresh)
            with self._lock:
                for reservation in fresh:
                    reservation.published = True
                    self._entries[reservation.key] = reservation.entry
            self._compact_journal()

    def _release_unpublished(self, reserved: Sequence[_Reservation]) -> None:
        with self._lock:
            self._reservations.difference_update(reserved)
            self._free.extend(r.entry.slot for r in reserved if not r.published)

    def _forget(self, blocks: Mapping[StoreKey, Entry]) -> None:
        """Journal that *blocks* are gone, then free their slots. Needs the journal lock."""
        self._journal.remove(blocks.items())
        with self._lock:
            for key, entry in blocks.items():
                del self._entries[key]
                self._free_slot(entry.slot)
        self._compact_journal()

    def _compact_journal(self) -> None:
        with self._lock:
            if not self._journal.wants_compaction(len(self._entries)):
                return
            entries, generation = dict(self._entries), self._generation
        try:
            self._journal.compact(entries, generation)
        except OSError as e:
            _log.warning("journal of %s could not be compacted: %s", self._path, e)

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._never_used == self._slots:
            return None
        self._never_used += 1
        return self._never_used - 1

    def _free_slot(self, slot: int) -> None:
        if slot in self._readers:
            self._parting.add(slot)
        else:
            self._free.append(slot)


def _check_keys(keys: Sequence[StoreKey]) -> None:
    for key in keys:
        if len(key) != STORE_KEY_BYTES:
            raise InvariantViolated(f"a store key of {len(key)} bytes, expected {STORE_KEY_BYTES}")


def _take(keys: set[StoreKey], key: StoreKey) -> bool:
    found = key in keys
    keys.discard(key)
    return found


def _free_slots(entries: Mapping[StoreKey, Entry]) -> tuple[int, list[int]]:
    """The first slot that was never used, and the free ones below it, lowest last."""
    used = {entry.slot for entry in entries.values()}
    never_used = max(used, default=-1) + 1
    return never_used, [slot for slot in range(never_used - 1, -1, -1) if slot not in used]


def _parents_first(entries: Mapping[StoreKey, Entry]) -> Iterator[StoredBlock]:
    done: set[StoreKey] = set()
    for start in entries:
        chain: list[StoreKey] = []
        key: StoreKey | None = start
        while key is not None and key in entries and key not in done:
            done.add(key)  # also ends a chain that damage has closed to a ring
            chain.append(key)
            key = entries[key].parent
        for found in reversed(chain):
            yield StoredBlock(found, entries[found].parent)
