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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from kvstrata.core.errors import FormatError
from kvstrata.core.types import NAMESPACE_ID_BYTES, NamespaceId, StoreKey
from kvstrata.storage.checksum import DIGEST_BYTES, is_sealed, seal
from kvstrata.storage.disk_files import replace_file, sync_directory, write_all
from kvstrata.storage.superblock import FORMAT_VERSION, check_version

JOURNAL_NAME: Final = "kvstrata.journal"
RECORD_BYTES: Final = 128
COMPACT_RECORDS: Final = 65536
COMPACT_FACTOR: Final = 4

_MAGIC: Final = b"KVSJOURN"
_HEADER: Final = struct.Struct("<8sII16sQQ")
_HEADER_BYTES: Final = 128
_SEALED_BYTES: Final = _HEADER.size + DIGEST_BYTES
_RECORD: Final = struct.Struct("<BBHQIIQ48s48s")  # follows the CRC-32 of itself
_CRC: Final = struct.Struct("<I")
_PUT, _REMOVE, _DROP = 1, 2, 3
_HAS_PARENT: Final = 1

_log = logging.getLogger(__name__)


class Entry(NamedTuple):
    """Where a block is."""

    slot: int
    generation: int
    parent: StoreKey | None


@dataclass(slots=True)
class Replay:
    """What a journal says, as read at open."""

    entries: dict[StoreKey, Entry] = field(default_factory=dict)
    records: int = 0
    sequence: int = 0  # of the next record
    drops: int = 0  # namespaces dropped since the store was made
    generation: int = 1  # of the next block written; above all that were used
    compact: bool = False  # every record is valid and none is outdated


class _Record(NamedTuple):
    kind: int
    flags: int
    reserved: int
    sequence: int
    slot: int
    drops: int
    generation: int
    key: bytes
    parent: bytes


def load_journal(directory: Path, store_id: bytes) -> Replay:
    """Replay the journal of store *store_id*; changes nothing on disk.

    No journal is an empty store. Records that fail their checksum are skipped. Raises
    ``FormatError`` if the header is damaged, of another version or of another store.
    """
    path = directory / JOURNAL_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Replay()
    replay = _load_header(path, data, store_id)
    first = replay.sequence
    found = _replay(data, replay)
    replay.compact = len(replay.entries) == replay.records and _HEADER_BYTES + (
        RECORD_BYTES * replay.records
    ) == len(data)
    replay.sequence = first + replay.records
    if found.damaged:
        _log.warning("%s: skipped %d damaged records", path, found.damaged)
    if found.lost_drops:
        _log.warning("%s: a reset was unreadable, all older blocks are forgotten", path)
    return replay


def _load_header(path: Path, data: bytes, store_id: bytes) -> Replay:
    header = data[:_SEALED_BYTES]
    hint = "give the store another directory, or delete this one to start empty"
    if len(data) < _HEADER_BYTES or not header.startswith(_MAGIC):
        raise FormatError(f"{path} is no journal of KVStrata", hint=hint)
    _, version, drops, found_id, sequence, generation = _HEADER.unpack_from(header)
    check_version(path, version)
    if not is_sealed(header):
        raise FormatError(f"{path} is damaged: the checksum of its header is wrong", hint=hint)
    if found_id != store_id:
        raise FormatError(
            f"{path} belongs to store {found_id.hex()}, expected {store_id.hex()}", hint=hint
        )
    return Replay(sequence=sequence, drops=drops, generation=generation)


@dataclass(slots=True)
class _Replayer:
    """The map while it is rebuilt: by namespace, so that dropping one is one step."""

    drops: int
    namespaces: dict[NamespaceId, dict[StoreKey, Entry]] = field(default_factory=dict)
    owners: dict[int, StoreKey] = field(default_factory=dict)
    generation: int = 0
    damaged: int = 0
    lost_drops: bool = False

    def apply(self, record: _Record) -> None:
        expected = self.drops + (record.kind == _DROP)
        if record.drops != expected:
            self.lost_drops = True
            self.namespaces.clear()
        self.drops = record.drops
        if record.kind == _PUT:
            self._put(record)
        elif record.kind == _REMOVE:
            self._remove(record.key, record.slot)
        elif record.kind == _DROP:
            self.namespaces.pop(record.key[:NAMESPACE_ID_BYTES], None)

    def _put(self, record: _Record) -> None:
        owner = self.owners.get(record.slot)
        if owner is not None and owner != record.key:
            self._remove(owner, record.slot)
        parent = record.parent if record.flags & _HAS_PARENT else None
        entry = Entry(record.slot, record.generation, parent)
        self.namespaces.setdefault(record.key[:NAMESPACE_ID_BYTES], {})[record.key] = entry
        self.owners[record.slot] = record.key
        self.generation = max(self.generation, record.generation)

    def _remove(self, key: StoreKey, slot: int) -> None:
        blocks = self.namespaces.get(key[:NAMESPACE_ID_BYTES], {})
        entry = blocks.get(key)
        if entry is not None and entry.slot == slot:
            del blocks[key]


