"""One connection that speaks HTTP/1.1: an answer's body goes straight to where it is wanted.

Its methods are generators that yield what they wait for; ``object_http`` runs many of them on one
thread.
"""

import re
import selectors
import socket
import ssl
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Final, NamedTuple

__all__ = ["Address", "Answer", "Connection", "Exchange", "Nonsense", "Steps", "Wait"]

_INBOX_BYTES: Final = 16 << 10  # the longest head, and the longest error that is read
_MOST_HEADS: Final = 8  # of one answer: announcements (100 Continue) come before it
_WORTHWHILE_BYTES: Final = 256 << 10
_COUNT: Final = re.compile(r"[0-9]{1,18}")
_STATUS: Final = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: |$)")
_CODE: Final = re.compile(rb"<Code>([A-Za-z0-9]{1,64})</Code>")


class Nonsense(Exception):
    """What came back is not HTTP/1.1 as we know it."""


class Wait(NamedTuple):
    """What a generator waits for before it goes on."""

    connection: socket.socket
    events: int


Steps = Generator[Wait, None, None]
Address = tuple[str, int] | tuple[str, int, int, int]


class Answer(NamedTuple):
    """How a server answered a request."""

    status: int
    fields: dict[str, str]  # by lower-case name
    code: str = ""  # of an error, as object stores say it in XML
    is_whole: bool = True  # the body, if it was wanted, had a length and went where it was wanted


class Exchange:
    """A request, and what becomes of it. A subclass says where the body of a 200 goes."""

    def __init__(
        self,
        method: str,
        target: str,
        *,
        fields: bytes = b"",  # each with its end of line
        payload: Sequence[bytes | memoryview] = (),
    ) -> None:
        self.method = method
        self.target = target
        self.fields = fields
        self.payload = payload
        self.answer: Answer | None = None

    def parts(self, body_bytes: int, fields: dict[str, str]) -> Iterator[memoryview]:
        """Yield buffers for the body, each filled before the next is asked for."""
        del body_bytes, fields
        return iter(())


