"""An HTTP server on loopback that answers what a test says, right or wrong, byte by byte."""

import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from tests.remote.proxy import RELAY

__all__ = ["OddServer", "Request", "answer"]

_PIECE_BYTES: Final = 1 << 16


class Request(NamedTuple):
    method: str
    target: str
    fields: dict[str, str]  # by lower-case name
    body: bytes


Answer = Callable[[Request], bytes]
"""Every byte that goes back, but for the body to a HEAD; empty: the connection is closed."""


def answer(status: str, body: bytes = b"", *fields: str, length: int | None = None) -> bytes:
    """An answer, whose head may say another *length* than that of its *body*."""
    said = len(body) if length is None else length
    head = [f"HTTP/1.1 {status}", f"Content-Length: {said}", *fields]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


class OddServer:
    """Gives *answer*, which may be set anew at any time, to each request. Keeps connections open.

    ``requests`` are those that came, ``connections`` how many there were.
    """

    def __init__(self, answer: Answer, *, tls: ssl.SSLContext | None = None) -> None:
        self.answer = answer
        self.closes = False  # after each answer, and without saying so
        self.reads_bodies = True
        self.requests: list[Request] = []
        self.connections = 0
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._is_closed = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=[client], name=RELAY, daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        accepted.settimeout(10)
        with suppress(OSError), self._secured(accepted) as client:
            while not self._is_closed.is_set():
                request = self._request(client)
                if request is None:
                    return
                self.requests.append(request)
                reply = self.answer(request)
                if request.method == "HEAD":
                    reply = reply[: reply.find(b"\r\n\r\n") + 4]
                client.sendall(reply)
                if not reply or self.closes:
                    return

    def _secured(self, accepted: socket.socket) -> socket.socket:
        return accepted if self._tls is None else self._tls.wrap_socket(accepted, server_side=True)

    def _request(self, client: socket.socket) -> Request | None:
        received = b""
        while b"\r\n\r\n" not in received:
            piece = client.recv(_PIECE_BYTES)
            if not piece:
                return None
            received += piece
        head, _, body = received.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        pairs = (line.partition(":") for line in lines)
        fields = {name.lower(): value.strip() for name, _, value in pairs}
        while self.reads_bodies and len(body) < int(fields.get("content-length", 0)):
            piece = client.recv(_PIECE_BYTES)
            if not piece:
                return None
            body += piece
        method, target, _ = first.split(" ")
        return Request(method, target, fields, body)
