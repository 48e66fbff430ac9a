"""Whichever call to the operating system fails: an error of ours, no leak, and never a wrong byte."""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstrata.core.errors import ConfigError, TierUnavailable
from kvstrata.core.types import Read, Write
from kvstrata.storage.disk import DiskStore
from kvstrata.storage.disk_system import FileSystem

BLOCK_BYTES = 4096
SLOTS = 5
KEYS = [b"n" * 16 + bytes([number]) * 32 for number in range(SLOTS)]
# What undoing and closing need cannot be refused: the kernel releases a descriptor in any case.
NEVER_FAIL = {"close", "rmdir", "unlink"}


class Failing(FileSystem):
    """Raises *code* at call number *fails_at*, and counts the calls."""

    def __init__(self, fails_at: int, code: int) -> None:
        self.fails_at = fails_at
        self.code = code
        self.calls = 0


def _counted(name: str) -> Callable[..., Any]:
    real = getattr(FileSystem, name)

    def call(self: Failing, *args: object) -> Any:
        self.calls += 1
        if self.calls == self.fails_at:
            raise OSError(self.code, os.strerror(self.code))
        return real(self, *args)

    return call


for _name in vars(FileSystem):
    if not _name.startswith("_") and _name not in NEVER_FAIL:
        setattr(Failing, _name, _counted(_name))


def make(paths: Sequence[Path], system: FileSystem | None = None) -> DiskStore:
    return DiskStore(
        paths,
        block_bytes=BLOCK_BYTES,
        capacity_bytes=SLOTS * 8192,
        max_blocks_per_file=2,
        lock_timeout_seconds=0,
        system=system,
    )


def block(number: int) -> bytes:
    return bytes([number]) * BLOCK_BYTES


def live(store: DiskStore) -> list[bool]:
    """A life with every operation; which blocks must be there at its end."""
    buffers = [memoryview(block(number)) for number in range(SLOTS)]
    stored = [False] * SLOTS
    try:
        fates = store.write(KEYS[:3], [None] * 3, buffers[:3])
        stored[:3] = [fate is Write.STORED for fate in fates]
        served(store)
        stored[1] = False
        store.remove([KEYS[1]])
        fates = store.write(KEYS[3:], [None] * 2, buffers[3:])
        stored[3:] = [fate is Write.STORED for fate in fates]
    except TierUnavailable:
        pass
    finally:
        store.close()
    return stored


def served(store: DiskStore) -> list[bool]:
    """Which blocks are served; all that are have the right bytes."""
    buffers = [memoryview(bytearray(b"\xee" * BLOCK_BYTES)) for _ in KEYS]
    fates = store.read_into(KEYS, buffers)
    for number, (fate, buffer) in enumerate(zip(fates, buffers, strict=True)):
        assert fate is not Read.HIT or buffer == block(number)
    return [fate is Read.HIT for fate in fates]


def calls_of_a_life(paths: Sequence[Path]) -> int:
    system = Failing(0, 0)
    live(make(paths, system))
    return system.calls


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody loses power here: syncing would only be slow."""
    monkeypatch.setattr(os, "fdatasync", lambda _: None)
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.parametrize("directories", [1, 2])
@pytest.mark.parametrize("exists", [False, True])
def test_any_call_may_fail(tmp_path: Path, directories: int, exists: bool) -> None:
    def paths(run: str) -> list[Path]:
        found = [tmp_path / run / str(number) for number in range(directories)]
        if exists:
            make(found).close()
        return found

    descriptors = set(os.listdir("/proc/self/fd"))
    for fails_at in range(1, calls_of_a_life(paths("counted")) + 1):
        here = paths(str(fails_at))
        try:
            code = errno.EIO if fails_at % 2 else errno.ENOSPC
            store = make(here, Failing(fails_at, code))
        except ConfigError:
            stored = [False] * SLOTS
            if not exists:
                left = [file.name for file in (tmp_path / str(fails_at)).rglob("*.*")]
                assert set(left) <= {"kvstrata.lock"}
        else:
            stored = live(store)
        assert set(os.listdir("/proc/self/fd")) <= descriptors
        store = make(here)
        assert all(has for has, must in zip(served(store), stored, strict=True) if must)
        store.remove(KEYS)
        buffers = [memoryview(block(number)) for number in range(SLOTS)]
        assert store.write(KEYS, [None] * SLOTS, buffers) == [Write.STORED] * SLOTS
        store.close()