class Connection:
    """A non-blocking connection to *host*, TLS if *tls* is given. After any fault: ``close``."""

    def __init__(
        self, family: socket.AddressFamily, host: str, tls: ssl.SSLContext | None = None
    ) -> None:
        self.idle_since_seconds = time.monotonic()
        self._host = host
        self._tls = tls
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._inbox = memoryview(bytearray(_INBOX_BYTES))
        self._read = self._received = 0  # bytes of the inbox
        self._wakes_at_bytes = 1

    def close(self) -> None:
        self._socket.close()

    def is_quiet(self) -> bool:
        """Whether an idle connection is still open, and nobody has sent anything on it."""
        try:
            self._socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return False

    def connect(self, address: Address) -> Steps:
        try:
            self._socket.connect(address)
        except BlockingIOError:
            yield Wait(self._socket, selectors.EVENT_WRITE)
            fault = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if fault:
                raise OSError(fault, f"connecting failed with errno {fault}") from None
        if self._tls is not None:
            self._socket = secured = self._tls.wrap_socket(
                self._socket, server_hostname=_bare(self._host), do_handshake_on_connect=False
            )
            yield from self._shake_hands(secured)

    def exchange(self, exchange: Exchange) -> Generator[Wait, None, bool]:
        """Send the request and read its answer; whether the connection can be used again."""
        length = sum(memoryview(part).nbytes for part in exchange.payload)
        head = (
            f"{exchange.method} {exchange.target} HTTP/1.1\r\nHost: {self._host}\r\n".encode(
                "ascii"
            ),
            b"User-Agent: kvstrata\r\nAccept-Encoding: identity\r\n",
            exchange.fields,
            b"Content-Length: %d\r\n\r\n" % length if exchange.payload else b"\r\n",
        )
        try:
            yield from self._send([b"".join(head), *exchange.payload])
        except ConnectionError:
            # A server that refuses a payload may answer before it has it all, and hang up.
            yield from self._receive_answer(exchange)
            return False
        return (yield from self._receive_answer(exchange))

    def _receive_answer(self, exchange: Exchange) -> Generator[Wait, None, bool]:
        status, fields, stays_open = yield from self._receive_head()
        if exchange.method == "HEAD" or status in {204, 304}:
            exchange.answer = Answer(status, fields)
            return stays_open
        body_bytes = _length(fields)
        if status != 200:
            code, is_read = yield from self._receive_error(body_bytes)
            exchange.answer = Answer(status, fields, code)
            return stays_open and is_read
        if body_bytes is None:
            exchange.answer = Answer(status, fields, is_whole=False)
            return False
        left = body_bytes
        for part in exchange.parts(body_bytes, fields):
            yield from self._fill(part)
            left -= part.nbytes
        exchange.answer = Answer(status, fields)
        return stays_open and left == 0

    def _receive_head(self) -> Generator[Wait, None, tuple[int, dict[str, str], bool]]:
        for _ in range(_MOST_HEADS):
            while (end := self._unread().find(b"\r\n\r\n")) < 0:
                if self._received == _INBOX_BYTES and not self._make_room():
                    raise Nonsense("an answer with a head that has no end")
                yield from self._receive_more()
            head = self._unread()[:end]
            self._read += end + 4
            status, fields, stays_open = _parse_head(head)
            if status >= 200:
                return status, fields, stays_open
        raise Nonsense("an answer that is announced again and again, and does not come")

    def _receive_error(self, body_bytes: int | None) -> Generator[Wait, None, tuple[str, bool]]:
        """Read a body that tells what is wrong: its code, and whether that was all of it."""
        body = bytearray()
        try:
            while len(body) < _INBOX_BYTES and (body_bytes is None or len(body) < body_bytes):
                if self._read == self._received:
                    yield from self._receive_more()
                body += self._inbox[self._read : self._received]
                self._read = self._received
                if body_bytes is None and body.endswith(b"\r\n0\r\n\r\n"):
                    break
        except ConnectionError:  # an error may end with its connection
            body_bytes = -1
        found = _CODE.search(body)
        is_all = len(body) == body_bytes or body.endswith(b"\r\n0\r\n\r\n")
        return (found[1].decode("ascii") if found else ""), is_all

    def _fill(self, part: memoryview) -> Steps:
        done = min(part.nbytes, self._received - self._read)
        part[:done] = self._inbox[self._read : self._read + done]
        self._read += done
        while done < part.nbytes:
            self._wake_at(part.nbytes - done)
            done += yield from self._receive_into(part[done:])
        self._wake_at(1)

    def _wake_at(self, wanted_bytes: int) -> None:
        """Do not become readable for each packet of a long body, but for a worthwhile part of it.

        Not with TLS, which may hold bytes back that have left the socket.
        """
        wanted_bytes = min(wanted_bytes, _WORTHWHILE_BYTES)
        if self._tls is None and wanted_bytes != self._wakes_at_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted_bytes)
            self._wakes_at_bytes = wanted_bytes

    def _receive_more(self) -> Steps:
        if self._read == self._received:
            self._read = self._received = 0
        self._received += yield from self._receive_into(self._inbox[self._received :])

    def _make_room(self) -> bool:
        """Move what is unread to the beginning of the inbox; whether that gave any."""
        unread = self._unread()
        self._inbox[: len(unread)] = unread
        self._read, self._received = 0, len(unread)
        return len(unread) < _INBOX_BYTES

    def _unread(self) -> bytes:
        return bytes(self._inbox[self._read : self._received])

    def _receive_into(self, part: memoryview) -> Generator[Wait, None, int]:
        while True:
            try:
                received = self._socket.recv_into(part)
            except (BlockingIOError, ssl.SSLWantReadError):
                yield Wait(self._socket, selectors.EVENT_READ)
            except ssl.SSLWantWriteError:
                yield Wait(self._socket, selectors.EVENT_WRITE)
            else:
                if received == 0:
                    raise ConnectionResetError("closed by the server in the middle of an answer")
                return received

    def _send(self, parts: Sequence[bytes | memoryview]) -> Steps:
        for part in parts:
            left = memoryview(part).cast("B")
            while left:
                try:
                    left = left[self._socket.send(left) :]
                except (BlockingIOError, ssl.SSLWantWriteError):
                    yield Wait(self._socket, selectors.EVENT_WRITE)
                except ssl.SSLWantReadError:
                    yield Wait(self._socket, selectors.EVENT_READ)

    def _shake_hands(self, secured: ssl.SSLSocket) -> Steps:
        while True:
            try:
                secured.do_handshake()
            except ssl.SSLWantReadError:
                yield Wait(secured, selectors.EVENT_READ)
            except ssl.SSLWantWriteError:
                yield Wait(secured, selectors.EVENT_WRITE)
            else:
                return


def _parse_head(head: bytes) -> tuple[int, dict[str, str], bool]:
    """Status, fields, and whether the connection stays open."""
    first, *lines = head.split(b"\r\n")
    status = _STATUS.match(first)
    if status is None:
        raise Nonsense("an answer that is not HTTP/1.1")
    fields: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon:
            raise Nonsense("an answer with a head that is not one")
        fields[name.strip().lower().decode("latin-1")] = value.strip().decode("latin-1")
    closes = fields.get("connection", "").lower() == "close" or status[1] == b"0"
    return int(status[2]), fields, not closes


def _length(fields: dict[str, str]) -> int | None:
    """Bytes of the body; ``None`` if the head does not say."""
    length = fields.get("content-length", "")
    if "transfer-encoding" in fields or not _COUNT.fullmatch(length):
        return None
    return int(length)


def _bare(host: str) -> str:
    """The name in *host*, without a port.

    >>> _bare("[::1]:9000"), _bare("localhost")
    ('::1', 'localhost')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
