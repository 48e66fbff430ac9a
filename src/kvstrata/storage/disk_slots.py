"""Slot files: fixed 4 KiB-aligned slots, each a payload and a footer that proves it.

Payload and footer of neighbouring slots travel in one ``pwritev`` or ``preadv``, between the disk
and the caller's memory with no copy in between, past the page cache where the file system can
(``O_DIRECT``). ``docs/on-disk-format.md`` has the byte layout.
"""

import ctypes
import errno
import mmap
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from kvstrata.core.types import StoreKey
from kvstrata.storage.checksum import DIGEST_BYTES, digest, is_sealed, seal
from kvstrata.storage.disk_allocation import slot_path
from kvstrata.storage.disk_system import FileSystem
from kvstrata.storage.journal import HAS_PARENT, Entry
from kvstrata.storage.superblock import FORMAT_VERSION, PAGE_BYTES, Superblock

_MAGIC: Final = b"KVSBLOCK"
_FOOTER: Final = struct.Struct("<8sIIQQ48s48s16s")
_SEALED_BYTES: Final = _FOOTER.size + DIGEST_BYTES
_NOT_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)
_CALL_BYTES: Final = 8 << 20  # one call is as fast as any larger one, and others get their turn
_CALL_SLOTS: Final = 512  # IOV_MAX is 1024, and a slot is two pieces


class Piece(NamedTuple):
    """One block between its slot and the caller's memory."""

    key: StoreKey
    entry: Entry
    buffer: memoryview


class _Run(NamedTuple):
    """Neighbouring slots of one file."""

    fd: int
    offset_bytes: int
    positions: list[int]  # of the slots in what the caller has given


class _Scratch(threading.local):
    """Page-aligned memory of each thread."""

    def __init__(self, length_bytes: int) -> None:
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.memory = memoryview(mmap.mmap(-1, length_bytes, flags=private))


