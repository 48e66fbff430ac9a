"""Log lines about clients, of which a broken one could cause any number."""

import logging
import time
from typing import Final

_log = logging.getLogger(__name__)

_MOST: Final = 20
_SECONDS: Final = 10.0
_KEPT_TEXTS: Final = 64
_SHOWN_CHARACTERS: Final = 500  # of a text: a client may quote itself at length
_SAME_TEXT_SECONDS: Final = 60.0


class ClientLog:
    """Logs at most 20 warnings in 10 seconds, and then how many there were besides; likewise news."""

    def __init__(self) -> None:
        self._warnings = _Allowance(logging.WARNING, "warnings")
        self._news = _Allowance(logging.INFO, "lines")
        self._texts: dict[str, float] = {}  # with when they were logged; the newest last

    def warn(self, message: str, *args: object) -> None:
        self._warnings.log(message, *args)

    def warn_once(self, text: str) -> None:
        """Of the same words one line a minute, however often a client tries again."""
        now, text = time.monotonic(), text[:_SHOWN_CHARACTERS]
        if now - self._texts.get(text, -_SAME_TEXT_SECONDS) < _SAME_TEXT_SECONDS:
            return
        self._texts.pop(text, None)
        self._texts[text] = now
        if len(self._texts) > _KEPT_TEXTS:
            del self._texts[next(iter(self._texts))]
        self._warnings.log("%s", text)

    def tell(self, message: str, *args: object) -> None:
        """Something happened that is as it should be."""
        self._news.log(message, *args)


class _Allowance:
    """Lines of one level."""

    def __init__(self, level: int, kind: str) -> None:
        self._level = level
        self._kind = kind
        self._since = -_SECONDS  # monotonic seconds
        self._count = 0

    def log(self, message: str, *args: object) -> None:
        now = time.monotonic()
        if now - self._since >= _SECONDS:
            if self._count > _MOST:
                more = self._count - _MOST
                _log.log(self._level, "%d more %s of this kind are not shown", more, self._kind)
            self._since, self._count = now, 0
        self._count += 1
        if self._count <= _MOST:
            _log.log(self._level, message, *args)
