"""Asks a server once a second, as `kvstrata stats` does, and remembers the last minutes."""

import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from kvstrata.core.errors import KVStrataError
from kvstrata.manager.report import CacheReport, RunReport
from kvstrata.server.client import ManagerClient, observe
from kvstrata.server.page.samples import Sample, sample

__all__ = ["Sampler", "Seen"]

_KEPT_SAMPLES: Final = 900
_PERIOD_SECONDS: Final = 1.0
_ANSWER_SECONDS: Final = 3.0
_HOTTEST_PERIODS: Final = 2  # so seldom, and only while somebody looks
_LOOKING_SECONDS: Final = 10.0
_HOT_RUNS: Final = 20


class Seen(msgspec.Struct, frozen=True):
    """What is known of the server now."""

    socket: str
    problem: str | None  # why there is nothing new
    report: CacheReport | None
    hottest: list[RunReport]
    samples: list[Sample]
    latest: int  # number of the latest sample; they begin again with a new page


class Sampler:
    """One server. ``start`` and ``close`` it, or call ``look`` by yourself; ``seen`` is thread-safe."""

    def __init__(self, path: Path, *, always_hottest: bool = False) -> None:
        self._path = path
        self._always_hottest = always_hottest
        self._lock = threading.Lock()  # guards all that ``seen`` shows
        self._problem: str | None = "not asked yet"
        self._report: CacheReport | None = None
        self._hottest: list[RunReport] = []
        self._samples: deque[Sample] = deque(maxlen=_KEPT_SAMPLES)
        self._looked_at = 0.0  # monotonic seconds: when ``seen`` was called last
        self._asked_at = 0.0
        self._number = 0
        self._turn = 0
        self._client: ManagerClient | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstrata-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(_ANSWER_SECONDS + _PERIOD_SECONDS)
        self._hang_up()

    def seen(self, after: int = 0) -> Seen:
        """What is known, with the samples whose number is above *after*."""
        with self._lock:
            self._looked_at = time.monotonic()
            samples = [each for each in self._samples if each.number > after]
            return Seen(
                str(self._path),
                self._problem,
                self._report,
                list(self._hottest),
                samples,
                self._number,
            )

    def look(self) -> None:
        """Ask the server once."""
        try:
            if self._client is None:
                self._client = observe(self._path, timeout_seconds=_ANSWER_SECONDS)
            report = self._client.stats()
            hottest = self._client.hottest(_HOT_RUNS) if self._wants_hottest() else None
        except KVStrataError as e:
            self._hang_up()
            with self._lock:
                self._problem = str(e.args[0]) if e.args else str(e)
            return
        now = time.monotonic()
        with self._lock:
            self._take(report, now)
            if hottest is not None:
                self._hottest = hottest

    def _take(self, report: CacheReport | None, now: float) -> None:
        self._problem = None if report is not None else "it waits for its first engine"
        last, self._report = self._report, report
        if last is not None and report is not None and last.server_id == report.server_id:
            self._number += 1
            self._samples.append(
                sample(
                    last,
                    report,
                    number=self._number,
                    at_seconds=time.time(),
                    seconds=now - self._asked_at,
                )
            )
        self._asked_at = now

    def _wants_hottest(self) -> bool:
        self._turn += 1
        if self._always_hottest:
            return True
        is_looking = time.monotonic() - self._looked_at < _LOOKING_SECONDS
        return is_looking and self._turn % _HOTTEST_PERIODS == 0

    def _hang_up(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with suppress(OSError):
                client.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            self.look()
            self._closing.wait(_PERIOD_SECONDS)
