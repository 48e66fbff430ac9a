"""The superblock of a disk store: which format and which geometry its directories hold.

``docs/on-disk-format.md`` has the byte layout.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from kvstrata.core.errors import FormatError
from kvstrata.storage.checksum import DIGEST_BYTES, is_sealed, seal
from kvstrata.storage.disk_files import read_file, replace_file, sync_directory
from kvstrata.storage.disk_system import FileSystem

SUPERBLOCK_NAME: Final = "kvstrata.superblock"
FORMAT_VERSION: Final = 2
PAGE_BYTES: Final = 4096

_MAGIC: Final = b"KVSTRATA"
_BODY: Final = struct.Struct("<8sIIQQQQ16sIIQ")
_SEALED_BYTES: Final = _BODY.size + DIGEST_BYTES


Slots = np.ndarray[tuple[int], np.dtype[np.int64]]


class Place(NamedTuple):
    """Where a slot is."""

    directory: int
    file: int  # in that directory
    position: int  # in that file, in slots


@dataclass(frozen=True, slots=True)
class Superblock:
    """What never changes in a store, except ``slots``, which may grow."""

    store_id: bytes  # 16 random bytes, also in the journal of the same store
    block_bytes: int
    slots: int  # in all directories
    max_blocks_per_file: int
    directories: int
    stripe_blocks: int  # so many slots in a row are in one directory, the next in the next

    @property
    def payload_bytes(self) -> int:
        """Bytes of a slot before its footer: ``block_bytes`` rounded up to whole pages."""
        return -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next."""
        return self.payload_bytes + PAGE_BYTES

    def place(self, slot: int) -> Place:
        """Where *slot* is; the same for every number of slots."""
        stripe, rest = divmod(slot, self.stripe_blocks)
        row, directory = divmod(stripe, self.directories)
        file, position = divmod(row * self.stripe_blocks + rest, self.max_blocks_per_file)
        return Place(directory, file, position)

    def places(self, slots: Slots) -> tuple[Slots, Slots, Slots]:
        """``place`` of many slots: the directories, the files, the positions."""
        stripes, rests = np.divmod(slots, self.stripe_blocks)
        rows, directories = np.divmod(stripes, self.directories)
        files, positions = np.divmod(rows * self.stripe_blocks + rests, self.max_blocks_per_file)
        return directories, files, positions

    def file_slots(self, directory: int) -> list[int]:
        """Slots of each slot file of *directory*; only the last file holds fewer than others."""
        rows, rest = divmod(self.slots, self.stripe_blocks * self.directories)
        rest = min(max(0, rest - directory * self.stripe_blocks), self.stripe_blocks)
        full, last = divmod(rows * self.stripe_blocks + rest, self.max_blocks_per_file)
        return [self.max_blocks_per_file] * full + [last] * (last > 0)


def store_superblock(
    system: FileSystem, path: Path, superblock: Superblock, directory: int
) -> None:
    """Replace the superblock in *path*, directory number *directory* of the store, durably.

    A crash leaves the old one or the new.
    """
    body = _BODY.pack(
        _MAGIC,
        FORMAT_VERSION,
        0,
        superblock.block_bytes,
        superblock.slot_bytes,
        superblock.slots,
        superblock.max_blocks_per_file,
        superblock.store_id,
        directory,
        superblock.directories,
        superblock.stripe_blocks,
    )
    data = seal(body).ljust(PAGE_BYTES, b"\0")
    system.close(replace_file(system, path, SUPERBLOCK_NAME, data))
    sync_directory(system, path)


def load_superblock(system: FileSystem, path: Path) -> tuple[Superblock, int]:
    """The superblock in *path* and which directory of its store this is.

    Raises ``FormatError`` if it is not one of ours.
    """
    file = path / SUPERBLOCK_NAME
    data = bytes(read_file(system, file)[:_SEALED_BYTES])
    if len(data) < _SEALED_BYTES or not data.startswith(_MAGIC):
        raise FormatError(f"{file} is no superblock of KVStrata", hint=START_EMPTY)
    fields = _BODY.unpack_from(data)
    _, version, _, block_bytes, slot_bytes, slots, per_file, store_id, directory, *rest = fields
    check_version(file, version)
    if not is_sealed(data):
        raise FormatError(f"{file} is damaged: its checksum is wrong", hint=START_EMPTY)
    found = Superblock(store_id, block_bytes, slots, per_file, *rest)
    if found.slot_bytes != slot_bytes:
        raise FormatError(
            f"{file} says slots of {slot_bytes} bytes, expected {found.slot_bytes}",
            hint=START_EMPTY,
        )
    return found, directory


def check_version(path: Path, version: int) -> None:
    """Raise ``FormatError`` if *path* was written in another format version."""
    if version != FORMAT_VERSION:
        raise FormatError(
            f"{path} has format version {version}, this release reads version {FORMAT_VERSION}",
            hint="use the release that wrote it, or give this store an empty directory",
        )


START_EMPTY: Final = "give the store another directory, or delete this one to start empty"
