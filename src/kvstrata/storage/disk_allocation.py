"""Giving the slot files of a disk store their room, and finding out what is left of them."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstrata.storage.disk_files import exists, remove_file, sync_directory
from kvstrata.storage.disk_system import FileSystem
from kvstrata.storage.superblock import Slots, Superblock

Flags = NDArray[np.bool_]


def slot_path(directory: Path, number: int) -> Path:
    """Where slot file *number* of *directory* is."""
    return directory / f"kvstrata_{number}.bin"


def slot_files(paths: Sequence[Path], superblock: Superblock) -> Iterator[tuple[Path, int]]:
    """Every slot file, and how long it is in bytes."""
    for directory, path in enumerate(paths):
        for number, slots in enumerate(superblock.file_slots(directory)):
            yield slot_path(path, number), slots * superblock.slot_bytes


def on_disk(
    system: FileSystem, paths: Sequence[Path], superblock: Superblock, slots: Slots
) -> Flags:
    """Which of *slots* are whole in their slot files; not one that the store has not got."""
    files = [len(superblock.file_slots(directory)) for directory in range(len(paths))]
    whole = np.zeros((len(paths), max(files)), np.int64)  # slots in each file
    for directory, path in enumerate(paths):
        for number in range(files[directory]):
            file = slot_path(path, number)
            if exists(system, file):
                whole[directory, number] = system.stat(file).st_size // superblock.slot_bytes
    found = slots < superblock.slots
    directories, numbers, positions = superblock.places(slots[found])
    found[found] = positions < whole[directories, numbers]
    return found


def preallocate(
    system: FileSystem, paths: Sequence[Path], superblock: Superblock, undo: ExitStack
) -> None:
    """Give every slot file its full size in real disk blocks; *undo* takes it back.

    Files that are large enough are left alone. Raises ``OSError`` where the disk is full.
    """
    changed = {
        file.parent
        for file, wanted_bytes in slot_files(paths, superblock)
        if _allocate(system, file, wanted_bytes, undo)
    }
    for path in changed:
        sync_directory(system, path)


def _allocate(system: FileSystem, path: Path, wanted_bytes: int, undo: ExitStack) -> bool:
    if exists(system, path):
        undo.callback(_truncate, system, path, system.stat(path).st_size)
    else:
        undo.callback(remove_file, system, path)
    fd = system.open(path, os.O_RDWR | os.O_CREAT)
    try:
        found = system.fstat(fd)
        if found.st_size >= wanted_bytes and found.st_blocks * 512 >= wanted_bytes:
            return False
        system.posix_fallocate(fd, 0, wanted_bytes)
        system.fsync(fd)
    finally:
        system.close(fd)
    return True


def _truncate(system: FileSystem, path: Path, length_bytes: int) -> None:
    fd = system.open(path, os.O_RDWR)
    try:
        system.ftruncate(fd, length_bytes)
    finally:
        system.close(fd)
