"""The journal of a disk store: which key is in which slot.

A header, then fixed records of ``RECORD_BYTES``, each with its own checksum. Record *i* carries
the sequence number ``first + i``. ``docs/on-disk-format.md`` has the byte layout.

Records are appended without a sync: a killed process loses none, a power failure may lose the
last ones. Only ``drop`` is durable when it returns. Every record carries the number of drops
before it, so a replay notices a drop that it cannot read, and then forgets all that is older.
"""

import logging
import os
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from kvstrata.core.errors import FormatError
from kvstrata.core.types import NAMESPACE_ID_BYTES, NamespaceId, StoreKey
from kvstrata.storage.checksum import DIGEST_BYTES, is_sealed, seal
from kvstrata.storage.crc import all_right
from kvstrata.storage.disk_files import read_file, replace_file, sync_directory, write_all
from kvstrata.storage.disk_system import FileSystem
from kvstrata.storage.superblock import FORMAT_VERSION, START_EMPTY, check_version

JOURNAL_NAME: Final = "kvstrata.journal"
COMPACT_RECORDS: Final = 65536
COMPACT_FACTOR: Final = 4
PUT, REMOVE, DROP = 1, 2, 3
HAS_PARENT: Final = 1

RECORD: Final = np.dtype(
    [
        ("crc", "<u4"),  # CRC-32 of all that follows
        ("kind", "u1"),
        ("flags", "u1"),
        ("zero", "<u2"),
        ("sequence", "<u8"),
        ("slot", "<u4"),
        ("drops", "<u4"),
        ("generation", "<u8"),
        ("key", "V48"),
        ("parent", "V48"),
    ]
)
RECORD_BYTES: Final = RECORD.itemsize

Records = np.ndarray[tuple[int], np.dtype[Any]]
"""An array of ``RECORD``: a journal, a part of one, or the blocks of a store in put order."""

_MAGIC: Final = b"KVSJOURN"
_HEADER: Final = struct.Struct("<8sII16sQQ")
_HEADER_BYTES: Final = 128
_SEALED_BYTES: Final = _HEADER.size + DIGEST_BYTES
_CHECKED: Final = struct.Struct(f"<I{RECORD_BYTES - 4}s")

_log = logging.getLogger(__name__)


class Entry(NamedTuple):
    """Where a block is."""

    slot: int
    generation: int
    parent: StoreKey | None


def put_records(blocks: Iterable[tuple[StoreKey, Entry]]) -> Records:
    """One PUT for each block, as ``Journal.put`` takes them."""
    rows = [
        (0, PUT, HAS_PARENT if parent else 0, 0, 0, slot, 0, generation, key, parent or b"")
        for key, (slot, generation, parent) in blocks
    ]
    return np.array(rows, RECORD)


@dataclass(slots=True)
class Replay:
    """What a journal says, as read at open."""

    puts: Records = field(default_factory=lambda: put_records([]))  # of the blocks that are there
    records: int = 0
    sequence: int = 0  # of the next record
    drops: int = 0  # namespaces dropped since the store was made
    generation: int = 1  # of the next block written; above all that were used
    compact: bool = False  # every record is valid and none is outdated
    lost: int = 0  # blocks that had to be taken out of puts
    damaged: int = 0  # records before the last valid one that had to be skipped
    torn_bytes: int = 0  # after the last valid record


def load_journal(system: FileSystem, directory: Path, store_id: bytes) -> Replay:
    """Replay the journal of store *store_id*; changes nothing on disk.

    No journal is an empty store. Records that fail their checksum are skipped. Raises
    ``FormatError`` if the header is damaged, of another version or of another store.
    """
    path = directory / JOURNAL_NAME
    try:
        data = memoryview(read_file(system, path))
    except FileNotFoundError:
        return Replay()
    replay = _load_header(path, data, store_id)
    count = (len(data) - _HEADER_BYTES) // RECORD_BYTES
    body = data[_HEADER_BYTES : _HEADER_BYTES + count * RECORD_BYTES]
    records = np.frombuffer(body, RECORD)
    valid = _intact(body) & (records["sequence"] - np.uint64(replay.sequence) == np.arange(count))
    replay.records = int(np.max(np.flatnonzero(valid), initial=-1)) + 1
    replay.damaged = int(np.count_nonzero(~valid[: replay.records]))
    replay.torn_bytes = len(data) - _HEADER_BYTES - RECORD_BYTES * replay.records
    if replay.damaged:
        _log.warning("%s: skipped %d damaged records", path, replay.damaged)
    _apply(path, records if valid.all() else records[valid], replay)
    replay.sequence += replay.records
    replay.compact = len(replay.puts) == replay.records and not replay.torn_bytes
    return replay


def _load_header(path: Path, data: memoryview, store_id: bytes) -> Replay:
    header = bytes(data[:_SEALED_BYTES])
    if len(data) < _HEADER_BYTES or not header.startswith(_MAGIC):
        raise FormatError(f"{path} is no journal of KVStrata", hint=START_EMPTY)
    _, version, drops, found_id, sequence, generation = _HEADER.unpack_from(header)
    check_version(path, version)
    if not is_sealed(header):
        raise FormatError(
            f"{path} is damaged: the checksum of its header is wrong", hint=START_EMPTY
        )
    if found_id != store_id:
        raise FormatError(
            f"{path} belongs to store {found_id.hex()}, expected {store_id.hex()}",
            hint=START_EMPTY,
        )
    return Replay(sequence=sequence, drops=drops, generation=generation)


