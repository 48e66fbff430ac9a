"""The directory of a shared store: its marker, its names, and what is refused.

kvstrata.shared                   marker: format version, block_bytes
kvstrata.owner                    lease of the node that evicts
kvstrata.nodes/<node>             what a node has added and removed
kvstrata.trash/<name>             dropped namespaces on their way out
blocks/<namespace>/<ab>/<key>     one file a block; <ab> are the first two digits of the key
"""

import contextlib
import errno
import os
import re
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvstrata.core.errors import ConfigError, FormatError
from kvstrata.core.types import BLOCK_KEY_BYTES, NAMESPACE_ID_BYTES, NamespaceId, StoreKey
from kvstrata.storage.checksum import DIGEST_BYTES, is_sealed, seal
from kvstrata.storage.shared_fs_file import FORMAT_VERSION, HEADER_BYTES, publish

MARKER_NAME: Final = "kvstrata.shared"
OWNER_NAME: Final = "kvstrata.owner"
NODES_NAME: Final = "kvstrata.nodes"
TRASH_NAME: Final = "kvstrata.trash"
BLOCKS_NAME: Final = "blocks"

_MAGIC: Final = b"KVSHARED"
_MARKER: Final = struct.Struct("<8sIIQ")
_SEALED_BYTES: Final = _MARKER.size + DIGEST_BYTES
_SHARD_DIGITS: Final = 2
_NOT_OURS_TO_MIND: Final = {"lost+found", ".snapshot"}
_ALL: Final = os.R_OK | os.W_OK | os.X_OK
_BLOCK_NAME: Final = re.compile(rf"[0-9a-f]{{{2 * BLOCK_KEY_BYTES}}}")
_NAMESPACE_NAME: Final = re.compile(rf"[0-9a-f]{{{2 * NAMESPACE_ID_BYTES}}}")
_TEMPORARY_NAME: Final = re.compile(rf"{_BLOCK_NAME.pattern}\.[0-9a-f]+-\d+\.tmp")
_ANOTHER_DIRECTORY: Final = "give the shared store another directory, or delete this one"


class Names:
    """Where things are below *root*. All paths are strings: they are made for every block."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.marker = f"{root}/{MARKER_NAME}"
        self.owner = f"{root}/{OWNER_NAME}"
        self.nodes = f"{root}/{NODES_NAME}"
        self.trash = f"{root}/{TRASH_NAME}"
        self.blocks = f"{root}/{BLOCKS_NAME}"

    def namespace(self, namespace_id: NamespaceId) -> str:
        return f"{self.blocks}/{namespace_id.hex()}"

    def block(self, key: StoreKey) -> str:
        name = key[NAMESPACE_ID_BYTES:].hex()
        namespace = self.namespace(key[:NAMESPACE_ID_BYTES])
        return f"{namespace}/{name[:_SHARD_DIGITS]}/{name}"


def is_block_name(name: str) -> bool:
    return _BLOCK_NAME.fullmatch(name) is not None


def is_temporary_name(name: str) -> bool:
    return _TEMPORARY_NAME.fullmatch(name) is not None


def is_namespace_name(name: str) -> bool:
    return _NAMESPACE_NAME.fullmatch(name) is not None


def make_shard(path: str) -> None:
    """Make the directory of block file *path*, and that of its namespace.

    Raises ``FileNotFoundError`` where ``blocks/`` is missing, as under a mount that has gone:
    nothing is ever written below an empty mount point.
    """
    shard = os.path.dirname(path)
    with contextlib.suppress(FileExistsError):
        os.mkdir(os.path.dirname(shard), 0o700)
    with contextlib.suppress(FileExistsError, FileNotFoundError):  # removed again, being empty
        os.mkdir(shard, 0o700)


def open_directory(path: Path, block_bytes: int, unique: str) -> Names:
    """The names of the store in *path*, which is made if it is not there.

    *unique* makes the temporary name of the marker. Several nodes may come at once: one makes the
    marker, the others check it. Raises ``ConfigError`` or ``FormatError``, and has then changed
    nothing that was there.
    """
    with _told(path):
        return _open(path, block_bytes, unique)


def check_directory(path: Path) -> None:
    """Raise what ``open_directory`` would whatever the block size, without changing anything."""
    with _told(path):
        if not path.exists():
            _refuse_closed(path.parent, os.W_OK | os.X_OK)
            return
        _refuse_foreign(path)
        _refuse_closed(path, _ALL)
        if os.path.exists(Names(path).marker):
            _read_marker(Names(path).marker)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """An error of the operating system becomes one of the configuration."""
    try:
        yield
    except OSError as e:
        raise ConfigError(
            f"shared store {path} cannot be opened: {e}",
            hint="mount the file system, writable by this user; only the last part of the path "
            "is made if it is missing",
        ) from e


def _open(path: Path, block_bytes: int, unique: str) -> Names:
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    names = Names(path)
    _refuse_foreign(path)
    _refuse_closed(path, _ALL)
    if not os.path.exists(names.marker):
        _make_marker(names, block_bytes, unique)
    _check_marker(names.marker, block_bytes)
    for directory in (names.blocks, names.nodes, names.trash):
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)
    return names


def _refuse_closed(path: Path, needed: int) -> None:
    if not stat.S_ISDIR(path.stat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if not os.access(path, needed):
        raise PermissionError(errno.EACCES, "not readable and writable by this user", str(path))


def _refuse_foreign(path: Path) -> None:
    found = set(os.listdir(path)) - _NOT_OURS_TO_MIND
    foreign = {name for name in found if not name.startswith("kvstrata.shared")}
    if foreign and MARKER_NAME not in found:
        raise FormatError(
            f"{path} is not empty (found {min(foreign)!r}) and has no {MARKER_NAME}",
            hint="give the shared store an empty directory, or one that it made itself",
        )


def _make_marker(names: Names, block_bytes: int, unique: str) -> None:
    """Make the marker unless another node has; a link never replaces what is there."""
    body = seal(_MARKER.pack(_MAGIC, FORMAT_VERSION, 0, block_bytes))
    complete = f"{names.marker}.{unique}"
    page = memoryview(body.ljust(HEADER_BYTES, b"\0"))
    publish(complete, f"{complete}.tmp", [page])
    try:
        with contextlib.suppress(FileExistsError):
            os.link(complete, names.marker)
    finally:
        os.unlink(complete)


def _check_marker(marker: str, block_bytes: int) -> None:
    found_bytes = _read_marker(marker)
    if found_bytes != block_bytes:
        raise FormatError(
            f"{marker} says block_bytes={found_bytes}, expected {block_bytes}",
            hint=f"run every node with the same block geometry, or {_ANOTHER_DIRECTORY}",
        )


def _read_marker(marker: str) -> int:
    """The ``block_bytes`` of a marker of ours; raises ``FormatError`` if it is none."""
    data = Path(marker).read_bytes()[:_SEALED_BYTES]
    if len(data) < _SEALED_BYTES or not data.startswith(_MAGIC):
        raise FormatError(f"{marker} is no marker of KVStrata", hint=_ANOTHER_DIRECTORY)
    version: int
    found_bytes: int
    _, version, _, found_bytes = _MARKER.unpack_from(data)
    if version != FORMAT_VERSION:
        raise FormatError(
            f"{marker} has format version {version}, this release reads version {FORMAT_VERSION}",
            hint=f"use the release that wrote it, or {_ANOTHER_DIRECTORY}",
        )
    if not is_sealed(data):
        raise FormatError(f"{marker} is damaged: its checksum is wrong", hint=_ANOTHER_DIRECTORY)
    return found_bytes
