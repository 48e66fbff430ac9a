"""The superblock of a disk store: which format and which geometry its directory holds.

``docs/on-disk-format.md`` has the byte layout.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstrata.core.errors import FormatError
from kvstrata.storage.checksum import DIGEST_BYTES, is_sealed, seal
from kvstrata.storage.disk_files import replace_file, sync_directory

SUPERBLOCK_NAME: Final = "kvstrata.superblock"
FORMAT_VERSION: Final = 1
PAGE_BYTES: Final = 4096

_MAGIC: Final = b"KVSTRATA"
_BODY: Final = struct.Struct("<8sIIQQQQ16s")
_SEALED_BYTES: Final = _BODY.size + DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class Superblock:
    """What never changes in a directory, except ``slots``, which may grow."""

    store_id: bytes  # 16 random bytes, also in the journal of the same store
    block_bytes: int
    slots: int
    max_blocks_per_file: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of a slot before its footer: ``block_bytes`` rounded up to whole pages."""
        return -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next."""
        return self.payload_bytes + PAGE_BYTES

    @property
    def files(self) -> int:
        """Number of slot files."""
        return -(-self.slots // self.max_blocks_per_file)

    def file_bytes(self, number: int) -> int:
        """Bytes of slot file *number*; only the last one holds fewer slots than the others."""
        before = number * self.max_blocks_per_file
        return min(self.max_blocks_per_file, self.slots - before) * self.slot_bytes


def store_superblock(directory: Path, superblock: Superblock) -> None:
    """Replace the superblock of *directory*, durably; a crash leaves the old one or the new."""
    body = _BODY.pack(
        _MAGIC,
        FORMAT_VERSION,
        0,
        superblock.block_bytes,
        superblock.slot_bytes,
        superblock.slots,
        superblock.max_blocks_per_file,
        superblock.store_id,
    )
    os.close(replace_file(directory, SUPERBLOCK_NAME, seal(body).ljust(PAGE_BYTES, b"\0")))
    sync_directory(directory)


def load_superblock(directory: Path) -> Superblock:
    """The superblock of *directory*; raises ``FormatError`` if it is not one of ours."""
    path = directory / SUPERBLOCK_NAME
    data = path.read_bytes()[:_SEALED_BYTES]
    if len(data) < _SEALED_BYTES or not data.startswith(_MAGIC):
        raise FormatError(f"{path} is no superblock of KVStrata", hint=_START_EMPTY)
    _, version, _, block_bytes, slot_bytes, slots, per_file, store_id = _BODY.unpack_from(data)
    check_version(path, version)
    if not is_sealed(data):
        raise FormatError(f"{path} is damaged: its checksum is wrong", hint=_START_EMPTY)
    found = Superblock(store_id, block_bytes, slots, per_file)
    if found.slot_bytes != slot_bytes:
        raise FormatError(
            f"{path} says slots of {slot_bytes} bytes, expected {found.slot_bytes}",
            hint=_START_EMPTY,
        )
    return found


def check_version(path: Path, version: int) -> None:
    """Raise ``FormatError`` if *path* was written in another format version."""
    if version != FORMAT_VERSION:
        raise FormatError(
            f"{path} has format version {version}, this release reads version {FORMAT_VERSION}",
            hint="use the release that wrote it, or give this store an empty directory",
        )


_START_EMPTY: Final = "give the store another directory, or delete this one to start empty"
