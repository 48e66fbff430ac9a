"""Opening the directory of a disk store: what is refused, and in which order it is made.

Every check comes before the first write. A new store is made superblock first, so a directory
with our files and no superblock is somebody else's, and one with nothing but a superblock is an
empty store whose making was interrupted.
"""

import errno
import os
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstrata.core.errors import ConfigError, FormatError
from kvstrata.storage.disk_lock import LOCK_NAME, lock_directory
from kvstrata.storage.disk_slots import SlotFiles, preallocate, slot_path, whole_slots
from kvstrata.storage.journal import (
    COMPACT_FACTOR,
    COMPACT_RECORDS,
    JOURNAL_NAME,
    RECORD_BYTES,
    Journal,
    Replay,
    load_journal,
)
from kvstrata.storage.superblock import (
    PAGE_BYTES,
    SUPERBLOCK_NAME,
    Superblock,
    load_superblock,
    store_superblock,
)

_TEMPORARIES: Final = (f"{SUPERBLOCK_NAME}.tmp", f"{JOURNAL_NAME}.tmp")
_NOT_OURS_TO_MIND: Final = {LOCK_NAME, f"{SUPERBLOCK_NAME}.tmp", "lost+found"}
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_LAST_SLOT: Final = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Wanted:
    """The geometry that the configuration asks for."""

    block_bytes: int
    capacity_bytes: int
    max_blocks_per_file: int

    def superblock(self, store_id: bytes) -> Superblock:
        """The geometry in slots; raises ``ConfigError`` where it makes no sense."""
        if min(self.block_bytes, self.max_blocks_per_file) < 1:
            raise ConfigError(
                f"block_bytes={self.block_bytes} and "
                f"max_blocks_per_file={self.max_blocks_per_file} must be positive"
            )
        slot_bytes = Superblock(store_id, self.block_bytes, 1, 1).slot_bytes
        slots = self.capacity_bytes // slot_bytes
        if not 1 <= slots <= _LAST_SLOT:
            raise ConfigError(
                f"a disk capacity of {self.capacity_bytes} bytes is {slots} slots of {slot_bytes} "
                f"bytes (blocks of {self.block_bytes}), possible are 1 to {_LAST_SLOT}",
                hint=f"set the capacity of the disk tier to at least {slot_bytes} bytes",
            )
        return Superblock(store_id, self.block_bytes, slots, self.max_blocks_per_file)


@dataclass(slots=True)
class OpenDirectory:
    """A locked directory with everything in it open."""

    lock_fd: int
    superblock: Superblock
    files: SlotFiles
    journal: Journal
    replay: Replay
    lost_blocks: int  # journalled, but their slot file is missing or too short

    def close(self) -> None:
        self.journal.close()
        self.files.close()
        os.close(self.lock_fd)


def open_directory(path: Path, wanted: Wanted, lock_timeout_seconds: float) -> OpenDirectory:
    """Open the store in *path*, make it if there is none, grow it if more is wanted.

    Raises ``ConfigError`` or ``FormatError`` and then leaves *path* as it was: nothing deleted,
    nothing overwritten, nothing left behind.
    """
    try:
        _check(path, wanted)
        with ExitStack() as undo:
            opened = _open(path, wanted, lock_timeout_seconds, undo)
            undo.pop_all()
            return opened
    except OSError as e:
        raise ConfigError(
            f"disk store {path} cannot be opened with a capacity of "
            f"{wanted.capacity_bytes} bytes: {e}",
            hint="lower the capacity of the disk tier or free space on its file system"
            if e.errno in _NO_ROOM
            else "the directory must be readable and writable by this user",
        ) from e


