"""Slot files: fixed 4 KiB-aligned slots, each a payload and a footer that proves it.

Payload and footer of neighbouring slots travel in one ``pwritev`` or ``preadv``, between the disk
and the caller's memory with no copy in between, past the page cache where the file system can
(``O_DIRECT``). ``docs/on-disk-format.md`` has the byte layout.
"""

import errno
import mmap
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
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
        self._call_slots = min(_CALL_SLOTS, max(1, _CALL_BYTES // self._slot_bytes))
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
        for run in self._runs(pieces):
            for position, is_proved in zip(
                run, self._read_run([pieces[position] for position in run]), strict=True
            ):
                proved[position] = is_proved
        return proved

    def write(self, pieces: Sequence[Piece]) -> None:
        """Write every buffer and its footer into its slot; durable after ``sync``."""
        for run in self._runs(pieces):
            self._write_run([pieces[position] for position in run])

    def sync(self, slots: Iterable[int]) -> None:
        """Make what was written into *slots* durable: one ``fdatasync`` per file."""
        for directory, file in {self._superblock.place(slot)[:2] for slot in slots}:
            self._system.fdatasync(self._fds[directory][file])

    def discard(self, slots: Iterable[int]) -> None:
        """Give the room of *slots* back to the file system until they are written again."""
        run: list[int] = []
        for slot in [*sorted(slots), -1]:
            if run and not self._adjoin(run[-1], slot):
                fd, offset_bytes = self._locate(run[0])
                self._system.punch_hole(fd, offset_bytes, len(run) * self._slot_bytes)
                run = []
            run.append(slot)

    def close(self) -> None:
        while self._fds:
            for fd in self._fds.pop():
                self._system.close(fd)

    def _runs(self, pieces: Sequence[Piece]) -> Iterator[list[int]]:
        """The positions of *pieces*, grouped to what one call moves."""
        run: list[int] = []
        last = -1
        for position in sorted(range(len(pieces)), key=lambda p: pieces[p].entry.slot):
            slot = pieces[position].entry.slot
            bounced = self._must_bounce(pieces[position].buffer)
            if run and (bounced or len(run) == self._call_slots or not self._adjoin(last, slot)):
                yield run
                run = []
            run.append(position)
            last = -1 if bounced else slot
        if run:
            yield run

    def _adjoin(self, slot: int, other: int) -> bool:
        """Whether *other* comes right after *slot* in the same file."""
        if other != slot + 1 or slot < 0:
            return False
        directory, file, position = self._superblock.place(slot)
        return self._superblock.place(other) == (directory, file, position + 1)

    def _read_run(self, pieces: Sequence[Piece]) -> list[bool]:
        bounced = self._must_bounce(pieces[0].buffer)
        parts = self._bounce_parts() if bounced else self._parts(pieces)
        fd, offset_bytes = self._locate(pieces[0].entry.slot)
        whole = self._system.preadv(fd, parts, offset_bytes) // self._slot_bytes
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
        for piece in pieces[whole:]:  # after a short read: a slot alone is read whole or not there
            proved += self._read_run([piece])
        return proved

    def _write_run(self, pieces: Sequence[Piece]) -> None:
        if self._must_bounce(pieces[0].buffer):
            parts = self._bounce_parts()
            np.copyto(_array(parts[0][: self._block_bytes]), _array(pieces[0].buffer))
            tails = parts
        else:
            parts = self._parts(pieces)
            tails = parts[1::2]
        for piece, tail in zip(pieces, tails, strict=True):
            tail[-PAGE_BYTES:][:_SEALED_BYTES] = self._footer(piece)
        fd, offset_bytes = self._locate(pieces[0].entry.slot)
        self._write_vectors(fd, parts, offset_bytes)

    def _parts(self, pieces: Sequence[Piece]) -> list[memoryview]:
        """Buffer, rest of the slot, buffer, rest of the slot: what one vectored call moves."""
        parts: list[memoryview] = []
        for number, piece in enumerate(pieces):
            start = number * self._tail_room_bytes
            parts += [piece.buffer, self._scratch.memory[start : start + self._tail_bytes]]
        return parts

    def _bounce_parts(self) -> list[memoryview]:
        """A whole slot in scratch memory."""
        return [self._scratch.memory[: self._slot_bytes]]

    def _locate(self, slot: int) -> tuple[int, int]:
        directory, file, position = self._superblock.place(slot)
        return self._fds[directory][file], position * self._slot_bytes

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
    return int(_array(view).__array_interface__["data"][0])
