"""The least that each remote engine costs: its own protocol, no header, no checksum, no deadline.

Every read ends in the caller's buffer without a copy in between. A short or foreign answer ends
the bench.
"""

import hashlib
import hmac
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from http.client import HTTPConnection
from typing import Any, Final, Protocol

import numpy as np

from kvstrata.storage.mapping import HostMapping

__all__ = ["Credentials", "RawMooncake", "RawPath", "RawResp", "RawS3"]

_OK: Final = b"+OK\r\n"
_REGION: Final = "us-east-1"
Credentials = tuple[str, str]  # key id and secret


class RawPath(Protocol):
    """Values under names; several threads call at a time, each with a batch."""

    def read(self, names: Sequence[str], buffers: Sequence[memoryview]) -> None:
        """Fill each of *buffers*, which are as long as their values."""
        ...

    def write(self, names: Sequence[str], buffers: Sequence[memoryview]) -> None: ...

    def remove(self, names: Sequence[str]) -> None: ...

    def close(self) -> None: ...


class RawResp:
    """A bare socket for each thread. A batch of GETs is sent at once, and answered in one stream."""

    def __init__(self, dial: Callable[[], socket.socket]) -> None:
        self._dial = dial
        self._own = threading.local()
        self._sockets: list[socket.socket] = []

    def read(self, names: Sequence[str], buffers: Sequence[memoryview]) -> None:
        connection = self._connection()
        connection.sendall(b"".join(_command(b"GET", name) for name in names))
        for buffer in buffers:
            expected = b"$%d\r\n" % buffer.nbytes
            head, end = bytearray(len(expected)), bytearray(2)
            _receive(connection, [head, buffer, end])
            if head != expected or end != b"\r\n":
                raise SystemExit(f"GET is answered with {bytes(head)!r}")

    def write(self, names: Sequence[str], buffers: Sequence[memoryview]) -> None:
        connection = self._connection()
        for name, buffer in zip(names, buffers, strict=True):
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (
                len(name),
                name.encode(),
                buffer.nbytes,
            )
            _send(connection, [memoryview(head), buffer, memoryview(b"\r\n")])
        answers = bytearray(len(_OK) * len(names))
        _receive(connection, [answers])
        if answers != _OK * len(names):
            raise SystemExit(f"SET is answered with {bytes(answers)!r}")

    def remove(self, names: Sequence[str]) -> None:
        connection = self._connection()
        connection.sendall(b"".join(_command(b"DEL", name) for name in names))
        _receive(connection, [bytearray(len(b":1\r\n") * len(names))])

    def close(self) -> None:
        for connection in self._sockets:
            connection.close()

    def _connection(self) -> socket.socket:
        if not hasattr(self._own, "socket"):
            self._own.socket = self._dial()
            self._sockets.append(self._own.socket)
        connection: socket.socket = self._own.socket
        return connection


class RawS3:
    """``http.client`` on connections that are kept open: of each thread as many as its batch has
    objects, all of which are asked for before the first is read. Every request is signed.
    """

    def __init__(self, host: str, bucket: str, credentials: Credentials) -> None:
        self._host = host
        self._bucket = bucket
        self._credentials = credentials
        self._own = threading.local()
        self._all: list[HTTPConnection] = []

    def read(self, names: Sequence[str], buffers: Sequence[memoryview]) -> None:
        connections = self._ask("GET", names, [None] * len(names))
        for connection, buffer in zip(connections, buffers, strict=True):
            with connection.getresponse() as response:
                done = 0
                while done < buffer.nbytes and (got := response.readinto(buffer[done:])):
                    done += got
                if response.status != 200 or done != buffer.nbytes or response.read(1):
                    raise SystemExit(f"GET: status {response.status}, {done} bytes")

    def write(self, names: Sequence[str], buffers: Sequence[memoryview]) -> None:
        self._end("PUT", names, buffers, 200)

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._end("DELETE", [name], [None], 204)
        for connection in self._connections(1):  # is made anew: a server ends one that is idle
            connection.close()

    def close(self) -> None:
        for connection in self._all:
            connection.close()

    def _end(
        self, method: str, names: Sequence[str], bodies: Sequence[memoryview | None], status: int
    ) -> None:
        for connection in self._ask(method, names, bodies):
            with connection.getresponse() as response:
                response.read()
                if response.status != status:
                    raise SystemExit(f"{method}: status {response.status}")

    def _ask(
        self, method: str, names: Sequence[str], bodies: Sequence[memoryview | None]
    ) -> list[HTTPConnection]:
        connections = self._connections(len(names))
        for connection, name, body in zip(connections, names, bodies, strict=True):
            path = f"/{self._bucket}/{name}"
            connection.request(
                method, path, body, signed(method, self._host, path, self._credentials)
            )
        return connections

    def _connections(self, count: int) -> list[HTTPConnection]:
        own: list[HTTPConnection] = self._own.__dict__.setdefault("connections", [])
        while len(own) < count:
            own.append(HTTPConnection(self._host, timeout=60))
            self._all.append(own[-1])
        return own[:count]


