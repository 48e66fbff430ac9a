"""The lines of a trace file, plain or gzip, and what is said about a bad one."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from kvstrata.core.errors import ConfigError

__all__ = ["Line", "OnRead", "bad_line", "read_lines"]

Line = tuple[int, bytes]
"""Number, from 1, and content."""

OnRead = Callable[[int, int], None]
"""Told bytes read and bytes in all of the file as it lies on the disk."""

_GZIP_MAGIC: Final = b"\x1f\x8b"
_LONGEST_LINE_BYTES: Final = 64 << 20
_LINES_A_TELLING: Final = 1024


def read_lines(path: Path, on_read: OnRead | None = None) -> Iterator[Line]:
    """The lines of *path* that are not blank, in bounded memory.

    A file that cannot be read to its end is a ``ConfigError`` that says where it ends.
    """
    number = 0
    try:
        total_bytes = path.stat().st_size
        with path.open("rb") as raw:
            is_gzip = raw.peek(2)[:2] == _GZIP_MAGIC
            lines: io.BufferedIOBase = gzip.GzipFile(fileobj=raw) if is_gzip else raw
            while line := lines.readline(_LONGEST_LINE_BYTES):
                number += 1
                if len(line) == _LONGEST_LINE_BYTES:
                    raise bad_line(path, number, f"longer than {_LONGEST_LINE_BYTES >> 20} MiB")
                if on_read is not None and number % _LINES_A_TELLING == 0:
                    on_read(raw.tell(), total_bytes)
                if line.strip():
                    yield number, line
        if on_read is not None:
            on_read(total_bytes, total_bytes)
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise ConfigError(
            f"{path}: the gzip data ends or breaks after line {number}: {e}",
            hint="the file is not complete: copy it again",
        ) from e
    except OSError as e:
        raise ConfigError(
            f"{path} cannot be read: {e.strerror or e}",
            hint="name a trace that exists and that you may read",
        ) from e


def bad_line(path: Path, number: int, what: str, *, hint: str | None = None) -> ConfigError:
    """The error for line *number* of *path*."""
    return ConfigError(
        f"{path}:{number}: {what}", hint=hint or "correct the line, or take it out of the trace"
    )
