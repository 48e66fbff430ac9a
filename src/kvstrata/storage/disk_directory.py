"""Opening the directories of a disk store: what is refused, and in which order they are made.

Every check comes before the first write. A new store is made superblocks first, that of the first
directory before the others, and the journal last. So a directory with our files and no superblock
is somebody else's; a store without a journal is one whose making was interrupted, and empty; and
where there is a journal, a directory without its superblock is lost, not new.
"""

import os
import stat
import uuid
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from kvstrata.core.errors import ConfigError, FormatError
from kvstrata.storage.disk_allocation import on_disk, preallocate, slot_files
from kvstrata.storage.disk_files import exists, remove_file, sync_directory
from kvstrata.storage.disk_lock import (
    LOCK_NAME,
    LOCK_TIMEOUT_SECONDS,
    is_lock_of,
    lock_directory,
)
from kvstrata.storage.disk_slots import SlotFiles
from kvstrata.storage.disk_system import NO_ROOM, FileSystem
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
    START_EMPTY,
    SUPERBLOCK_NAME,
    Superblock,
    load_superblock,
    store_superblock,
)

_TEMPORARIES: Final = (f"{SUPERBLOCK_NAME}.tmp", f"{JOURNAL_NAME}.tmp")
_NOT_OURS_TO_MIND: Final = {LOCK_NAME, f"{SUPERBLOCK_NAME}.tmp", "lost+found"}
_NOT_ACCESSIBLE: Final = "the directory must be readable and writable by this user"
_MOST_SLOTS: Final = 2**28  # half of what the tables in memory have numbers for
_STRIPE_BYTES: Final = 4 << 20  # as much as one I/O thread of the server reads at once

_Found = tuple[Superblock, int] | None  # what is in a directory, and as which of its store


