"""Log lines are written by a thread of their own: who reads them slowly holds up no client."""

import contextlib
import logging
import queue
import threading
from collections.abc import Iterator
from logging.handlers import QueueHandler
from typing import Final

_WAITING_LINES: Final = 10_000  # lines beyond are dropped
_LAST_SECONDS: Final = 1.0  # that a reader has for what is left at the end


class Relay(QueueHandler):
    """Hands records to other handlers, on a thread."""

    def __init__(self, handlers: list[logging.Handler]) -> None:
        self._records: queue.Queue[logging.LogRecord | None] = queue.Queue(_WAITING_LINES)
        super().__init__(self._records)
        self._handlers = handlers
        self._thread = threading.Thread(target=self._run, name="kvstrata-log", daemon=True)
        self._thread.start()

    def enqueue(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self._records.put_nowait(record)

    @property
    def is_stuck(self) -> bool:
        """Whether lines are left that nobody takes, once ``end`` has been called.

        Python then waits for the handlers when it exits, for ever.
        """
        return self._thread.is_alive()

    def end(self) -> None:
        """Let the thread write what waits, for a moment."""
        try:
            self._records.put(None, timeout=_LAST_SECONDS)
        except queue.Full:
            return
        self._thread.join(_LAST_SECONDS)

    def _run(self) -> None:
        while (record := self._records.get()) is not None:
            for handler in self._handlers:
                if record.levelno >= handler.level:
                    handler.handle(record)


@contextlib.contextmanager
def logging_on_a_thread() -> Iterator[Relay]:
    """Meanwhile the root logger's handlers are called on a thread, in order."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    relay = Relay(handlers)
    root.handlers[:] = [relay]
    try:
        yield relay
    finally:
        root.handlers[:] = handlers
        relay.end()
