"""A gate that many pass side by side, until somebody needs the place behind it empty."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Gate"]


class Gate:
    """Many inside, or one who keeps all others out. For any threads.

    >>> gate = Gate()
    >>> with gate.passing(), gate.shut(timeout_seconds=0) as is_alone:
    ...     is_alone
    False
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards all below
        self._inside = 0
        self._shutting = 0  # who keep it shut, or wait for that
        self._is_shut = False

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Be inside, once nobody keeps the gate shut or waits for that. Not to be nested."""
        with self._changed:
            self._changed.wait_for(lambda: not self._shutting)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def shut(self, timeout_seconds: float) -> Iterator[bool]:
        """Let nobody in; yields whether within *timeout_seconds* one was alone."""
        with self._changed:
            self._shutting += 1
            is_alone = self._changed.wait_for(
                lambda: not (self._inside or self._is_shut), timeout_seconds
            )
            self._is_shut |= is_alone
        try:
            yield is_alone
        finally:
            with self._changed:
                self._shutting -= 1
                if is_alone:
                    self._is_shut = False
                self._changed.notify_all()