def _replay(data: bytes, replay: Replay) -> _Replayer:
    """Apply every valid record of *data* to *replay*; what fails at the end is a torn tail."""
    replayer = _Replayer(replay.drops)
    unapplied = 0
    for position, record in enumerate(_records(data)):
        if record is None or record.sequence != replay.sequence + position:
            unapplied += 1
            continue
        replayer.apply(record)
        replayer.damaged += unapplied
        unapplied = 0
        replay.records = position + 1
    for blocks in replayer.namespaces.values():
        replay.entries.update(blocks)
    replay.drops = replayer.drops
    replay.generation = max(replay.generation, replayer.generation + 1)
    return replayer


def _records(data: bytes) -> Iterator[_Record | None]:
    """Each whole record of *data*, ``None`` for one that fails its checksum."""
    view = memoryview(data)
    crc32, crc_bytes = zlib.crc32, _CRC.size
    for start in range(_HEADER_BYTES, len(data) - RECORD_BYTES + 1, RECORD_BYTES):
        body = view[start + crc_bytes : start + RECORD_BYTES]
        if crc32(body) == _CRC.unpack_from(data, start)[0]:
            yield _Record._make(_RECORD.unpack(body))
        else:
            yield None


class Journal:
    """The open journal of one store. Not thread-safe: its owner serialises the calls.

    Every method raises ``OSError`` on failure and has then changed nothing, except that ``drop``
    may have been recorded without being durable.
    """

    def __init__(self, directory: Path, store_id: bytes, replay: Replay) -> None:
        """Continue after *replay*, in a new compact file unless the old one is compact."""
        self._directory = directory
        self._store_id = store_id
        self._sequence = replay.sequence
        self._drops = replay.drops
        self._records = replay.records
        self._torn = False
        self._name_durable = True
        self._retry_records = 0
        if replay.compact:
            self._fd = os.open(directory / JOURNAL_NAME, os.O_RDWR | os.O_CLOEXEC)
        else:
            self._fd = self._replace(replay.entries, replay.generation)

    def put(self, blocks: Iterable[tuple[StoreKey, Entry]]) -> None:
        """Record where *blocks* are. Their data must be durable already."""
        self._append([(_PUT, key, entry) for key, entry in blocks])

    def remove(self, blocks: Iterable[tuple[StoreKey, Entry]]) -> None:
        """Record that *blocks* are gone. Their slots must not be written before this returns."""
        self._append([(_REMOVE, key, entry) for key, entry in blocks])

    def drop(self, namespace: NamespaceId) -> None:
        """Record that every block of *namespace* is gone; call ``sync`` to make it durable."""
        self._drops += 1
        try:
            self._append([(_DROP, namespace, Entry(0, 0, None))])
        except OSError:
            self._drops -= 1
            raise

    def sync(self) -> None:
        """Make every record durable."""
        os.fdatasync(self._fd)
        if not self._name_durable:
            sync_directory(self._directory)
            self._name_durable = True

    def wants_compaction(self, live: int) -> bool:
        """Whether most records are outdated, with *live* blocks in the store."""
        return self._records > max(COMPACT_RECORDS, COMPACT_FACTOR * live, self._retry_records)

    def compact(self, entries: Mapping[StoreKey, Entry], generation: int) -> None:
        """Rewrite the journal as one record per entry; *generation* is the next to be used."""
        self._retry_records = self._records + COMPACT_RECORDS
        fd = self._replace(entries, generation)
        os.close(self._fd)
        self._fd = fd
        self._torn = False
        self._retry_records = 0

    def close(self) -> None:
        try:
            self.sync()
        except OSError as e:
            _log.warning("journal of %s could not be synced at close: %s", self._directory, e)
        os.close(self._fd)

    def _append(self, records: list[tuple[int, bytes, Entry]]) -> None:
        end_bytes = _HEADER_BYTES + self._records * RECORD_BYTES
        if self._torn:
            os.ftruncate(self._fd, end_bytes)
            self._torn = False
        data = self._pack(records)
        try:
            write_all(self._fd, data, end_bytes)
        except OSError:
            self._torn = True
            os.ftruncate(self._fd, end_bytes)
            self._torn = False
            raise
        self._records += len(records)
        self._sequence += len(records)

    def _pack(self, records: Iterable[tuple[int, bytes, Entry]]) -> bytes:
        packed = bytearray()
        for sequence, (kind, key, entry) in enumerate(records, self._sequence):
            slot, generation, parent = entry
            flags = _HAS_PARENT if parent is not None else 0
            body = _RECORD.pack(
                kind, flags, 0, sequence, slot, self._drops, generation, key, parent or b""
            )
            packed += _CRC.pack(zlib.crc32(body))
            packed += body
        return bytes(packed)

    def _replace(self, entries: Mapping[StoreKey, Entry], generation: int) -> int:
        header = _HEADER.pack(
            _MAGIC, FORMAT_VERSION, self._drops, self._store_id, self._sequence, generation
        )
        records = self._pack((_PUT, key, entry) for key, entry in entries.items())
        data = seal(header).ljust(_HEADER_BYTES, b"\0") + records
        fd = replace_file(self._directory, JOURNAL_NAME, data)
        self._records = len(entries)
        self._sequence += len(entries)
        self._name_durable = False
        try:
            sync_directory(self._directory)
            self._name_durable = True
        except OSError as e:
            _log.warning("%s could not be synced: %s", self._directory, e)
        return fd
