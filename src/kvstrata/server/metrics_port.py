"""``GET /metrics`` on a TCP port, for Prometheus. One scraper at a time, and none for long."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from kvstrata.core.addresses import tcp_address
from kvstrata.core.errors import ConfigError

_log = logging.getLogger(__name__)

_SCRAPER_SECONDS: Final = 2.0  # from its connection until it has all
_REQUEST_BYTES: Final = 16 << 10
_CLOSE_SECONDS: Final = 1.0
_CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"


class MetricsPort:
    """Answers on a thread of its own until ``close``.

    Requests are answered one after another. A client that is slower than two seconds is hung up on.
    """

    def __init__(self, address: str, render: Callable[[], bytes]) -> None:
        """Listen at *address*, ``HOST:PORT``; ``ConfigError`` if that cannot be.

        *render* is called on the thread.
        """
        host, port = tcp_address(address)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family = found[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=16)
        except OSError as e:
            raise ConfigError(
                f"metrics cannot be served at {address}: {e.strerror or e}",
                hint="choose another port for `metrics`, or stop what listens there",
            ) from e
        self._render = render
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstrata-metrics", daemon=True)
        self._thread.start()
        _log.info("metrics at http://%s/metrics", address)

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(_CLOSE_SECONDS)
        self._listener.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError as e:
                if self._closing.wait(0.1):  # or too many open files: they may be closed again
                    return
                _log.warning("a scraper could not be let in: %s", e)
                continue
            with client, contextlib.suppress(OSError):
                self._answer(client, time.monotonic() + _SCRAPER_SECONDS)

    def _answer(self, client: socket.socket, deadline: float) -> None:
        """Answer one request; ``TimeoutError`` if it takes too long."""
        request = bytearray()
        while b"\r\n\r\n" not in request:
            client.settimeout(max(0.001, deadline - time.monotonic()))
            data = client.recv(4096)
            request += data
            if not data or len(request) > _REQUEST_BYTES or time.monotonic() > deadline:
                return
        method, _, rest = bytes(request.partition(b"\r\n")[0]).partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in {b"GET", b"HEAD"}:
            status, body = b"405 Method Not Allowed", b"only GET\n"
        elif path != b"/metrics":
            status, body = b"404 Not Found", b"metrics are at /metrics\n"
        else:
            status, body = b"200 OK", self._render()
        head = (
            b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
            % (status, _CONTENT_TYPE, len(body))
        )
        client.settimeout(max(0.001, deadline - time.monotonic()))
        client.sendall(head if method == b"HEAD" else head + body)  # the timeout is for all of it
