"""A collector of OpenTelemetry spans, as one listens beside an engine."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector:
    """What an OTLP/HTTP collector takes in."""

    spans: list[Span] = field(default_factory=list)
    services: set[str] = field(default_factory=set)
    address: str = ""

    def take(self, body: bytes) -> None:
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {a.key: a.value.string_value for a in of_resource.resource.attributes}
            self.services.add(named["service.name"])
            for scope in of_resource.scope_spans:
                self.spans.extend(scope.spans)


@contextmanager
def collecting() -> Iterator[Collector]:
    """It listens on loopback until the end of the ``with``."""
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the name that http.server calls
            assert self.path == "/v1/traces"
            found.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    found.address = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attributes(span: Span) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
