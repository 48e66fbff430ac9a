"""Asks a store on threads of its own what it holds, so that no lookup waits behind a read."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvstrata.core.errors import KVStrataError
from kvstrata.core.types import StoreKey
from kvstrata.storage.store import Store

__all__ = ["Finder"]

_log = logging.getLogger(__name__)

_THREADS: Final = 2
_MOST_WAITING: Final = 64  # searches; what comes on top finds nothing


class Finder:
    """Searches for prefixes in one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvstrata-find")
        self._room = threading.Semaphore(_MOST_WAITING)

    def find(self, keys: Sequence[StoreKey], done: Callable[[int], None]) -> None:
        """Call *done* once with how many leading *keys* the store holds; 0 if it cannot tell.

        On another thread, or at once on this one if too many searches wait.
        """
        if not self._room.acquire(blocking=False):
            done(0)
            return
        try:
            self._threads.submit(self._find, keys, done)
        except RuntimeError:  # closed meanwhile
            done(0)

    def close(self) -> None:
        """Take no more searches; those that wait are not begun and not answered."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _find(self, keys: Sequence[StoreKey], done: Callable[[int], None]) -> None:
        self._room.release()
        found = 0
        try:
            there = self._store.exists(keys)
            found = there.index(False) if False in there else len(there)
        except KVStrataError as e:
            _log.warning("a search for %d blocks failed: %s", len(keys), e)
        except Exception:  # noqa: BLE001 - thread top: whoever waits must hear of the failure
            _log.exception("a search for %d blocks failed", len(keys))
        done(found)
