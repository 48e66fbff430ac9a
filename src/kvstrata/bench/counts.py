"""Bytes that a worker of a peer has moved, in a file: it counts, and another process reads."""

from pathlib import Path

import numpy as np

__all__ = ["Counts", "read_counts"]

_LOADED, _STORED = 0, 1


class Counts:
    """Two int64 in a file of their own, which begin at zero."""

    def __init__(self, path: str | Path) -> None:
        self._counts = np.memmap(path, np.int64, "w+", shape=2)

    def loaded(self, count: int) -> None:
        """*count* bytes more into the device."""
        self._counts[_LOADED] += count

    def stored(self, count: int) -> None:
        """*count* bytes more out of it."""
        self._counts[_STORED] += count


def read_counts(path: Path) -> tuple[int, int] | None:
    """Bytes loaded and stored so far; None where nobody has counted."""
    if not path.exists():
        return None
    loaded, stored = np.fromfile(path, np.int64)
    return int(loaded), int(stored)
