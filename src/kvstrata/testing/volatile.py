"""What of a file system a power failure may take away: all that nobody has synced."""

import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Final, TypeVar

_SECTOR_BYTES: Final = 512  # what a disk writes as a whole

T = TypeVar("T")

_Survivors = Callable[[int], list[bool]]


class VolatileFile:
    """The content of a file: what is durable, and every change since. Offsets are in bytes."""

    def __init__(self, durable: bytes = b"") -> None:
        self._durable = durable
        self._changes: list[tuple[int, bytes]] = []
        self._sizes: list[int] = [len(durable)]

    def write(self, offset: int, data: bytes) -> None:
        self._changes.append((offset, data))
        self._sizes.append(max(self._sizes[-1], offset + len(data)))

    def resize(self, size: int) -> None:
        """Cut the file off, or extend it with zeros."""
        if size < self._sizes[-1]:
            self._changes.append((size, bytes(self._sizes[-1] - size)))
        self._sizes.append(size)

    @property
    def size(self) -> int:
        """The length that the process sees."""
        return self._sizes[-1]

    def sync(self) -> None:
        """Everything so far is durable."""
        self.lose(lambda count: [True] * count)

    def lose(self, survivors: _Survivors) -> bytes:
        """The content after a power failure, which is durable from now on.

        Each sector is as it was after any of its changes, in no order with the others, and so is
        the length.
        """
        room = bytearray(max(self._sizes))
        room[: len(self._durable)] = self._durable
        touched: dict[int, list[bytes]] = {}
        for offset, data in self._changes:
            first = offset // _SECTOR_BYTES
            last = (offset + len(data) - 1) // _SECTOR_BYTES
            for sector in range(first, last + 1):
                start = sector * _SECTOR_BYTES
                touched.setdefault(sector, [bytes(room[start : start + _SECTOR_BYTES])])
            room[offset : offset + len(data)] = data
            for sector in range(first, last + 1):
                start = sector * _SECTOR_BYTES
                touched[sector].append(bytes(room[start : start + _SECTOR_BYTES]))
        for sector, versions in touched.items():
            start = sector * _SECTOR_BYTES
            room[start : start + _SECTOR_BYTES] = _last(versions, survivors)
        self._durable = bytes(room[: _last(self._sizes, survivors)])
        self._changes.clear()
        self._sizes = [len(self._durable)]
        return self._durable


def _last(versions: Sequence[T], survivors: _Survivors) -> T:
    """The first version, or the last one of the others that survives."""
    kept = [0, *(n for n, kept in enumerate(survivors(len(versions) - 1), 1) if kept)]
    return versions[kept[-1]]


class VolatileTree:
    """The files below some directories, by name. Holds all that a power failure may take away.

    What is there before the first change counts as durable.
    """

    def __init__(self) -> None:
        self._now: dict[Path, VolatileFile | None] = {}  # None is a directory
        self._durable: dict[Path, VolatileFile | None] = {}
        # Of each directory: changes of names, each a group that is done as a whole.
        self._changes: dict[Path, list[dict[Path, VolatileFile | None]]] = defaultdict(list)
        self._gone = VolatileFile()  # in a change: the name is removed

    def file(self, path: Path) -> VolatileFile:
        """The file *path*, which exists or is being made."""
        found = self._now.get(path)
        if found is not None:
            return found
        if path.exists():
            file = VolatileFile(path.read_bytes())
            self._durable[path] = self._now[path] = file
            return file
        file = VolatileFile()
        self._change({path: file})
        return file

    def make_directory(self, path: Path) -> None:
        self._change({path: None})

    def rename(self, old: Path, new: Path) -> None:
        file = self.file(old)
        if new.exists():
            self.file(new)
        self._change({old: self._gone, new: file})

    def remove(self, path: Path) -> None:
        """Remove a file, or a directory that is empty."""
        if path not in self._now and not path.is_dir():
            self.file(path)
        self._change({path: self._gone})

    def sync(self, directory: Path) -> None:
        """All names in *directory* are durable."""
        for change in self._changes.pop(directory, []):
            self._apply(self._durable, change)

    def lose(self, choose: Random) -> None:
        """Make the real files what a power failure leaves of them."""
        for directory in list(self._changes):
            pending = self._changes[directory]
            survivors = zip(pending, _survivors(choose)(len(pending)), strict=True)
            self._changes[directory] = [change for change, survives in survivors if survives]
            self.sync(directory)
        for path, file in self._now.items():
            if file is not None:
                path.unlink(missing_ok=True)
            elif path not in self._durable:
                shutil.rmtree(path, ignore_errors=True)
        for path, file in sorted(self._durable.items(), key=lambda item: len(item[0].parts)):
            if not path.parent.is_dir():
                continue
            if file is None:
                path.mkdir(0o700, exist_ok=True)
            else:
                path.write_bytes(file.lose(_survivors(choose)))
                path.chmod(0o600)

    def _change(self, change: dict[Path, VolatileFile | None]) -> None:
        self._apply(self._now, change)
        self._changes[next(iter(change)).parent].append(change)

    def _apply(
        self, names: dict[Path, VolatileFile | None], change: dict[Path, VolatileFile | None]
    ) -> None:
        for path, file in change.items():
            if file is self._gone:
                names.pop(path, None)
            else:
                names[path] = file


def _survivors(choose: Random) -> _Survivors:
    """Which of some changes survive: none, all, or any."""
    share = choose.choice([0.0, 1.0, choose.random()])
    return lambda count: [choose.random() < share for _ in range(count)]