def _intact(body: memoryview) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which records of *body* have the right checksum."""
    if all_right(body, RECORD_BYTES):
        return np.ones(len(body) // RECORD_BYTES, np.bool_)
    crc32 = zlib.crc32
    right = [crc32(rest) == crc for crc, rest in _CHECKED.iter_unpack(body)]
    return np.array(right, np.bool_)


def _apply(path: Path, records: Records, replay: Replay) -> None:
    """Set *replay* to what *records*, all of them valid, leave behind.

    A block is there if its PUT is the last record of its slot, and no later DROP covers it.
    """
    if not len(records):
        return
    kinds = records["kind"].copy()
    used = int(np.max(records["generation"][kinds == PUT], initial=0))
    replay.generation = max(replay.generation, used + 1)

    drops = records["drops"].astype(np.int64)
    lost = np.flatnonzero(drops - (kinds == DROP) != np.concatenate(([replay.drops], drops[:-1])))
    replay.drops = int(drops[-1])
    if len(lost):
        _log.warning("%s: a reset was unreadable, all older blocks are forgotten", path)
    after_lost = np.arange(len(records)) >= (lost[-1] if len(lost) else 0)

    of_slots = np.flatnonzero(after_lost & ((kinds == PUT) | (kinds == REMOVE)))
    _, from_end = np.unique(records["slot"][of_slots][::-1], return_index=True)
    last = np.sort(of_slots[len(of_slots) - 1 - from_end])
    there = last[kinds[last] == PUT]
    dropped = {
        bytes(records["key"][position])[:NAMESPACE_ID_BYTES]: position
        for position in np.flatnonzero(after_lost & (kinds == DROP)).tolist()
    }
    if dropped:
        keys = records["key"][there].tolist()
        there = there[
            [
                position > dropped.get(key[:NAMESPACE_ID_BYTES], -1)
                for key, position in zip(keys, there.tolist(), strict=True)
            ]
        ]
    replay.puts = records if len(there) == len(records) else records[there]


class Journal:
    """The open journal of one store. Not thread-safe: its owner serialises the calls.

    Every method raises ``OSError`` on failure and has then changed nothing, except that ``drop``
    may have been recorded without being durable.
    """

    def __init__(
        self, system: FileSystem, directory: Path, store_id: bytes, replay: Replay
    ) -> None:
        """Continue after *replay*, in a new compact file unless the old one is compact."""
        self._system = system
        self._directory = directory
        self._store_id = store_id
        self._sequence = replay.sequence
        self._drops = replay.drops
        self._records = replay.records
        self._torn = False
        self._name_durable = True
        self._retry_records = 0
        if replay.compact:
            self._fd = system.open(directory / JOURNAL_NAME, os.O_RDWR)
        else:
            self._fd = self._replace(replay.puts, replay.generation)

    def put(self, puts: Records) -> None:
        """Record where blocks are. Their data must be durable already."""
        self._append(puts)

    def remove(self, puts: Records) -> None:
        """Record that the blocks of *puts* are gone, before anything is written to their slots."""
        puts["kind"] = REMOVE
        self._append(puts)

    def drop(self, namespace: NamespaceId) -> None:
        """Record that every block of *namespace* is gone; call ``sync`` to make it durable."""
        self._drops += 1
        try:
            self._append(np.array([(0, DROP, 0, 0, 0, 0, 0, 0, namespace, b"")], RECORD))
        except OSError:
            self._drops -= 1
            raise

    def sync(self) -> None:
        """Make every record durable."""
        self._system.fdatasync(self._fd)
        if not self._name_durable:
            sync_directory(self._system, self._directory)
            self._name_durable = True

    def wants_compaction(self, live: int) -> bool:
        """Whether most records are outdated, with *live* blocks in the store."""
        return self._records > max(COMPACT_RECORDS, COMPACT_FACTOR * live, self._retry_records)

    def compact(self, puts: Records, generation: int) -> None:
        """Rewrite the journal as *puts*; *generation* is the next to be used."""
        self._retry_records = self._records + COMPACT_RECORDS
        fd = self._replace(puts, generation)
        self._system.close(self._fd)
        self._fd = fd
        self._torn = False
        self._retry_records = 0

    def close(self) -> None:
        try:
            self.sync()
        except OSError as e:
            _log.warning("journal of %s could not be synced at close: %s", self._directory, e)
        self._system.close(self._fd)

    def _append(self, records: Records) -> None:
        end_bytes = _HEADER_BYTES + self._records * RECORD_BYTES
        if self._torn:
            self._system.ftruncate(self._fd, end_bytes)
            self._torn = False
        data = self._pack(records)
        try:
            write_all(self._system, self._fd, data, end_bytes)
        except OSError:
            self._torn = True
            self._system.ftruncate(self._fd, end_bytes)
            self._torn = False
            raise
        self._records += len(records)
        self._sequence += len(records)

    def _pack(self, records: Records) -> bytes:
        """The bytes of *records*, numbered from the next sequence number on."""
        records["sequence"] = np.arange(self._sequence, self._sequence + len(records))
        records["drops"] = self._drops
        bodies = _CHECKED.iter_unpack(records.tobytes())
        records["crc"] = [zlib.crc32(body) for _, body in bodies]
        return records.tobytes()

    def _replace(self, puts: Records, generation: int) -> int:
        header = _HEADER.pack(
            _MAGIC, FORMAT_VERSION, self._drops, self._store_id, self._sequence, generation
        )
        data = seal(header).ljust(_HEADER_BYTES, b"\0") + self._pack(puts)
        fd = replace_file(self._system, self._directory, JOURNAL_NAME, data)
        self._records = len(puts)
        self._sequence += len(puts)
        self._name_durable = False
        try:
            sync_directory(self._system, self._directory)
            self._name_durable = True
        except OSError as e:
            _log.warning("%s could not be synced: %s", self._directory, e)
        return fd