class SlotFiles:
    """The open slot files of one store. Threads may use different slots at once."""

    def __init__(self, system: FileSystem, paths: Sequence[Path], superblock: Superblock) -> None:
        self._system = system
        self._superblock = superblock
        self._slot_bytes = superblock.slot_bytes
        self._block_bytes = superblock.block_bytes
        self._tail_bytes = self._slot_bytes - self._block_bytes  # from the payload's end on
        self._call_slots = min(_CALL_SLOTS, max(1, _CALL_BYTES // self._block_bytes))
        self._tail_room_bytes = -(-self._tail_bytes // PAGE_BYTES) * PAGE_BYTES
        self._scratch = _Scratch(max(self._slot_bytes, self._call_slots * self._tail_room_bytes))
        first_files = [slot_path(path, 0) for path in paths]
        self.direct = all(_reads_directly(system, file) for file in first_files)
        flags = os.O_RDWR | (os.O_DIRECT if self.direct else 0)
        self._fds: list[list[int]] = [[] for _ in paths]
        with ExitStack() as undo:
            undo.callback(self.close)
            for number, path in enumerate(paths):
                for file in range(len(superblock.file_slots(number))):
                    self._fds[number].append(system.open(slot_path(path, file), flags))
            undo.pop_all()

    def read(self, pieces: Sequence[Piece]) -> list[bool]:
        """Fill every buffer from its slot; ``False`` where the slot does not prove to be it.

        A buffer that is not page-aligned costs one copy, and a call of its own, where the files
        are read directly. After ``False`` the buffer holds garbage. Raises ``OSError`` if the
        disk does.
        """
        proved = [False] * len(pieces)
        for run in self._runs_of(pieces):
            mine = [pieces[position] for position in run.positions]
            for position, is_proved in zip(run.positions, self._read_run(run, mine), strict=True):
                proved[position] = is_proved
        return proved

    def read_apart(self, pieces: Sequence[Piece]) -> list[bool]:
        """``read``, one slot after the other; ``False`` also where only that slot cannot be read.

        Raises ``OSError`` if a slot cannot be read, and nothing else in its file either: then it
        is the disk.
        """
        proved = []
        for piece in pieces:
            try:
                proved += self.read([piece])
            except OSError as e:
                if e.errno != errno.EIO or not self._can_be_read(piece.entry.slot):
                    raise
                proved.append(False)
        return proved

    def write(self, pieces: Sequence[Piece], at_disk: AbstractContextManager[object]) -> None:
        """Write every buffer and its footer into its slot; durable after ``sync``.

        Calls of the disk are made within *at_disk*, the checksums before them are not.
        """
        ready: list[tuple[_Run, list[memoryview]]] = []
        tails = 0  # in use, of those that scratch memory has room for
        for run in self._runs_of(pieces):
            mine = [pieces[position] for position in run.positions]
            bounced = self._must_bounce(mine[0].buffer)
            if bounced or tails + len(mine) > self._call_slots:
                self._write_runs(ready, at_disk)
                ready, tails = [], 0
            ready.append((run, self._sealed(mine, tails)))
            tails += self._call_slots if bounced else len(mine)
        self._write_runs(ready, at_disk)

    def sync(self, slots: Sequence[int]) -> None:
        """Make what was written into *slots* durable: one ``fdatasync`` per file."""
        directories, files, _ = self._superblock.places(np.array(slots, np.int64))
        for directory, file in set(zip(directories.tolist(), files.tolist(), strict=True)):
            self._system.fdatasync(self._fds[directory][file])

    def discard(self, slots: Sequence[int]) -> None:
        """Give the room of *slots* back to the file system until they are written again."""
        for run in self._runs(slots, [False] * len(slots), len(slots)):
            length_bytes = len(run.positions) * self._slot_bytes
            self._system.punch_hole(run.fd, run.offset_bytes, length_bytes)

    def close(self) -> None:
        while self._fds:
            for fd in self._fds.pop():
                self._system.close(fd)

    def _can_be_read(self, slot: int) -> bool:
        """Whether the disk can read the first or the last page of the file of *slot*."""
        place = self._superblock.place(slot)
        fd = self._fds[place.directory][place.file]
        end_bytes = self._superblock.file_slots(place.directory)[place.file] * self._slot_bytes
        for offset_bytes in (0, end_bytes - PAGE_BYTES):
            with suppress(OSError):
                self._system.preadv(fd, [self._scratch.memory[:PAGE_BYTES]], offset_bytes)
                return True
        return False

    def _runs_of(self, pieces: Sequence[Piece]) -> Iterator[_Run]:
        """*pieces* grouped to what one call moves."""
        slots = [piece.entry.slot for piece in pieces]
        alone = [self._must_bounce(piece.buffer) for piece in pieces]
        return self._runs(slots, alone, self._call_slots)

    def _runs(self, slots: Sequence[int], alone: Sequence[bool], most: int) -> Iterator[_Run]:
        """*slots* grouped to neighbours: *most* at most, and those *alone* each for itself."""
        order = np.argsort(np.array(slots, np.int64), kind="stable")
        places = self._superblock.places(np.array(slots, np.int64)[order])
        run = _Run(-1, -1, [])
        next_place: tuple[int, int, int] | None = None
        columns = order.tolist(), *(column.tolist() for column in places)
        for position, directory, file, row in zip(*columns, strict=True):
            here = (directory, file, row)
            if here != next_place or alone[position] or len(run.positions) == most:
                if run.positions:
                    yield run
                run = _Run(self._fds[directory][file], row * self._slot_bytes, [])
            run.positions.append(position)
            next_place = None if alone[position] else (directory, file, row + 1)
        if run.positions:
            yield run

    def _read_run(self, run: _Run, pieces: Sequence[Piece]) -> list[bool]:
        bounced = self._must_bounce(pieces[0].buffer)
        parts = self._bounce_parts() if bounced else self._parts(pieces, 0)
        whole = self._system.preadv(run.fd, parts, run.offset_bytes) // self._slot_bytes
        if bounced:
            payload = parts[0][: self._block_bytes]
            if not (whole and self._proves(parts[0], pieces[0], payload)):
                return [False]
            np.copyto(_array(pieces[0].buffer), _array(payload))
            return [True]
        proved = [
            self._proves(tail, piece, piece.buffer)
            for piece, tail in zip(pieces[:whole], parts[1 : 2 * whole : 2], strict=True)
        ]
        if len(pieces) == 1:
            return proved or [False]
        # After a short read: a slot alone is read whole or not there.
        for number, piece in enumerate(pieces[whole:], whole):
            rest = _Run(run.fd, run.offset_bytes + number * self._slot_bytes, [0])
            proved += self._read_run(rest, [piece])
        return proved

    def _write_runs(
        self,
        ready: Sequence[tuple[_Run, list[memoryview]]],
        at_disk: AbstractContextManager[object],
    ) -> None:
        if ready:
            with at_disk:
                for run, parts in ready:
                    self._write_vectors(run.fd, parts, run.offset_bytes)

    def _sealed(self, pieces: Sequence[Piece], tails: int) -> list[memoryview]:
        """*pieces*, a run, with their footers in scratch memory behind as many *tails*."""
        if self._must_bounce(pieces[0].buffer):
            parts = self._bounce_parts()
            np.copyto(_array(parts[0][: self._block_bytes]), _array(pieces[0].buffer))
            rooms = parts
        else:
            parts = self._parts(pieces, tails)
            rooms = parts[1::2]
        for piece, tail in zip(pieces, rooms, strict=True):
            tail[-PAGE_BYTES:][:_SEALED_BYTES] = self._footer(piece)
        return parts

    def _parts(self, pieces: Sequence[Piece], tails: int) -> list[memoryview]:
        """Buffer, rest of the slot, buffer, rest of the slot: what one vectored call moves."""
        parts: list[memoryview] = []
        for number, piece in enumerate(pieces, tails):
            start = number * self._tail_room_bytes
            parts += [piece.buffer, self._scratch.memory[start : start + self._tail_bytes]]
        return parts

    def _bounce_parts(self) -> list[memoryview]:
        """A whole slot in scratch memory."""
        return [self._scratch.memory[: self._slot_bytes]]

    def _must_bounce(self, buffer: memoryview) -> bool:
        if not self.direct:
            return False
        return bool(self._block_bytes % PAGE_BYTES or _address(buffer) % PAGE_BYTES)

    def _footer(self, piece: Piece) -> bytes:
        parent = piece.entry.parent
        body = _FOOTER.pack(
            _MAGIC,
            FORMAT_VERSION,
            HAS_PARENT if parent is not None else 0,
            piece.entry.generation,
            self._block_bytes,
            piece.key,
            parent or b"",
            digest(piece.buffer),
        )
        return seal(body)

    def _proves(self, tail: memoryview, piece: Piece, payload: memoryview) -> bool:
        """Whether the footer at the end of *tail* says that *payload* is the block of *piece*."""
        footer = tail[-PAGE_BYTES:][:_SEALED_BYTES]
        if not is_sealed(footer):
            return False
        magic, version, _, generation, block_bytes, key, _, checksum = _FOOTER.unpack_from(footer)
        found = (magic, version, generation, block_bytes, key)
        wanted = (_MAGIC, FORMAT_VERSION, piece.entry.generation, self._block_bytes, piece.key)
        return found == wanted and digest(payload) == checksum

    def _write_vectors(self, fd: int, parts: list[memoryview], offset_bytes: int) -> None:
        rest = parts
        while rest:
            written = self._system.pwritev(fd, rest, offset_bytes)
            if written == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            offset_bytes += written
            done = 0
            while done < len(rest) and written >= rest[done].nbytes:
                written -= rest[done].nbytes
                done += 1
            rest = rest[done:]
            if written:
                rest[0] = rest[0].cast("B")[written:]


def _reads_directly(system: FileSystem, path: Path) -> bool:
    """Whether the file system takes ``O_DIRECT`` reads of one page."""
    try:
        fd = system.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError as e:
        if e.errno in _NOT_DIRECT:
            return False
        raise
    try:
        return system.preadv(fd, [memoryview(mmap.mmap(-1, PAGE_BYTES))], 0) == PAGE_BYTES
    except OSError as e:
        if e.errno in _NOT_DIRECT:
            return False
        raise
    finally:
        system.close(fd)


def _array(view: memoryview) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(view, np.uint8)


def _address(view: memoryview) -> int:
    if view.readonly:
        return int(_array(view).__array_interface__["data"][0])
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
