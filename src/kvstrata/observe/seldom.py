"""Warnings of what may happen to every request: one an interval, with a count of the rest."""

import logging
import time
from collections.abc import Callable
from typing import Final

__all__ = ["SeldomWarning"]

_INTERVAL_SECONDS: Final = 10.0


class SeldomWarning:
    """Logs the first at once, and later ones at most every ten seconds."""

    def __init__(
        self, logger: logging.Logger, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = logger
        self._clock = clock
        self._next = -float("inf")  # seconds of the clock
        self._left_out = 0

    def __call__(self, message: str, *args: object) -> None:
        """*message* as for ``Logger.warning``; it should name no request."""
        now = self._clock()
        if now < self._next:
            self._left_out += 1
            return
        rest = f" ({self._left_out} more since the last such line)" if self._left_out else ""
        self._log.warning(message + "%s", *args, rest)
        self._next, self._left_out = now + _INTERVAL_SECONDS, 0
