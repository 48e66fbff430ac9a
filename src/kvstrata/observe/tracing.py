"""Spans of what is done for requests, sent to an OpenTelemetry collector in the background."""

import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from kvstrata.core.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

__all__ = ["Tracing", "to_collector"]

_log = logging.getLogger(__name__)

_EXPORT_SECONDS: Final = 5  # for one batch
_CLOSE_SECONDS: Final = 2.0  # for what is not sent at the end

Attributes = Mapping[str, str | int | bool]


class Tracing:
    """Ends spans into *processor*. Not thread-safe, but what the processor does on its own thread.

    Its spans are of a provider of their own: an application's stays as it is.
    """

    def __init__(self, processor: "SpanProcessor") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "kvstrata"}),
            shutdown_on_exit=False,  # a collector that does not answer must not hold the exit
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("kvstrata")
        self._propagator = TraceContextTextMapPropagator()

    def span(
        self,
        name: str,
        began_at: float,
        ended_at: float,
        headers: Mapping[str, str] | None,
        attributes: Attributes,
    ) -> None:
        """A span between two moments of ``time.monotonic``, below the one that *headers* name."""
        offset_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            name,
            context=self._propagator.extract(headers) if headers else None,
            start_time=int(began_at * 1e9) + offset_ns,
            attributes=dict(attributes),
        )
        span.end(int(ended_at * 1e9) + offset_ns)

    def close(self) -> None:
        """Send what is left, for two seconds at most."""
        last = threading.Thread(
            target=self._provider.shutdown, name="kvstrata-last-spans", daemon=True
        )
        last.start()
        last.join(_CLOSE_SECONDS)
        if last.is_alive():
            _log.warning("spans are left that the collector has not taken")


def to_collector(endpoint: str) -> "SpanProcessor":
    """A bounded queue, emptied by a thread over OTLP/HTTP; raises ``ConfigError`` without the SDK."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as e:
        raise ConfigError(
            f"otlp_traces_endpoint is set and {e.name} is not installed",
            hint="pip install 'kvstrata[otel]', or take otlp_traces_endpoint away",
        ) from e
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS))
