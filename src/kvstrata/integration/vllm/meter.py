"""Asks the engine's server now and then what it has counted, and says what is new of it."""

import time
from typing import Final

from kvstrata.core.config import Config
from kvstrata.integration.vllm.engine_metrics import KVStrataStats
from kvstrata.integration.vllm.link import CacheLink
from kvstrata.manager.report import CacheReport
from kvstrata.manager.samples import Sample, Spread, samples
from kvstrata.observe import metrics
from kvstrata.server import protocol as p
from kvstrata.server.client import Pending

_PERIOD_SECONDS: Final = 2.0
_ANSWER_SECONDS: Final = 0.001  # that an idle step waits for the server's

_Key = tuple[str, tuple[str, ...]]


class Meter:
    """Metrics of an embedded server; of an attached one only whether it is there.

    An attached server is asked by Prometheus itself: it would be counted once for each engine.
    """

    def __init__(self, config: Config, link: CacheLink) -> None:
        self._link = link
        self._is_embedded = config.server == "embedded"
        self._server = "embedded" if config.socket is None else str(config.socket)
        self._patience_seconds = config.lookup_timeout_seconds
        self._pending: Pending | None = None
        self._connection = 0
        self._is_idle = False  # the step that was planned last
        self._next = 0.0
        self._sent: tuple[int, int] | None = None  # by the link, as of the last report
        self._server_id = ""
        self._before: dict[_Key, float | Spread] = {}
        self._found = KVStrataStats()
        self._connected: bool | None = None

    def step(self, *, is_idle: bool) -> None:
        """A step of the engine; in an idle one nothing is computed, loaded or saved."""
        if self._connected is not self._link.ready:
            self._connected = self._link.ready
            self._found.set_gauge(metrics.CONNECTED, (self._server,), int(self._connected))
        if not self._is_embedded:
            return
        self._is_idle = is_idle
        self._take_answer()
        now = time.monotonic()
        if self._pending is None and (now >= self._next or (is_idle and self._has_news)):
            self._next = now + _PERIOD_SECONDS
            self._pending, self._connection = self._link.submit(p.Stats(0)), self._link.number
            # What the server does of itself, as writing to disk, may go on after a busy step's report.
            self._sent = self._link.sent if is_idle else None

    @property
    def busy(self) -> bool:
        """Whether a step more would tell vLLM what the last ones have done."""
        if not self._is_embedded or not self._link.ready:
            return False
        if self._pending is None:
            return self._has_news
        return time.monotonic() - self._pending.sent_at < self._patience_seconds

    @property
    def _has_news(self) -> bool:
        """Whether anything was asked of the server that it may have counted."""
        return self._link.sent != self._sent

    def take(self) -> KVStrataStats | None:
        """What is new since the last call, for ``get_kv_connector_stats``.

        vLLM asks at the end of a step. An idle one waits a moment for the server: a step more, for
        the answer alone, would hold up a request that comes meanwhile for longer.
        """
        if self._pending is not None:
            self._link.poll(_ANSWER_SECONDS if self._is_idle else 0.0)
            self._take_answer()
        if self._found.is_empty():
            return None
        found, self._found = self._found, KVStrataStats()
        return found

    def _take_answer(self) -> None:
        pending = self._pending
        if pending is None or (pending.reply is None and self._connection == self._link.number):
            return
        self._pending = None
        if isinstance(pending.reply, p.Report) and pending.reply.report is not None:
            self._compare(pending.reply.report)

    def _compare(self, report: CacheReport) -> None:
        if report.server_id != self._server_id:  # another one, which has begun at nothing
            self._server_id = report.server_id
            self._before.clear()
        for sample in samples(report):
            key = (sample.metric.name, sample.labels)
            before = self._before.get(key)
            if sample.value != before:
                self._before[key] = sample.value
                self._add(sample, before)

    def _add(self, sample: Sample, before: float | Spread | None) -> None:
        metric, labels, value = sample
        if isinstance(value, Spread):
            self._found.add_spread(metric, labels, _grown(value, before))
        elif metric.kind == "gauge":
            self._found.set_gauge(metric, labels, value)
        else:
            grown = value - (before if isinstance(before, int | float) else 0)
            if grown:
                self._found.add_counter(metric, labels, grown)


def _grown(value: Spread, before: object) -> Spread:
    """The observations of *value* that are not in *before*."""
    if not isinstance(before, Spread):
        return value
    within = tuple(new - old for new, old in zip(value.within, before.within, strict=True))
    return Spread(within, value.calls - before.calls, value.seconds - before.seconds)
