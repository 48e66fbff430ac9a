"""The server's I/O threads: blocks between host slots and one store, never on the caller's thread.

They share the interpreter with the control thread, which costs nothing while that one waits, and
too much while it computes: each return from the disk then waits for the interpreter's switch
interval, 5 ms by default. With ``sys.setswitchinterval(0.0002)`` four threads reading 256 KiB,
1, 2 and 4 MiB beside a control thread that never waits reached 0.79, 0.95, 0.87 and 0.99 of what
they reach alone (medians of 8 interleaved pairs on two cores), with the default 0.16, 0.41, 0.59
and 0.85, and a process of their own 0.95, 0.98, 0.92 and 1.02. So a process that serves should
set that interval; a second process would not be worth its protocol.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from kvstrata.core.errors import KVStrataError
from kvstrata.core.types import Read, StoreKey
from kvstrata.storage.store import Store
from kvstrata.transfer.jobs import give

_log = logging.getLogger(__name__)

_READ_BATCH_BYTES = 4 << 20
_WRITER_NICENESS = 10
_RETRY_SECONDS = 1.0  # a store that failed is tried again after this, woken or not
_YIELD_SECONDS = 0.5  # a write waits for reads so long at most: they may never pause

WRITE_BATCH_BYTES: Final = 8 << 20
"""What one call of ``write_some`` should write: much at once, but not in the way of a read."""

Done = Callable[[int, Sequence[Read | None]], None]
Begin = Callable[[int, int], bool]


class TransferLimits(NamedTuple):
    """How much is asked of a store at a time."""

    read_threads: int = 4  # the depth of the queue at the disk
    read_blocks: int = 1  # of one call at least, for a store that reads them side by side
    write_threads: int = 4
    max_queued_read_bytes: int = 4 << 30  # reads beyond, waiting and running, are not asked for
    write_bytes_per_second: float | None = None  # on average; None: no limit


def _always(_start: int, _count: int) -> bool:
    return True


@dataclass(slots=True, eq=False)
class _Part:
    """What one call of the store reads."""

    keys: Sequence[StoreKey]
    buffers: Sequence[memoryview]
    done: Callable[[Sequence[Read | None]], None]
    begin: Callable[[], bool]


class TransferEngine:
    """Reads on demand, writes in the background.

    ``read`` returns at once; *done* is called once per part of the request, on an I/O thread, or
    on the caller's for a part that is not queued.

    Each of the writers calls ``write_some``, which returns the bytes that it wrote, again and
    again until there were none, then waits for ``wake``. They do so side by side: while one makes
    durable what it has written, the others keep the disk busy. None starts a write while a read
    waits or runs, except one each half second.
    """

    def __init__(
        self,
        store: Store,
        write_some: Callable[[], int],
        *,
        block_bytes: int,
        limits: TransferLimits = TransferLimits(),  # noqa: B008 - immutable
    ) -> None:
        self._store = store
        self._write_some = write_some
        self._block_bytes = block_bytes
        self._batch_blocks = max(limits.read_blocks, _READ_BATCH_BYTES // block_bytes)
        self._limits = limits
        self._queued_bytes = 0
        self._waiting: set[_Part] = set()  # not begun
        self._no_reads = threading.Condition()  # guards these two
        self._readers = ThreadPoolExecutor(limits.read_threads, thread_name_prefix="kvstrata-read")
        self._is_woken = False
        self._next_write = 0.0  # when the rate allows it
        self._work = threading.Condition()  # guards these two
        self._closing = threading.Event()
        self._writers = [
            threading.Thread(
                target=self._write_loop, args=[number], name=f"kvstrata-write-{number}", daemon=True
            )
            for number in range(limits.write_threads)
        ]
        for writer in self._writers:
            writer.start()

    def read(
        self,
        keys: Sequence[StoreKey],
        buffers: Sequence[memoryview],
        done: Done,
        begin: Begin = _always,
    ) -> None:
        """Fill ``buffers[i]`` with block ``keys[i]``.

        *done(start, reads)* tells the fates of ``len(reads)`` blocks from index *start* on, None
        where the store could not be asked or its queue is full. Each block has one fate.
        *begin(start, count)* is asked on an I/O thread before a part is read, and answers false
        if it is of no use any more: then it is not read, and *done* not called for it.
        """
        step = self._batch_blocks
        for start in range(0, len(keys), step):
            part = slice(start, start + step)
            some = keys[part]
            ends = partial(done, start), partial(begin, start, len(some))
            if not self._queue(_Part(some, buffers[part], *ends)):
                done(start, [None] * len(some))

    @property
    def is_reading(self) -> bool:
        """Whether reads run or wait."""
        return self._queued_bytes > 0

    def give_up(self) -> None:
        """Reads that have not begun end now: the store could not be asked."""
        with self._no_reads:
            given_up, self._waiting = self._waiting, set()
            for part in given_up:
                self._ended(part)
        for part in given_up:
            part.done([None] * len(part.keys))

    def wake(self) -> None:
        """There may be something to write; one of the writers that wait looks."""
        with self._work:
            self._is_woken = True
            self._work.notify()

    def close(self, timeout_seconds: float) -> None:
        """Stop the threads; running I/O gets *timeout_seconds* to end."""
        self._closing.set()
        with self._work:
            self._work.notify_all()
        with self._no_reads:
            self._no_reads.notify_all()
        self._readers.shutdown(wait=False, cancel_futures=True)
        give_up = time.monotonic() + timeout_seconds
        for writer in self._writers:
            writer.join(max(0.0, give_up - time.monotonic()))

    def _queue(self, part: _Part) -> bool:
        """Give *part* to the I/O threads, unless too much waits already or they are gone."""
        part_bytes = len(part.keys) * self._block_bytes
        with self._no_reads:
            if self._queued_bytes and (
                self._queued_bytes + part_bytes > self._limits.max_queued_read_bytes
            ):
                return False
            try:
                give(self._readers, partial(self._read_part, part))
            except RuntimeError:  # closed meanwhile
                return False
            self._queued_bytes += part_bytes
            self._waiting.add(part)
        return True

    def _read_part(self, part: _Part) -> None:
        with self._no_reads:
            if part not in self._waiting:
                return  # given up
            self._waiting.remove(part)
        reads: Sequence[Read | None] = [None] * len(part.keys)
        wanted = True
        try:
            wanted = part.begin()
            if wanted:
                reads = self._store.read_into(part.keys, part.buffers)
        except KVStrataError as e:
            _log.warning("reading %d blocks failed: %s", len(part.keys), e)
        except Exception:  # noqa: BLE001 - thread top: whoever waits must hear of the failure
            _log.exception("reading %d blocks failed", len(part.keys))
        with self._no_reads:
            self._ended(part)
        if wanted:
            part.done(reads)

    def _ended(self, part: _Part) -> None:
        """*part* is queued no more. Needs the lock."""
        self._queued_bytes -= len(part.keys) * self._block_bytes
        if not self._queued_bytes:
            self._no_reads.notify_all()

    def _write_loop(self, number: int) -> None:
        _lower_priority()
        if number:
            self._wait_for_work(None)
        while not self._closing.is_set():
            self._let_reads_pass()
            started = time.monotonic()
            try:
                written_bytes = self._write_some()
            except Exception:  # noqa: BLE001 - thread top: later blocks must still be written
                _log.exception("writing blocks in the background failed")
                written_bytes = 0
            if not written_bytes:
                self._wait_for_work(None if number else _RETRY_SECONDS)
            elif self._limits.write_bytes_per_second is not None:
                self._keep_pace(started, written_bytes / self._limits.write_bytes_per_second)

    def _let_reads_pass(self) -> None:
        with self._no_reads:
            self._no_reads.wait_for(
                lambda: not self._queued_bytes or self._closing.is_set(), _YIELD_SECONDS
            )

    def _wait_for_work(self, timeout_seconds: float | None) -> None:
        """Without a timeout only one of the others may look by itself, and wakes this one."""
        with self._work:
            self._work.wait_for(lambda: self._is_woken or self._closing.is_set(), timeout_seconds)
            self._is_woken = False

    def _keep_pace(self, started: float, seconds: float) -> None:
        """Wait until a write begun at *started* may have taken *seconds*, after all before it."""
        with self._work:
            self._next_write = max(self._next_write, started) + seconds
            due = self._next_write
        self._closing.wait(max(0.0, due - time.monotonic()))


def _lower_priority() -> None:
    """Nobody waits for writes, and the engine next door may have the same cores."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WRITER_NICENESS)
