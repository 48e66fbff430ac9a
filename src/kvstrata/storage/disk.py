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
    NamespaceId,
    Read,
    StoredBlock,
    StoreKey,
    Write,
)
from kvstrata.storage.batch import check_keys, check_lengths
from kvstrata.storage.disk_directory import Wanted, open_directories, store_name
from kvstrata.storage.disk_free import FreeSlots
from kvstrata.storage.disk_slots import Piece
from kvstrata.storage.disk_system import FileSystem
from kvstrata.storage.disk_table import BlockTable, parents_first
from kvstrata.storage.journal import Entry, put_records
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
    """A persistent ``Store`` in one or more directories, used by one process at a time.

    * A block that was reported ``STORED`` survives the death of the process at any moment; a
      power failure may lose the last writes, but never serves a wrong byte.
    * Every read is proved by key, generation and checksum; what fails is ``Read.CORRUPT``,
      forgotten and counted.
    * A failed batch raises ``TierUnavailable``; a failed write keeps nothing of its batch.
    * A slot that is being read is not reused before the read ends.
    * New blocks of one batch get neighbouring slots where there are free ones; what is in
      neighbouring slots is read and written in one call.
    """

    def __init__(  # noqa: PLR0913 - each is a setting
        self,
        paths: Sequence[Path],
        *,
        block_bytes: int,
        capacity_bytes: int,
        max_blocks_per_file: int = 32000,
        discard: bool = False,
        lock_timeout_seconds: float = 10.0,
        system: FileSystem | None = None,
    ) -> None:
        """Open the store in *paths*, or make it, or grow it to *capacity_bytes*.

        *capacity_bytes* bounds the slot files of all directories together; one slot is
        ``block_bytes`` rounded up to 4 KiB, plus 4 KiB. With *discard* the room of blocks that
        go is given back to the file system (TRIM), and taken again when it is written. Raises
        ``ConfigError`` (``FormatError`` for what a directory holds) and then has changed nothing.
        Waits up to *lock_timeout_seconds* for another process.
        """
        wanted = Wanted(block_bytes, capacity_bytes, max_blocks_per_file)
        self._name = store_name(paths)
        self._block_bytes = block_bytes
        self._discard = discard
        self._directories, replay = open_directories(
            system or FileSystem(), paths, wanted, lock_timeout_seconds
        )
        self._files = self._directories.files
        self._journal = self._directories.journal
        self._slots = self._directories.superblock.slots

        # Taken first, held while the journal and then the table change: their orders agree.
        self._journal_lock = Lock()
        # Guards everything below; never held over I/O. The table changes under both locks.
        self._lock = Lock()
        self._table = BlockTable(self._slots, replay.puts)
        self._generation = replay.generation
        self._reservations: set[_Reservation] = set()
        self._readers: dict[int, int] = {}
        self._parting: set[int] = set()  # free as soon as their readers are gone
        self._free = FreeSlots(self._slots, self._table.used_slots)
        self._corrupt_blocks = replay.lost
        self._active_calls = 0
        self._closed = False

    @property
    def direct(self) -> bool:
        """Whether data bypasses the page cache (``O_DIRECT``)."""
        return self._files.direct

    def blocks(self) -> Iterator[StoredBlock]:
        """Every block held at the time of the call, a parent before its children."""
        with self._call("looked up"), self._lock:
            puts = self._table.puts()
        return parents_first(puts)

    def exists(self, keys: Sequence[StoreKey]) -> list[bool]:
        with self._call("looked up"), self._lock:
            return [key in self._table for key in keys]

    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        check_keys(keys)
        check_lengths(buffers, self._block_bytes, variable=False)
        with self._call("read"):
            entries = self._pin(keys)
            try:
                return self._read(keys, entries, buffers)
            finally:
                self._unpin(entries)

    def write(
        self,
        keys: Sequence[StoreKey],
        parents: Sequence[StoreKey | None],
        buffers: Sequence[memoryview],
    ) -> list[Write]:
        check_keys(keys)
        check_lengths(buffers, self._block_bytes, variable=False)
        check_keys(parents)
        with self._call("written"):
            fates, reserved = self._reserve(keys, parents)
            try:
                self._files.write([Piece(r.key, r.entry, buffers[r.position]) for r in reserved])
                self._files.sync(reservation.entry.slot for reservation in reserved)
                self._publish(reserved, fates)
            finally:
                self._release_unpublished(reserved)
            return fates

    def remove(self, keys: Sequence[StoreKey]) -> list[bool]:
        with self._call("changed"), self._journal_lock:
            with self._lock:
                entries = {key: self._table.get(key) for key in keys}
            found = {key: entry for key, entry in entries.items() if entry is not None}
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
                victims = self._table.keys_of(namespace_id)
                slots = self._part([self._table.pop(key) for key in victims])
            try:
                self._journal.sync()
            finally:
                self._release(slots)
            return len(victims)

    def statistics(self) -> StoreStatistics:
        with self._call("looked up"), self._lock:
            return StoreStatistics(
                len(self._table), self._slots, self._block_bytes, self._corrupt_blocks
            )

    def close(self) -> None:
        """Refuse later calls and release the directory, at the latest when running calls end."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = self._active_calls == 0
        if idle:
            self._directories.close()

    @contextmanager
    def _call(self, done: str) -> Iterator[None]:
        """Keep the files open during a call and report a failing disk as ``TierUnavailable``."""
        with self._lock:
            if self._closed:
                raise TierUnavailable(f"disk store {self._name} is closed")
            self._active_calls += 1
        try:
            yield
        except OSError as e:
            raise TierUnavailable(f"disk store {self._name} cannot be {done}: {e}") from e
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._active_calls -= 1
            last = self._closed and self._active_calls == 0
        if last:
            self._directories.close()

    def _pin(self, keys: Sequence[StoreKey]) -> list[Entry | None]:
        with self._lock:
            entries = [self._table.get(key) for key in keys]
            for entry in entries:
                if entry is not None:
                    self._readers[entry.slot] = self._readers.get(entry.slot, 0) + 1
        return entries

    def _unpin(self, entries: Sequence[Entry | None]) -> None:
        parted = []
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
                        parted.append(slot)
        self._release(parted)

    def _read(
        self,
        keys: Sequence[StoreKey],
        entries: Sequence[Entry | None],
        buffers: Sequence[memoryview],
    ) -> list[Read]:
        fates = [Read.MISS] * len(keys)
        held = [(position, entry) for position, entry in enumerate(entries) if entry is not None]
        pieces = [Piece(keys[position], entry, buffers[position]) for position, entry in held]
        for (position, entry), is_right in zip(held, self._files.read(pieces), strict=True):
            fates[position] = Read.HIT if is_right else Read.CORRUPT
            if not is_right:
                self._forget_damaged(keys[position], entry)
        return fates

    def _forget_damaged(self, key: StoreKey, entry: Entry) -> None:
        with self._journal_lock:
            with self._lock:
                if self._table.get(key) != entry:
                    return  # removed or replaced meanwhile
            self._forget({key: entry})
            with self._lock:
                self._corrupt_blocks += 1
        _log.warning("disk store %s: slot %d is damaged", self._name, entry.slot)

    def _reserve(
        self, keys: Sequence[StoreKey], parents: Sequence[StoreKey | None]
    ) -> tuple[list[Write], list[_Reservation]]:
        fates = [Write.EXISTS] * len(keys)
        with self._lock:
            fresh: dict[StoreKey, int] = {}
            for position, key in enumerate(keys):
                if key not in self._table:
                    fresh.setdefault(key, position)
            slots = self._free.take(len(fresh))
            reserved = []
            for position, slot in zip(fresh.values(), slots, strict=False):
                entry = Entry(slot, self._generation, parents[position])
                self._generation += 1
                reserved.append(_Reservation(position, keys[position], entry))
            self._reservations.update(reserved)
        full = set(list(fresh)[len(slots) :])
        fates = [Write.FULL if key in full else fate for key, fate in zip(keys, fates, strict=True)]
        for reservation in reserved:
            fates[reservation.position] = Write.STORED
        return fates, reserved

    def _publish(self, reserved: Sequence[_Reservation], fates: list[Write]) -> None:
        """Make written blocks visible, except where another thread or a drop came first."""
        with self._journal_lock:
            fresh = []
            with self._lock:
                for reservation in reserved:
                    if reservation.key in self._table:
                        fates[reservation.position] = Write.EXISTS
                    elif not reservation.dropped:
                        fresh.append(reservation)
            if not fresh:
                return
            self._journal.put(put_records((r.key, r.entry) for r in fresh))
            with self._lock:
                for reservation in fresh:
                    reservation.published = True
                    self._table.put(reservation.key, reservation.entry)
            self._compact_journal()

    def _release_unpublished(self, reserved: Sequence[_Reservation]) -> None:
        with self._lock:
            self._reservations.difference_update(reserved)
        self._release([r.entry.slot for r in reserved if not r.published])

    def _forget(self, blocks: Mapping[StoreKey, Entry]) -> None:
        """Journal that *blocks* are gone, then free their slots. Needs the journal lock."""
        self._journal.remove(put_records(blocks.items()))
        with self._lock:
            slots = self._part([self._table.pop(key) for key in blocks])
        self._release(slots)
        self._compact_journal()

    def _compact_journal(self) -> None:
        """Rewrite the journal if it is worth it. Needs the journal lock."""
        if not self._journal.wants_compaction(len(self._table)):
            return
        with self._lock:
            generation = self._generation
        try:
            self._journal.compact(self._table.puts(), generation)
        except OSError as e:
            _log.warning("journal of %s could not be compacted: %s", self._name, e)

    def _part(self, slots: Sequence[int]) -> list[int]:
        """Those of *slots* that nobody reads; the others follow when their readers are gone."""
        self._parting.update(slot for slot in slots if slot in self._readers)
        return [slot for slot in slots if slot not in self._readers]

    def _release(self, slots: Sequence[int]) -> None:
        """*slots* are free; nobody else knows them."""
        if self._discard and slots:
            try:
                self._files.discard(slots)
            except OSError as e:
                _log.warning("disk store %s: room could not be given back: %s", self._name, e)
        with self._lock:
            for slot in slots:
                self._free.give(slot)


def _take(keys: set[StoreKey], key: StoreKey) -> bool:
    found = key in keys
    keys.discard(key)
    return found
