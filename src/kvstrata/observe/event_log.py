"""Writes the event log of a cache in use, on a thread of its own: `observe/events.py` says what is in it.

The log is a file and its predecessor, ``PATH`` and ``PATH.1``; each begins with a header, and when
the file has reached half of what both may take it becomes the predecessor. A program that dies
leaves at most a last line without its end, which readers pass over and which the next writer cuts
off. Nothing is synced: after a power failure the end of the log may be missing.
"""

import fcntl
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from kvstrata.core.errors import ConfigError
from kvstrata.core.types import BLOCK_KEY_BYTES, BlockKey, NamespaceId
from kvstrata.observe.events import LogHeader, LookupEvent, PutEvent, decode_event, encode_event

__all__ = ["EventLog", "Seen", "check_event_log"]

_log = logging.getLogger(__name__)

_PAUSE_SECONDS: Final = 0.5  # between two looks for what is to be written
_MOST_WAITING_BYTES: Final = 64 << 20  # of keys, that the writer may be behind
_WRITE_BYTES: Final = 1 << 20
_LONGEST_HEADER_BYTES: Final = 4096
_KEY_DIGITS: Final = 2 * BLOCK_KEY_BYTES
_REMEDY: Final = "name a file in a directory that exists and can be written"


def check_event_log(path: Path) -> None:
    """Raise ``ConfigError`` where no log could be written, whoever else writes one; changes nothing."""
    try:
        fault = _fault_of(path)
    except OSError as e:  # nor may its directory be looked into
        fault = str(e.strerror)
    if fault is not None:
        raise ConfigError(f"the event log {path} cannot be written: {fault}", hint=_REMEDY)


def _fault_of(path: Path) -> str | None:
    if not path.parent.is_dir():
        return f"{path.parent} is no directory"
    if path.exists() and not path.is_file():
        return "it is no file"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"user {os.getuid()} may not write it"
    return None


class Seen(NamedTuple):
    """What an engine asked for or offered."""

    is_put: bool
    namespace: NamespaceId
    keys: bytes  # side by side
    first_block: int  # blocks before them in the prompt, as far as that is known
    parent: BlockKey | None = None
    found_blocks: int = 0  # leading ones of a lookup
    prompt_blocks: int = 0  # of a put: those of the whole prompt


