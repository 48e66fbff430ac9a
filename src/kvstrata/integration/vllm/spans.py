"""What is done for a request, as spans of the trace that its client or vLLM has begun."""

import time
from collections.abc import Mapping
from typing import NamedTuple

from vllm.v1.request import Request

from kvstrata.core.config import Config
from kvstrata.manager.tasks import TaskStatus
from kvstrata.observe.tracing import Tracing, to_collector
from kvstrata.server.client import Pending


class Origin(NamedTuple):
    """The request that a load or save is for."""

    request_id: str
    headers: Mapping[str, str] | None  # W3C trace context, if vLLM traces


class RequestSpans:
    """Four kinds: ``kvstrata.lookup``, ``.promotion``, ``.load``, ``.save``."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def origin(self, request: Request) -> Origin:
        return Origin(request.request_id, request.trace_headers)

    def looked_up(self, request: Request, pending: Pending) -> None:
        """vLLM has taken what *pending* answered, or gone on without."""
        origin, now, status = self.origin(request), time.monotonic(), pending.status
        answered_at = pending.answered_at or now
        tier = lowest_tier(status)
        found: dict[str, str | int | bool] = {"kvstrata.tier": tier, **_blocks(status)}
        self._span("lookup", origin, pending.sent_at, answered_at, found)
        if tier in {"disk", "remote"}:
            self._span("promotion", origin, answered_at, pending.settled_at or now, found)

    def loaded(
        self, origin: Origin, began_at: float, tier: str, blocks: int, *, failed: bool
    ) -> None:
        self._span(
            "load",
            origin,
            began_at,
            time.monotonic(),
            {"kvstrata.tier": tier, "kvstrata.blocks": blocks, "kvstrata.failed": failed},
        )

    def saved(self, origin: Origin, began_at: float, blocks: int, *, failed: bool) -> None:
        self._span(
            "save",
            origin,
            began_at,
            time.monotonic(),
            {"kvstrata.tier": "host", "kvstrata.blocks": blocks, "kvstrata.failed": failed},
        )

    def close(self) -> None:
        self._tracing.close()

    def _span(
        self,
        name: str,
        origin: Origin,
        began_at: float,
        ended_at: float,
        attributes: Mapping[str, str | int | bool],
    ) -> None:
        about = {"kvstrata.request": origin.request_id, **attributes}
        self._tracing.span(f"kvstrata.{name}", began_at, ended_at, origin.headers, about)


def spans_of(config: Config) -> RequestSpans | None:
    """None unless *config* names a collector; ``ConfigError`` if the SDK is not installed."""
    if config.otlp_traces_endpoint is None:
        return None
    return RequestSpans(Tracing(to_collector(config.otlp_traces_endpoint)))


def lowest_tier(status: TaskStatus | None) -> str:
    """The lowest tier that had some of the blocks; ``none`` without any."""
    if status is None or not status.matched_blocks:
        return "none"
    if status.remote_blocks:
        return "remote"
    return "disk" if status.disk_blocks else "host"


def _blocks(status: TaskStatus | None) -> dict[str, int]:
    if status is None:
        return {}
    here = status.matched_blocks - status.disk_blocks - status.remote_blocks
    return {
        "kvstrata.host_blocks": here,
        "kvstrata.disk_blocks": status.disk_blocks,
        "kvstrata.remote_blocks": status.remote_blocks,
        "kvstrata.declined_blocks": status.declined_blocks,
    }
