"""Servers that have failed, and are left alone for a while."""

import threading
import time
from collections.abc import Iterable, Sequence

from kvstrata.storage.remote.valkey.address import Address

__all__ = ["Pauses"]


class Pauses:
    """A server that has failed is tried again by one call every *seconds*. Thread-safe."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()  # guards what follows
        self._failed: dict[Address, tuple[float, Exception]] = {}  # until when, and why

    def begin(self, address: Address, fault: Exception) -> bool:
        """Whether it had not failed before."""
        with self._lock:
            is_new = address not in self._failed
            self._failed[address] = time.monotonic() + self._seconds, fault
            return is_new

    def end(self, address: Address) -> bool:
        """It has answered; whether it had failed before."""
        if address not in self._failed:
            return False
        with self._lock:
            return self._failed.pop(address, None) is not None

    def of(self, address: Address) -> Exception | None:
        """Why it is left alone. ``None``: the caller is to ask it, and others to wait meanwhile."""
        if address not in self._failed:
            return None
        with self._lock:
            now = time.monotonic()
            until, fault = self._failed.get(address, (now, None))
            if fault is None or now < until:
                return fault
            self._failed[address] = now + self._seconds, fault
            return None

    def spared(self, addresses: Iterable[Address]) -> list[Address]:
        """Those that did not fail when they were asked last."""
        return [address for address in addresses if address not in self._failed]

    def due(self, addresses: Sequence[Address]) -> list[Address]:
        """Those that ``of`` would have asked now."""
        now = time.monotonic()
        ready = (now, None)
        return [each for each in addresses if self._failed.get(each, ready)[0] <= now]

    def keep_only(self, addresses: set[Address]) -> None:
        """Forget all others."""
        with self._lock:
            self._failed = {each: why for each, why in self._failed.items() if each in addresses}
