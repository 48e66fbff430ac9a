"""Reading a whole disk store to find out what of it is sound, and leaving only that.

``docs/on-disk-format.md`` describes the directories. Without repair nothing is opened for writing.
"""

import fcntl
import mmap
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from kvstrata.core.errors import ConfigError, FormatError
from kvstrata.core.types import NAMESPACE_ID_BYTES, NamespaceId
from kvstrata.storage.disk_allocation import Flags, on_disk, preallocate, slot_files
from kvstrata.storage.disk_directory import store_name
from kvstrata.storage.disk_files import exists, read_file
from kvstrata.storage.disk_lock import LOCK_NAME, lock_directory
from kvstrata.storage.disk_slots import Piece, SlotFiles
from kvstrata.storage.disk_system import FileSystem
from kvstrata.storage.disk_table import latest
from kvstrata.storage.journal import JOURNAL_NAME, Entry, Journal, Records, Replay, load_journal
from kvstrata.storage.shared_fs_directory import MARKER_NAME
from kvstrata.storage.superblock import SUPERBLOCK_NAME, Superblock, load_superblock

__all__ = ["CheckReport", "check_store"]

_BATCH_BYTES: Final = 16 << 20
_IN_ANY: Final = {LOCK_NAME, SUPERBLOCK_NAME, f"{SUPERBLOCK_NAME}.tmp", "lost+found"}
_IN_FIRST: Final = {JOURNAL_NAME, f"{JOURNAL_NAME}.tmp"}


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What was found in a store, before anything was repaired."""

    superblock: Superblock
    good_blocks: Mapping[NamespaceId, int]  # of each namespace
    damaged_blocks: Mapping[NamespaceId, int]  # whose bytes are wrong or cannot be read
    lost_blocks: int  # whose slot is not on the disk
    has_journal: bool  # without one, the store is empty
    damaged_records: int  # in the journal, before its last valid one
    torn_bytes: int  # after that: what an interrupted append left, or damage
    short_files: Sequence[Path]  # slot files that are missing or truncated
    stray_files: Sequence[Path]  # no part of the store; never touched
    repaired: bool = False

    @property
    def free_slots(self) -> int:
        """Slots that no block on the disk has."""
        used = sum(self.good_blocks.values()) + sum(self.damaged_blocks.values())
        return self.superblock.slots - used

    @property
    def sound(self) -> bool:
        """Whether every block that was stored and not removed is known and right."""
        damage = (self.damaged_blocks, self.lost_blocks, self.damaged_records, self.torn_bytes)
        return self.has_journal and not self.short_files and not any(damage)


def check_store(
    paths: Sequence[Path],
    *,
    repair: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    system: FileSystem | None = None,
) -> CheckReport:
    """Read every block that the journal of the store in *paths* names.

    With *repair*, and only if something is wrong, the journal is written anew with the good
    blocks alone, and slot files get their full length back. *progress* is called with the blocks
    read so far and all that there are. Raises ``ConfigError`` if *paths* are not all the
    directories of one store in their order (``FormatError`` for what a directory holds), if the
    store is in use, or if the file system fails; a repair that fails has lost no good block.
    """
    system = system or FileSystem()
    try:
        with ExitStack() as locks:
            for path in paths:
                _check_directory(system, path)
                locks.enter_context(_locked(system, path, exclusively=repair))
            superblock = _load_superblocks(system, paths)
            replay = load_journal(system, paths[0], superblock.store_id)
            report, good = _check(system, paths, superblock, replay, progress)
            if repair and not report.sound:
                _repair(system, paths, superblock, replace(replay, puts=good, compact=False))
                report = replace(report, repaired=True)
            return report
    except OSError as e:
        raise ConfigError(
            f"disk store {store_name(paths)} cannot be {'repaired' if repair else 'checked'}: {e}",
            hint="the directory must be readable, and writable for a repair, by this user",
        ) from e


def _check_directory(system: FileSystem, path: Path) -> None:
    if exists(system, path / SUPERBLOCK_NAME):
        return
    hint = "name the directories of the disk tier, as its configuration does"
    if not exists(system, path):
        raise FormatError(f"there is no {path}", hint=hint)
    if not stat.S_ISDIR(system.stat(path).st_mode):
        raise FormatError(f"{path} is not a directory", hint=hint)
    names = set(system.listdir(path)) - {LOCK_NAME}
    if not names:
        raise FormatError(
            f"{path} is empty: no engine has used this disk tier yet, or its disk is not mounted",
            hint="start an engine with it, or mount the disk",
        )
    if MARKER_NAME in names:
        raise FormatError(f"{path} is a shared tier, and only disk tiers are checked", hint=hint)
    raise FormatError(
        f"{path} is no directory of a disk tier: it has no {SUPERBLOCK_NAME}, but {min(names)!r}",
        hint=hint,
    )


@contextmanager
def _locked(system: FileSystem, path: Path, *, exclusively: bool) -> Iterator[None]:
    """Keep others from opening the store; raises ``ConfigError`` if somebody has it open."""
    if exclusively:
        fd = lock_directory(system, path, 0)
    elif exists(system, path / LOCK_NAME):
        fd = system.open(path / LOCK_NAME, os.O_RDONLY)
    else:
        yield
        return
    try:
        if not exclusively:
            system.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    except BlockingIOError as e:
        holder = read_file(system, path / LOCK_NAME).decode("ascii", "replace").strip()
        raise ConfigError(
            f"disk store {path} is in use by process {holder or 'unknown'}",
            hint="stop that process before the check",
        ) from e
    finally:
        system.close(fd)


def _load_superblocks(system: FileSystem, paths: Sequence[Path]) -> Superblock:
    """The superblock of the first directory; raises ``FormatError`` unless *paths* are a store."""
    first, _ = load_superblock(system, paths[0])
    for number, path in enumerate(paths):
        found, its_number = load_superblock(system, path)
        if (found.store_id, its_number, found.directories) != (first.store_id, number, len(paths)):
            raise FormatError(
                f"{path} is directory {its_number} of {found.directories} of store "
                f"{found.store_id.hex()}, expected directory {number} of {len(paths)} of store "
                f"{first.store_id.hex()}",
                hint="name all directories of one store, in the order in which it was made",
            )
    return first


def _check(
    system: FileSystem,
    paths: Sequence[Path],
    superblock: Superblock,
    replay: Replay,
    progress: Callable[[int, int], None],
) -> tuple[CheckReport, Records]:
    """What is found, and the records of the good blocks."""
    there = on_disk(system, paths, superblock, replay.puts["slot"].astype(np.int64))
    puts = latest(replay.puts[there])
    is_good = _prove(system, paths, superblock, puts, progress)
    report = CheckReport(
        superblock,
        good_blocks=_by_namespace(puts[is_good]),
        damaged_blocks=_by_namespace(puts[~is_good]),
        lost_blocks=int(np.count_nonzero(~there)),
        has_journal=exists(system, paths[0] / JOURNAL_NAME),
        damaged_records=replay.damaged,
        torn_bytes=replay.torn_bytes,
        short_files=[
            file
            for file, wanted_bytes in slot_files(paths, superblock)
            if not exists(system, file) or system.stat(file).st_size < wanted_bytes
        ],
        stray_files=_strays(system, paths, superblock),
    )
    return report, puts[is_good]


def _prove(
    system: FileSystem,
    paths: Sequence[Path],
    superblock: Superblock,
    puts: Records,
    progress: Callable[[int, int], None],
) -> Flags:
    """Which blocks of *puts* are right, read in the order in which they lie."""
    count = max(1, _BATCH_BYTES // superblock.slot_bytes)
    room = memoryview(mmap.mmap(-1, count * superblock.payload_bytes))
    starts = range(0, len(room), superblock.payload_bytes)
    buffers = [room[start : start + superblock.block_bytes] for start in starts]
    order = np.argsort(puts["slot"])
    good = np.zeros(len(puts), np.bool_)
    with closing(SlotFiles(_Untouched(system), paths, superblock)) as files:
        for done in range(0, len(order), count):
            progress(done, len(order))
            batch = order[done : done + count]
            columns = (puts[batch][name].tolist() for name in ("key", "slot", "generation"))
            pieces = [
                Piece(key, Entry(slot, generation, None), buffer)
                for key, slot, generation, buffer in zip(*columns, buffers, strict=False)
            ]
            good[batch] = _right(files, pieces)
    progress(len(order), len(order))
    return good


def _right(files: SlotFiles, pieces: Sequence[Piece]) -> list[bool]:
    """Which of *pieces* can be read and are what they should be."""
    try:
        return files.read(pieces)
    except OSError:
        if len(pieces) == 1:
            return [False]
        return [right for piece in pieces for right in _right(files, [piece])]


def _by_namespace(puts: Records) -> dict[NamespaceId, int]:
    return dict(Counter(key[:NAMESPACE_ID_BYTES] for key in puts["key"].tolist()))


def _strays(system: FileSystem, paths: Sequence[Path], superblock: Superblock) -> list[Path]:
    """What is in *paths* and no part of the store."""
    ours = {file for file, _ in slot_files(paths, superblock)}
    ours |= {path / name for path in paths for name in _IN_ANY}
    ours |= {paths[0] / name for name in _IN_FIRST}
    found = [path / name for path in paths for name in system.listdir(path)]
    return sorted(file for file in found if file not in ours)


def _repair(
    system: FileSystem, paths: Sequence[Path], superblock: Superblock, sound: Replay
) -> None:
    """Write the journal anew with the blocks of *sound*, then allocate what is missing."""
    Journal(system, paths[0], superblock.store_id, sound).close()
    with ExitStack() as undo:
        preallocate(system, paths, superblock, undo)
        undo.pop_all()


class _Untouched(FileSystem):
    """Opens everything for reading only; a file that is missing is an empty one."""

    def __init__(self, system: FileSystem) -> None:
        self._system = system
        self._empty: set[int] = set()

    def open(self, path: Path, flags: int) -> int:
        try:
            return self._system.open(path, flags & ~os.O_ACCMODE | os.O_RDONLY)
        except FileNotFoundError:
            fd = os.memfd_create(path.name, os.MFD_CLOEXEC)
            self._empty.add(fd)
            return fd

    def close(self, fd: int) -> None:
        if fd in self._empty:
            self._empty.remove(fd)
            super().close(fd)
        else:
            self._system.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview | bytearray], offset_bytes: int) -> int:
        return self._system.preadv(fd, buffers, offset_bytes)
