"""The server's I/O threads: blocks between host slots and one store, never on the caller's thread."""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvstrata.core.errors import KVStrataError
from kvstrata.core.types import Read, StoreKey
from kvstrata.storage.store import Store

_log = logging.getLogger(__name__)

_READ_BATCH_BYTES = 4 << 20
_READERS = 4
_WRITER_NICENESS = 10
_RETRY_SECONDS = 1.0  # a store that failed is tried again after this, woken or not


class TransferEngine:
    """Reads on demand, writes in the background.

    ``read`` returns at once; *done* is called on an I/O thread, once per part of the request.
    The writer calls ``write_some`` again and again while it returns True, else waits for ``wake``.
    """

    def __init__(self, store: Store, write_some: Callable[[], bool], *, block_bytes: int) -> None:
        self._store = store
        self._write_some = write_some
        self._batch_blocks = max(1, _READ_BATCH_BYTES // block_bytes)
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="kvstrata-read")
        self._work = threading.Event()
        self._closing = threading.Event()
        self._writer = threading.Thread(target=self._write_loop, name="kvstrata-write", daemon=True)
        self._writer.start()

    def read(
        self,
        keys: Sequence[StoreKey],
        buffers: Sequence[memoryview],
        done: Callable[[int, Sequence[Read | None]], None],
    ) -> None:
        """Fill ``buffers[i]`` with block ``keys[i]``.

        *done(start, reads)* tells the fates of ``len(reads)`` blocks from index *start* on, None
        where the store could not be asked. Each block has one fate.
        """
        step = self._batch_blocks
        for start in range(0, len(keys), step):
            part = slice(start, start + step)
            try:
                self._readers.submit(self._read_part, keys[part], buffers[part], start, done)
            except RuntimeError:  # closed meanwhile
                done(start, [None] * len(keys[part]))

    def wake(self) -> None:
        """There may be something to write."""
        self._work.set()

    def close(self, timeout_seconds: float) -> None:
        """Stop the threads; running I/O gets *timeout_seconds* to end."""
        self._closing.set()
        self._work.set()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writer.join(timeout_seconds)

    def _read_part(
        self,
        keys: Sequence[StoreKey],
        buffers: Sequence[memoryview],
        start: int,
        done: Callable[[int, Sequence[Read | None]], None],
    ) -> None:
        reads: Sequence[Read | None] = [None] * len(keys)
        try:
            reads = self._store.read_into(keys, buffers)
        except KVStrataError as e:
            _log.warning("reading %d blocks failed: %s", len(keys), e)
        except Exception:  # noqa: BLE001 - thread top: whoever waits must hear of the failure
            _log.exception("reading %d blocks failed", len(keys))
        done(start, reads)

    def _write_loop(self) -> None:
        # Nobody waits for these writes, and the engine next door may have the same cores.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WRITER_NICENESS)
        while not self._closing.is_set():
            self._work.clear()
            try:
                busy = self._write_some()
            except Exception:  # noqa: BLE001 - thread top: later blocks must still be written
                _log.exception("writing blocks in the background failed")
                busy = False
            if not busy:
                self._work.wait(_RETRY_SECONDS)
