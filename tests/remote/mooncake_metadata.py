"""Mooncake's metadata server, as a test needs it: it can tell a client of a proxy as data port."""

import json
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final
from urllib.parse import parse_qs, urlsplit

_SEGMENTS: Final = "mooncake/ram/"


class Metadata:
    """Keeps what nodes say of themselves.

    Who asks at ``url(port)`` gets segments whose data port is *port*.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self._values))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def url(self, port: int = 0) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/{port}/metadata"

    def data_port(self, segment: str) -> int:
        """Of the node that calls itself so."""
        port: int = json.loads(self._values[_SEGMENTS + segment])["tcp_data_port"]
        return port

    def forget(self) -> None:
        self._values.clear()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _is_segment(key: str) -> bool:
    return key.startswith(_SEGMENTS)


def _handler_of(values: dict[str, bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            port, key = self._asked()
            value = values.get(key)
            if value is None:
                self._answer(HTTPStatus.NOT_FOUND, b"metadata not found")
                return
            if port and _is_segment(key):
                value = json.dumps(json.loads(value) | {"tcp_data_port": port}).encode()
            self._answer(HTTPStatus.OK, value)

        def do_PUT(self) -> None:
            _, key = self._asked()
            values[key] = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(HTTPStatus.OK, b"metadata updated")

        def do_DELETE(self) -> None:
            values.pop(self._asked()[1], None)
            self._answer(HTTPStatus.OK, b"metadata deleted")

        def _asked(self) -> tuple[int, str]:
            parts = urlsplit(self.path)
            return int(parts.path.split("/")[1]), parse_qs(parts.query)["key"][0]

        def _answer(self, status: HTTPStatus, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the base class writes to standard error."""

    return Handler