@dataclass(frozen=True, slots=True)
class Wanted:
    """The geometry that the configuration asks for."""

    block_bytes: int
    capacity_bytes: int  # of all directories together
    max_blocks_per_file: int

    def superblock(self, store_id: bytes, directories: int) -> Superblock:
        """The geometry in slots; raises ``ConfigError`` where it makes no sense."""
        if min(self.block_bytes, self.max_blocks_per_file, directories) < 1:
            raise ConfigError(
                f"block_bytes={self.block_bytes}, max_blocks_per_file={self.max_blocks_per_file} "
                f"and the number of directories ({directories}) must be positive"
            )
        one = Superblock(store_id, self.block_bytes, 1, self.max_blocks_per_file, directories, 1)
        slots = self.capacity_bytes // one.slot_bytes
        if not directories <= slots <= _MOST_SLOTS:
            raise ConfigError(
                f"a disk capacity of {self.capacity_bytes} bytes is {slots} slots of "
                f"{one.slot_bytes} bytes (blocks of {self.block_bytes}), possible are "
                f"{directories} to {_MOST_SLOTS}",
                hint="set the capacity of the disk tier to at least "
                f"{directories * one.slot_bytes} bytes",
            )
        stripe = min(max(1, _STRIPE_BYTES // one.slot_bytes), slots // directories)
        return replace(one, slots=slots, stripe_blocks=stripe)


@dataclass(slots=True)
class OpenDirectories:
    """Locked directories with everything in them open."""

    superblock: Superblock
    files: SlotFiles
    journal: Journal
    locks: ExitStack

    def close(self) -> None:
        with self.locks:
            self.journal.close()
            self.files.close()


class Reservation:
    """*paths* are this process's alone until ``close``: for whoever cannot open the store yet.

    What is missing is made, and goes again with ``close`` unless a store was made in it. Raises
    ``ConfigError``, naming the holder, if another process has one of *paths* for longer than
    *lock_timeout_seconds*: one that has been told to end still writes what is not on disk yet.
    """

    def __init__(
        self, paths: Sequence[Path], *, lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS
    ) -> None:
        self._paths = paths
        self._system = FileSystem()
        try:
            with ExitStack() as undo:
                self._held = undo.enter_context(ExitStack())
                self._locks = _lock(self._system, paths, lock_timeout_seconds, self._held, undo)
                self._undo = undo.pop_all()
        except OSError as e:
            raise ConfigError(
                f"disk store {store_name(paths)} cannot be opened: {e}", hint=_NOT_ACCESSIBLE
            ) from e

    def locks(self) -> dict[Path, int]:
        """The locked descriptors of those of *paths* from which nobody has deleted the lock file."""
        found = zip(self._paths, self._locks, strict=True)
        return {path: fd for path, fd in found if is_lock_of(self._system, path, fd)}

    def close(self) -> None:
        if any(exists(self._system, path / SUPERBLOCK_NAME) for path in self._paths):
            self._undo.pop_all()
            self._held.close()
        else:
            with suppress(OSError):  # somebody has put something there
                self._undo.close()


def open_directories(
    system: FileSystem,
    paths: Sequence[Path],
    wanted: Wanted,
    lock_timeout_seconds: float,
    reservation: Reservation | None = None,
) -> tuple[OpenDirectories, Replay]:
    """Open the store in *paths*, make it if there is none, grow it if more is wanted.

    The locks are those of *reservation*, if there is one, which keeps them until it is closed, too;
    where somebody has deleted one, another.
    ``Replay.lost`` blocks were journalled, but their slot file is missing or too short.
    Raises ``ConfigError`` or ``FormatError`` and then leaves *paths* as they were: nothing
    deleted, nothing overwritten, nothing left behind.
    """
    try:
        _check(system, paths, wanted)
        with ExitStack() as undo:
            locks = undo.enter_context(ExitStack())
            reserved = {} if reservation is None else reservation.locks()
            for fd in reserved.values():
                locks.callback(system.close, os.dup(fd))
            others = [path for path in paths if path not in reserved]
            _lock(system, others, lock_timeout_seconds, locks, undo)
            opened = _open(system, paths, wanted, locks, undo)
            undo.pop_all()
            return opened
    except OSError as e:
        raise ConfigError(
            f"disk store {store_name(paths)} cannot be opened with a capacity of "
            f"{wanted.capacity_bytes} bytes: {e}",
            hint="lower the capacity of the disk tier or free space on its file system"
            if e.errno in NO_ROOM
            else _NOT_ACCESSIBLE,
        ) from e


def check_directories(paths: Sequence[Path], capacity_bytes: int) -> None:
    """Raise what ``open_directories`` would whatever the size of blocks; changes nothing."""
    system = FileSystem()
    try:
        found = _found_in(system, paths)
        if found and found[0] is not None:
            first = found[0][0]
            _compare(paths[0], first, "directories", len(paths))
            _refuse_smaller(paths[0], first, capacity_bytes // first.slot_bytes)
        _check_members(system, paths, found)
    except OSError as e:
        raise ConfigError(
            f"disk store {store_name(paths)} cannot be opened: {e}", hint=_NOT_ACCESSIBLE
        ) from e


def store_name(paths: Sequence[Path]) -> str:
    """What messages call the store in *paths*."""
    return ", ".join(map(str, paths))


def _open(
    system: FileSystem,
    paths: Sequence[Path],
    wanted: Wanted,
    locks: ExitStack,
    undo: ExitStack,
) -> tuple[OpenDirectories, Replay]:
    found, superblock = _check(system, paths, wanted)
    replay = load_journal(system, paths[0], superblock.store_id)
    _forget_lost(system, paths, found or superblock, replay)

    for path in paths:
        for name in _TEMPORARIES:
            remove_file(system, path / name)
    for number, path in enumerate(paths):
        if not exists(system, path / SUPERBLOCK_NAME):
            undo.callback(remove_file, system, path / SUPERBLOCK_NAME)
            store_superblock(system, path, superblock, number)
    preallocate(system, paths, superblock, undo)
    files = SlotFiles(system, paths, superblock)
    undo.callback(files.close)
    if found is not None and found.slots < superblock.slots:
        undo.callback(store_superblock, system, paths[0], found, 0)
        store_superblock(system, paths[0], superblock, 0)
    journal = Journal(system, paths[0], superblock.store_id, replay)
    return OpenDirectories(superblock, files, journal, locks.pop_all()), replay


def _lock(
    system: FileSystem,
    paths: Sequence[Path],
    timeout_seconds: float,
    locks: ExitStack,
    undo: ExitStack,
) -> list[int]:
    """The locked descriptors, which *locks* closes; what is made here goes with *undo*."""
    found = []
    for path in paths:
        while True:
            _make_directory(system, path, undo)
            had_lock = exists(system, path / LOCK_NAME)
            try:
                found.append(lock_directory(system, path, timeout_seconds))
                break
            except FileNotFoundError:
                if exists(system, path):
                    raise  # else who had it has taken away what it had made
        locks.callback(system.close, found[-1])
        if not had_lock:
            undo.callback(system.unlink, path / LOCK_NAME)
    return found


def _make_directory(system: FileSystem, path: Path, undo: ExitStack) -> None:
    """Make *path* and its parents, where they are missing, durably."""
    if exists(system, path):
        return
    _make_directory(system, path.parent, undo)
    system.mkdir(path)
    undo.callback(system.rmdir, path)
    sync_directory(system, path.parent)


def _check(
    system: FileSystem, paths: Sequence[Path], wanted: Wanted
) -> tuple[Superblock | None, Superblock]:
    """The superblock found, if any, and the one to have; raises what forbids to open *paths*."""
    found = _found_in(system, paths)
    first = found[0][0] if found and found[0] else None
    superblock = wanted.superblock(first.store_id if first else uuid.uuid4().bytes, len(paths))
    if first is not None:
        superblock = replace(superblock, stripe_blocks=first.stripe_blocks)
        for name in ("block_bytes", "max_blocks_per_file", "directories"):
            _compare(paths[0], first, name, getattr(superblock, name))
        _refuse_smaller(paths[0], first, superblock.slots)
    _check_members(system, paths, found)
    _check_room(system, paths, superblock)
    return first, superblock


def _found_in(system: FileSystem, paths: Sequence[Path]) -> list[_Found]:
    """What is in each of *paths*; raises if one of them can be no directory of a store."""
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError(
            f"disk store {store_name(paths)} has one directory twice",
            hint="name every directory of the disk tier once",
        )
    return [_examine(system, path) for path in paths]


def _examine(system: FileSystem, path: Path) -> _Found:
    existing = path
    while not exists(system, existing) and existing != existing.parent:
        existing = existing.parent
    if not stat.S_ISDIR(system.stat(existing).st_mode):
        raise ConfigError(f"{existing} is not a directory", hint="give the disk tier a directory")
    if not system.access(existing, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(
            f"{existing} is not readable and writable by uid {os.geteuid()}",
            hint=f"chown or chmod {existing}, or give the disk tier another directory",
        )
    if existing != path:
        return None
    names = set(system.listdir(path)) - _NOT_OURS_TO_MIND
    if SUPERBLOCK_NAME in names:
        return load_superblock(system, path)
    if names:
        raise FormatError(
            f"{path} is not empty (found {min(names)!r}) and has no {SUPERBLOCK_NAME}",
            hint="give the disk tier an empty directory, or one that it made itself",
        )
    return None


def _compare(path: Path, found: Superblock, name: str, wanted: int) -> None:
    if getattr(found, name) != wanted:
        raise FormatError(
            f"{path} was made with {name}={getattr(found, name)}, expected {wanted}",
            hint=START_EMPTY,
        )


def _refuse_smaller(path: Path, found: Superblock, wanted_slots: int) -> None:
    if wanted_slots < found.slots:
        raise ConfigError(
            f"{path} holds {found.slots} slots for blocks of {found.block_bytes} bytes "
            f"({found.slots * found.slot_bytes} bytes), "
            f"the configured capacity is {wanted_slots} slots",
            hint=f"set the capacity of the disk tier to at least "
            f"{found.slots * found.slot_bytes} bytes, or delete {path} to start empty",
        )


def _check_members(system: FileSystem, paths: Sequence[Path], found: Sequence[_Found]) -> None:
    first = found[0][0] if found and found[0] else None
    may_be_new = not paths or not exists(system, paths[0] / JOURNAL_NAME)
    for number, (path, other) in enumerate(zip(paths, found, strict=True)):
        _check_member(path, number, other, first, may_be_new=may_be_new)


def _check_member(
    path: Path,
    number: int,
    found: _Found,
    first: Superblock | None,
    *,
    may_be_new: bool,
) -> None:
    """Raise ``FormatError`` unless *path* can be directory *number* of the store of *first*."""
    if found is None:
        if first is not None and not may_be_new:
            raise FormatError(
                f"{path} is empty, expected directory {number} of store {first.store_id.hex()}",
                hint="mount or restore it, or delete the other directories to start empty",
            )
        return
    superblock, its_number = found
    if first is None or superblock.store_id != first.store_id or its_number != number:
        expected = f"store {first.store_id.hex()}" if first else "an empty one"
        raise FormatError(
            f"{path} is directory {its_number} of store {superblock.store_id.hex()}, "
            f"expected directory {number} of {expected}",
            hint="list the directories of the disk tier in the order in which it was made, "
            "or give it empty ones",
        )


def _check_room(system: FileSystem, paths: Sequence[Path], superblock: Superblock) -> None:
    records = max(COMPACT_RECORDS, COMPACT_FACTOR * superblock.slots) + superblock.slots
    wanted = dict(slot_files(paths, superblock))
    wanted[paths[0] / JOURNAL_NAME] = records * RECORD_BYTES
    wanted |= {path / SUPERBLOCK_NAME: PAGE_BYTES for path in paths}
    missing_bytes: dict[int, int] = defaultdict(int)
    free_bytes: dict[int, int] = {}
    for file, wanted_bytes in wanted.items():
        existing = file.parent
        while not exists(system, existing):
            existing = existing.parent
        device = system.stat(existing).st_dev
        missing_bytes[device] += max(0, wanted_bytes - _occupied_bytes(system, file))
        if device not in free_bytes:
            room = system.statvfs(existing)
            free_bytes[device] = room.f_bavail * room.f_frsize
    for device, missing in missing_bytes.items():
        if missing > free_bytes[device]:
            raise ConfigError(
                f"disk store {store_name(paths)} with {superblock.slots} slots needs "
                f"{sum(wanted.values())} bytes, {missing} more than it has, and its file system "
                f"has {free_bytes[device]} free",
                hint="lower the capacity of the disk tier or free space on its file system",
            )


def _occupied_bytes(system: FileSystem, file: Path) -> int:
    with suppress(FileNotFoundError):
        return system.stat(file).st_blocks * 512
    return 0


def _forget_lost(
    system: FileSystem, paths: Sequence[Path], found: Superblock, replay: Replay
) -> None:
    """Remove the blocks whose slot is not on disk."""
    kept = on_disk(system, paths, found, replay.puts["slot"].astype(np.int64))
    replay.lost = len(kept) - int(np.count_nonzero(kept))
    if replay.lost:
        replay.puts = replay.puts[kept]
        replay.compact = False