class RawMooncake:
    """The library in this process, its batch calls into registered memory."""

    def __init__(self, master: str, memory: HostMapping) -> None:
        """*memory*: all buffers are in it. The settings are the library's own."""
        from mooncake.store import MooncakeDistributedStore

        self._store: Any = MooncakeDistributedStore()
        code = self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master)
        if code or self._store.register_buffer(memory.address, memory.total_bytes):
            raise SystemExit("Mooncake's own client does not join the pool")

    def read(self, names: Sequence[str], buffers: Sequence[memoryview]) -> None:
        sizes = [buffer.nbytes for buffer in buffers]
        codes = self._store.batch_get_into(list(names), _addresses(buffers), sizes)
        if codes != sizes:
            raise SystemExit(f"batch_get_into: {codes}")

    def write(self, names: Sequence[str], buffers: Sequence[memoryview]) -> None:
        sizes = [buffer.nbytes for buffer in buffers]
        codes = self._store.batch_put_from(list(names), _addresses(buffers), sizes)
        if any(codes):
            raise SystemExit(f"batch_put_from: {codes}")

    def remove(self, names: Sequence[str]) -> None:
        self._store.batch_remove(list(names), True)

    def close(self) -> None:
        self._store.close()


def signed(method: str, host: str, path: str, credentials: Credentials) -> dict[str, str]:
    """Header fields of an S3 request whose payload is not signed (AWS Signature Version 4)."""
    key_id, secret = credentials
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    scope = f"{now[:8]}/{_REGION}/s3/aws4_request"
    fields = {"host": host, "x-amz-content-sha256": "UNSIGNED-PAYLOAD", "x-amz-date": now}
    listed = "".join(f"{name}:{value}\n" for name, value in fields.items())
    request = f"{method}\n{path}\n\n{listed}\n{';'.join(fields)}\nUNSIGNED-PAYLOAD"
    digest = hashlib.sha256(request.encode()).hexdigest()
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{digest}"
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    return fields | {
        "authorization": f"AWS4-HMAC-SHA256 Credential={key_id}/{scope}, "
        f"SignedHeaders={';'.join(fields)}, Signature={signature}"
    }


def _command(word: bytes, name: str) -> bytes:
    return b"*2\r\n$3\r\n%b\r\n$%d\r\n%b\r\n" % (word, len(name), name.encode())


def _receive(connection: socket.socket, buffers: Sequence[bytearray | memoryview]) -> None:
    """Fill *buffers*, with one system call if the kernel lets us."""
    wanted = sum(len(buffer) for buffer in buffers)
    got = connection.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
    if got == wanted:
        return
    for buffer in buffers:
        view = memoryview(buffer)
        done = min(got, len(view))
        got -= done
        while done < len(view):
            received = connection.recv_into(view[done:], 0, socket.MSG_WAITALL)
            if not received:
                raise SystemExit("the server has closed the connection")
            done += received


def _send(connection: socket.socket, parts: Sequence[memoryview]) -> None:
    sent = connection.sendmsg(parts)
    for part in parts:
        skipped = min(sent, len(part))
        sent -= skipped
        if skipped < len(part):
            connection.sendall(part[skipped:])


def _addresses(buffers: Sequence[memoryview]) -> list[int]:
    return [np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers]
