"""Warnings about clients, of which a broken one could cause any number."""

import logging
import time
from typing import Final

_log = logging.getLogger(__name__)

_MOST: Final = 20
_SECONDS: Final = 10.0


class Complaints:
    """Logs at most 20 warnings in 10 seconds, and then how many there were besides."""

    def __init__(self) -> None:
        self._since = -_SECONDS  # monotonic seconds
        self._count = 0

    def warn(self, message: str, *args: object) -> None:
        now = time.monotonic()
        if now - self._since >= _SECONDS:
            if self._count > _MOST:
                _log.warning("%d more warnings of this kind are not shown", self._count - _MOST)
            self._since, self._count = now, 0
        self._count += 1
        if self._count <= _MOST:
            _log.warning(message, *args)
