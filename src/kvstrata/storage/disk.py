"""The disk tier: blocks in fixed slots of preallocated files, found through a journal.

``docs/on-disk-format.md`` describes the directory.
"""

import errno
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, Semaphore

import numpy as np

from kvstrata.core.errors import InvariantViolated, TierUnavailable
from kvstrata.core.keys import ABSENT, BlockIds
from kvstrata.core.types import NAMESPACE_ID_BYTES, NamespaceId, Read, StoreKey, Write
from kvstrata.storage.batch import check_keys, check_lengths
from kvstrata.storage.disk_directory import Reservation, Wanted, open_directories, store_name
from kvstrata.storage.disk_free import FreeSlots
from kvstrata.storage.disk_lock import LOCK_TIMEOUT_SECONDS
from kvstrata.storage.disk_slots import Piece
from kvstrata.storage.disk_system import NO_ROOM, FileSystem
from kvstrata.storage.disk_table import BlockTable, StoredArrays
from kvstrata.storage.journal import Entry, put_records
from kvstrata.storage.store import StoreStatistics

__all__ = ["DiskStore"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Reservation:
    """The slots that one call fills; nobody else sees them until they are published."""

    positions: list[int]  # in the batch of the call
    pieces: list[Piece]
    dropped: set[int] = field(default_factory=set)  # numbers of pieces whose namespace was dropped
    published: set[int] = field(default_factory=set)  # numbers of pieces

    @property
    def slots(self) -> list[int]:
        return [piece.entry.slot for piece in self.pieces]


class DiskStore:
    """A persistent ``Store`` in one or more directories, used by one process at a time.

    * A block that was reported ``STORED`` survives the death of the process at any moment; a
      power failure may lose the last writes, but never serves a wrong byte.
    * Every read is proved by key, generation and checksum; what fails is ``Read.CORRUPT``,
      forgotten and counted. So is a slot that the disk cannot read while it reads others.
    * A failed batch raises ``TierUnavailable``; a failed write keeps nothing of its batch. Its cause
      is ``full`` where the file system is: what is stored can still be read.
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
        write_depth: int = 4,
        lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
        reservation: Reservation | None = None,
        system: FileSystem | None = None,
    ) -> None:
        """Open the store in *paths*, or make it, or grow it to *capacity_bytes*.

        *capacity_bytes* bounds the slot files of all directories together; one slot is
        ``block_bytes`` rounded up to 4 KiB, plus 4 KiB. With *discard* the room of blocks that
        go is given back to the file system (TRIM), and taken again when it is written. Of the calls
        of ``write``, *write_depth* at most are at the disk at a time. Raises ``ConfigError``
        (``FormatError`` for what a directory holds) and then has changed nothing.
        Waits up to *lock_timeout_seconds* for another process, unless this one has a *reservation*.
        """
        wanted = Wanted(block_bytes, capacity_bytes, max_blocks_per_file)
        self._name = store_name(paths)
        self._block_bytes = block_bytes
        self._discard = discard
        self._at_disk = Semaphore(write_depth)
        self._directories, replay = open_directories(
            system or FileSystem(), paths, wanted, lock_timeout_seconds, reservation
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
        self._reserved: set[_Reservation] = set()
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

    def stored(self) -> StoredArrays:
        """Every block held at the time of the call, a parent before its children."""
        with self._call("looked up"), self._lock:
            return self._table.stored()

    def exists(self, keys: Sequence[StoreKey]) -> list[bool]:
        check_keys(keys)
        with self._call("looked up"), self._lock:
            found: list[bool] = (self._table.find(keys) != ABSENT).tolist()
            return found

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
            fates, reserved = self._reserve(keys, parents, buffers)
            try:
                self._files.write(reserved.pieces, self._at_disk)
                with self._at_disk:
                    self._files.sync(reserved.slots)
                self._publish(reserved, fates)
            finally:
                self._release_unpublished(reserved)
            return fates

    def remove(self, keys: Sequence[StoreKey]) -> list[bool]:
        check_keys(keys)
        unreported = set(keys)
        first = [_take(unreported, key) for key in keys]
        with self._call("changed"), self._journal_lock:
            with self._lock:
                ids = self._table.find(keys)
            found = (ids != ABSENT) & np.array(first, np.bool_)
            if found.any():
                self._forget(ids[found])
            removed: list[bool] = found.tolist()
            return removed

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
                for reserved in self._reserved:
                    reserved.dropped.update(
                        number
                        for number, piece in enumerate(reserved.pieces)
                        if piece.key.startswith(namespace_id)
                    )
                pieces = self._table.of_namespace(namespace_id)
            slots: list[int] = []
            blocks = 0
            for ids in pieces:  # nothing is published meanwhile: the journal is ours
                with self._lock:
                    slots += self._part(self._table.slots(ids))
                    self._table.forget(ids)
                    blocks += len(ids)
            try:
                self._journal.sync()
            finally:
                self._release(slots)
            return blocks

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
            is_full = e.errno in NO_ROOM
            raise TierUnavailable(
                f"disk store {self._name} cannot be {done}: {e}",
                hint="free space on its file system" if is_full else None,
                cause="full" if is_full else "io",
            ) from e
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
            entries = self._table.entries(self._table.find(keys))
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
        for (position, entry), is_right in zip(held, self._prove(pieces), strict=True):
            fates[position] = Read.HIT if is_right else Read.CORRUPT
            if not is_right:
                self._forget_damaged(keys[position], entry)
        return fates

    def _prove(self, pieces: Sequence[Piece]) -> list[bool]:
        """Which of *pieces* are read and right. A slot that the disk cannot read is damaged."""
        try:
            return self._files.read(pieces)
        except OSError as e:
            if e.errno != errno.EIO:
                raise
            return self._files.read_apart(pieces)

    def _forget_damaged(self, key: StoreKey, entry: Entry) -> None:
        with self._journal_lock:
            with self._lock:
                ids = self._table.find([key])
                if self._table.entries(ids) != [entry]:
                    return  # removed or replaced meanwhile
            self._forget(ids)
            with self._lock:
                self._corrupt_blocks += 1
        _log.warning("disk store %s: slot %d is damaged", self._name, entry.slot)

    def _reserve(
        self,
        keys: Sequence[StoreKey],
        parents: Sequence[StoreKey | None],
        buffers: Sequence[memoryview],
    ) -> tuple[list[Write], _Reservation]:
        fates = [Write.EXISTS] * len(keys)
        with self._lock:
            fresh: dict[StoreKey, int] = {}
            for position in np.flatnonzero(self._table.find(keys) == ABSENT).tolist():
                fresh.setdefault(keys[position], position)
            slots = self._free.take(len(fresh))
            positions = list(fresh.values())[: len(slots)]
            reserved = _Reservation(
                positions,
                [
                    Piece(
                        keys[position],
                        Entry(slot, generation, parents[position]),
                        buffers[position],
                    )
                    for generation, (position, slot) in enumerate(
                        zip(positions, slots, strict=True), self._generation
                    )
                ],
            )
            self._generation += len(slots)
            self._reserved.add(reserved)
        for position in positions:
            fates[position] = Write.STORED
        if len(slots) < len(fresh):
            full = set(list(fresh)[len(slots) :])
            fates = [Write.FULL if key in full else f for key, f in zip(keys, fates, strict=True)]
        return fates, reserved

    def _publish(self, reserved: _Reservation, fates: list[Write]) -> None:
        """Make written blocks visible, except where another thread or a drop came first."""
        with self._journal_lock:
            with self._lock:
                there = self._table.find([piece.key for piece in reserved.pieces]) != ABSENT
            for number in np.flatnonzero(there).tolist():
                fates[reserved.positions[number]] = Write.EXISTS
            fresh = [n for n in np.flatnonzero(~there).tolist() if n not in reserved.dropped]
            if not fresh:
                return
            pieces = [reserved.pieces[number] for number in fresh]
            puts = put_records((piece.key, piece.entry) for piece in pieces)
            self._journal.put(puts)
            with self._lock:
                self._table.put(puts)
                reserved.published.update(fresh)
            self._compact_journal()

    def _release_unpublished(self, reserved: _Reservation) -> None:
        with self._lock:
            self._reserved.remove(reserved)
        slots = enumerate(reserved.slots)
        self._release([slot for number, slot in slots if number not in reserved.published])

    def _forget(self, ids: BlockIds) -> None:
        """Journal that blocks are gone, then free their slots. Needs the journal lock."""
        self._journal.remove(self._table.records(ids))
        with self._lock:
            slots = self._part(self._table.slots(ids))
            self._table.forget(ids)
        self._release(slots)
        self._compact_journal()

    def _compact_journal(self) -> None:
        """Rewrite the journal if it is worth it. Needs the journal lock."""
        if not self._journal.wants_compaction(len(self._table)):
            return
        with self._lock:
            generation = self._generation
        try:
            self._journal.compact(self._table.all_records(), generation)
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
            self._free.give(slots)


def _take(keys: set[StoreKey], key: StoreKey) -> bool:
    found = key in keys
    keys.discard(key)
    return found
