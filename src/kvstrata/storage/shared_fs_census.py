"""Walking all files of a shared store: what it holds, what is coldest, what nobody misses."""

import contextlib
import heapq
import os
import stat
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from kvstrata.storage.shared_fs_directory import (
    Names,
    is_block_name,
    is_namespace_name,
    is_temporary_name,
)
from kvstrata.storage.shared_fs_file import NOT_THERE

MAX_COLDEST: Final = 65536


class Held(NamedTuple):
    """Blocks and the bytes of their files, headers included; a change of both may be negative."""

    blocks: int
    file_bytes: int

    def plus(self, other: "Held") -> "Held":
        return Held(self.blocks + other.blocks, self.file_bytes + other.file_bytes)

    def minus(self, other: "Held") -> "Held":
        return Held(self.blocks - other.blocks, self.file_bytes - other.file_bytes)


NOTHING: Final = Held(0, 0)


class BlockFile(NamedTuple):
    """One block file; the one used longest ago sorts first."""

    used_ns: int
    file_bytes: int
    path: str


class Census(NamedTuple):
    """What a walk has found."""

    held: Held
    coldest: list[BlockFile]  # coldest first, at most MAX_COLDEST


def take_census(
    names: Names, abandoned_before_ns: int, progress: Callable[[], None] = lambda: None
) -> Census:
    """Count every block, and remove temporary files last written before *abandoned_before_ns*.

    Also removes empty namespaces and what is left in the trash. Files that others remove
    meanwhile are not counted; files with names that are not ours are left alone. *progress* is
    called at every block: a walk over millions takes minutes.
    """
    held = NOTHING

    def counted() -> Iterator[BlockFile]:
        nonlocal held
        for namespace in _entries(names.blocks):
            if not is_namespace_name(namespace.name):
                continue
            before = held
            for file in _walk(namespace.path, abandoned_before_ns):
                held = held.plus(Held(1, file.file_bytes))
                progress()
                yield file
            if held == before:
                _remove_empty(namespace.path)

    coldest = heapq.nsmallest(MAX_COLDEST, counted())
    for dropped in _entries(names.trash):
        delete_namespace(dropped.path)
    return Census(held, coldest)


def delete_namespace(path: str) -> Held:
    """Delete the blocks below *path* and, if nothing else is there, *path*; what was deleted."""
    deleted = NOTHING
    for file in _walk(path, abandoned_before_ns=None):
        if unlink(file.path):
            deleted = deleted.plus(Held(1, file.file_bytes))
    _remove_empty(path)
    return deleted


def unlink(path: str) -> bool:
    """Remove *path*; whether it was this call that did it."""
    try:
        os.unlink(path)
    except OSError as e:
        if e.errno in NOT_THERE:
            return False
        raise
    return True


def _walk(namespace: str, abandoned_before_ns: int | None) -> Iterator[BlockFile]:
    """The block files below *namespace*; ``None`` takes every temporary file for abandoned."""
    for shard in _entries(namespace):
        for entry in _entries(shard.path):
            try:
                found = entry.stat(follow_symlinks=False)
            except OSError as e:
                if e.errno in NOT_THERE:
                    continue
                raise
            if is_block_name(entry.name) and stat.S_ISREG(found.st_mode):
                yield BlockFile(found.st_mtime_ns, found.st_size, entry.path)
            elif is_temporary_name(entry.name) and (
                abandoned_before_ns is None or found.st_mtime_ns < abandoned_before_ns
            ):
                unlink(entry.path)


def _remove_empty(namespace: str) -> None:
    """Remove *namespace* as far as it is empty; a writer that needs it makes it again."""
    for directory in [*(shard.path for shard in _entries(namespace)), namespace]:
        with contextlib.suppress(OSError):
            os.rmdir(directory)


def _entries(directory: str) -> list[os.DirEntry[str]]:
    """What is in *directory*; nothing if it is none."""
    try:
        with os.scandir(directory) as found:
            return list(found)
    except OSError as e:
        if e.errno in NOT_THERE:
            return []
        raise