class EventLog:
    """Takes events at once and writes them later.

    ``record`` waits for nothing: not for the disk, not for the writer. An event that finds 64 MiB
    of others waiting is lost, and once a write has failed all further ones are; *on_lost* hears
    how many, on whichever thread it is.
    """

    def __init__(self, path: Path, max_bytes: int, on_lost: Callable[[int], None]) -> None:
        """Open *path*, which this process then has for itself; ``ConfigError`` if it cannot."""
        self._file = _LogFile(path, max_bytes // 2)
        self._on_lost = on_lost
        self._waiting: deque[tuple[float, Seen]] = deque()
        self._recorded_bytes = 0  # only the recording thread changes it
        self._done_bytes = 0  # and only the writer this one
        self._header: LogHeader | None = None
        self._stopped = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstrata-event-log", daemon=True)
        self._thread.start()

    def begin(self, header: LogHeader) -> None:
        """What the blocks of all events are; to be called once, before the first."""
        self._header = header

    def record(self, seen: Seen) -> None:
        """Write *seen* soon. Not thread-safe."""
        behind_bytes = self._recorded_bytes - self._done_bytes
        if self._stopped or behind_bytes + len(seen.keys) > _MOST_WAITING_BYTES:
            self._on_lost(1)
            return
        self._recorded_bytes += len(seen.keys)
        self._waiting.append((time.time(), seen))

    def close(self, timeout_seconds: float) -> None:
        """Write what waits, for *timeout_seconds* at most, and let the file go."""
        self._closing.set()
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        is_last = False
        try:
            while not is_last:
                is_last = self._closing.wait(_PAUSE_SECONDS)
                self._write_waiting()
        except OSError as e:
            self._stopped = True
            _log.warning("the event log %s ends here: %s", self._file.path, e)
            self._on_lost(len(self._waiting))
            self._waiting.clear()
        finally:
            self._file.close()

    def _write_waiting(self) -> None:
        lines = bytearray()
        unwritten = 0  # events of *lines*
        try:
            while self._waiting:
                at_seconds, seen = self._waiting.popleft()
                self._done_bytes += len(seen.keys)
                lines += _line(at_seconds, seen)
                unwritten += 1
                if len(lines) >= _WRITE_BYTES or not self._waiting:
                    self._file.append(lines, self._header)
                    lines.clear()
                    unwritten = 0
        finally:
            if unwritten:
                self._on_lost(unwritten)


class _LogFile:
    """The file, locked, and its predecessor."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._is_begun = False
        try:
            self._fd = _open_locked(path, 0)
        except BlockingIOError as e:
            raise ConfigError(
                f"the event log {path} is being written by another process",
                hint="give each server an event_log of its own",
            ) from e
        except OSError as e:
            raise ConfigError(
                f"the event log {path} cannot be opened: {e.strerror}",
                hint=_REMEDY,
            ) from e

    def append(self, lines: bytearray, header: LogHeader | None) -> None:
        """Write whole *lines* behind what is there, or at the beginning of a new file."""
        if header is None:
            raise ValueError("an event log begins with its header")
        if not self._is_begun:
            self._begin(header)
            self._is_begun = True
        if os.lseek(self._fd, 0, os.SEEK_END) + len(lines) > self._max_bytes:
            self._rotate(header)
        _write_all(self._fd, lines)

    def close(self) -> None:
        os.close(self._fd)

    def _begin(self, header: LogHeader) -> None:
        """Go on with the log that is there if it is of the same blocks."""
        found = os.pread(self._fd, _LONGEST_HEADER_BYTES, 0)
        if not found:
            _write_all(self._fd, encode_event(header))
        elif _header_of(found) == header:
            os.ftruncate(self._fd, _whole_lines_bytes(self._fd))
        else:
            self._rotate(header)

    def _rotate(self, header: LogHeader) -> None:
        self.path.rename(self.path.with_name(self.path.name + ".1"))
        fd = _open_locked(self.path, os.O_EXCL)
        os.close(self._fd)
        self._fd = fd
        _write_all(fd, encode_event(header))


def _line(at_seconds: float, seen: Seen) -> bytes:
    digits = seen.keys.hex()
    keys = [digits[i : i + _KEY_DIGITS] for i in range(0, len(digits), _KEY_DIGITS)]
    if len(set(keys)) < len(keys):  # only the blocks before the repetition count
        keys = keys[: next(i for i, key in enumerate(keys) if key in keys[:i])]
    namespace = seen.namespace.hex()
    parent = None if seen.parent is None else seen.parent.hex()
    if seen.is_put:
        return encode_event(
            PutEvent(at_seconds, namespace, keys, parent, seen.first_block, seen.prompt_blocks)
        )
    found = min(seen.found_blocks, len(keys))
    return encode_event(LookupEvent(at_seconds, namespace, keys, found, parent, seen.first_block))


def _open_locked(path: Path, more_flags: int) -> int:
    """``BlockingIOError`` if another process has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | more_flags, 0o600)
    locked = False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked = True
    finally:
        if not locked:
            os.close(fd)
    return fd


def _write_all(fd: int, data: bytes | bytearray) -> None:
    os.lseek(fd, 0, os.SEEK_END)
    left = memoryview(bytes(data))
    while left:
        left = left[os.write(fd, left) :]


def _header_of(beginning: bytes) -> object:
    try:
        return decode_event(beginning.partition(b"\n")[0])
    except msgspec.DecodeError:
        return None


def _whole_lines_bytes(fd: int) -> int:
    """Where the last line that has its end ends."""
    end = os.lseek(fd, 0, os.SEEK_END)
    while end:
        start = max(0, end - _WRITE_BYTES)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