def _open(
    path: Path, wanted: Wanted, lock_timeout_seconds: float, undo: ExitStack
) -> OpenDirectory:
    if not path.exists():
        path.mkdir(mode=0o700, parents=True)
        undo.callback(path.rmdir)
    had_lock = (path / LOCK_NAME).exists()
    lock_fd = lock_directory(path, lock_timeout_seconds)
    undo.callback(os.close, lock_fd)
    if not had_lock:
        undo.callback((path / LOCK_NAME).unlink)

    found, superblock = _check(path, wanted)
    replay = load_journal(path, superblock.store_id)
    lost_blocks = _forget_lost(path, found or superblock, replay)

    for name in _TEMPORARIES:
        (path / name).unlink(missing_ok=True)
    if found is None:
        undo.callback((path / SUPERBLOCK_NAME).unlink, missing_ok=True)
        store_superblock(path, superblock)
    preallocate(path, superblock, undo)
    files = SlotFiles(path, superblock)
    undo.callback(files.close)
    if found is not None and found.slots < superblock.slots:
        undo.callback(store_superblock, path, found)
        store_superblock(path, superblock)
    journal = Journal(path, superblock.store_id, replay)
    return OpenDirectory(lock_fd, superblock, files, journal, replay, lost_blocks)


def _check(path: Path, wanted: Wanted) -> tuple[Superblock | None, Superblock]:
    """The superblock found, if any, and the one to have; raises what forbids to open *path*."""
    found = _examine(path)
    superblock = wanted.superblock(found.store_id if found else uuid.uuid4().bytes)
    if found is not None:
        _compare(path, found, superblock)
    _check_room(path, superblock)
    return found, superblock


def _examine(path: Path) -> Superblock | None:
    if not path.exists():
        return None
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory", hint="give the disk tier a directory")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(
            f"{path} is not readable and writable by uid {os.geteuid()}",
            hint=f"chown or chmod {path}, or give the disk tier another directory",
        )
    names = set(os.listdir(path)) - _NOT_OURS_TO_MIND
    if SUPERBLOCK_NAME in names:
        return load_superblock(path)
    if names:
        raise FormatError(
            f"{path} is not empty (found {min(names)!r}) and has no {SUPERBLOCK_NAME}",
            hint="give the disk tier an empty directory, or one that it made itself",
        )
    return None


def _compare(path: Path, found: Superblock, wanted: Superblock) -> None:
    for name in ("block_bytes", "max_blocks_per_file"):
        if getattr(found, name) != getattr(wanted, name):
            raise FormatError(
                f"{path} was made with {name}={getattr(found, name)}, "
                f"expected {getattr(wanted, name)}",
                hint="give the disk tier another directory, or delete this one to start empty",
            )
    if wanted.slots < found.slots:
        raise ConfigError(
            f"{path} holds {found.slots} slots ({found.slots * found.slot_bytes} bytes), "
            f"the configured capacity is {wanted.slots} slots",
            hint=f"set the capacity of the disk tier to at least "
            f"{found.slots * found.slot_bytes} bytes, or delete {path} to start empty",
        )


def _check_room(path: Path, superblock: Superblock) -> None:
    records = max(COMPACT_RECORDS, COMPACT_FACTOR * superblock.slots) + superblock.slots
    wanted = {path / JOURNAL_NAME: records * RECORD_BYTES, path / SUPERBLOCK_NAME: PAGE_BYTES}
    for number in range(superblock.files):
        wanted[slot_path(path, number)] = superblock.file_bytes(number)
    missing_bytes = sum(
        max(0, wanted_bytes - _occupied_bytes(file)) for file, wanted_bytes in wanted.items()
    )
    existing = path
    while not existing.exists():
        existing = existing.parent
    room = os.statvfs(existing)
    free_bytes = room.f_bavail * room.f_frsize
    if missing_bytes > free_bytes:
        total_bytes = sum(wanted.values())
        raise ConfigError(
            f"disk store {path} with {superblock.slots} slots needs {total_bytes} bytes, "
            f"{missing_bytes} more than it has, and its file system has {free_bytes} free",
            hint="lower the capacity of the disk tier or free space on its file system",
        )


def _occupied_bytes(file: Path) -> int:
    return file.stat().st_blocks * 512 if file.exists() else 0


def _forget_lost(path: Path, found: Superblock, replay: Replay) -> int:
    """Remove the entries whose slot is not on disk; their number."""
    whole = whole_slots(path, found)
    per_file = found.max_blocks_per_file
    lost = [
        key
        for key, entry in replay.entries.items()
        if entry.slot >= found.slots or entry.slot % per_file >= whole[entry.slot // per_file]
    ]
    for key in lost:
        del replay.entries[key]
    replay.compact = replay.compact and not lost
    return len(lost)
