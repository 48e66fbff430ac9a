"""How fast this machine moves bytes when nothing else is done: what no hit can be sooner than."""

import mmap
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from kvstrata.bench.workloads.workload import Tier

__all__ = ["measure_rates"]

_MEMORY_BYTES: Final = 64 << 20  # more than the caches of a processor hold
_DISK_BYTES: Final = 64 << 20
_READ_BYTES: Final = 1 << 20
_READERS: Final = 4
_VALUE_BYTES: Final = 1 << 20
_VALUES: Final = 16
_TIMES: Final = 3  # the best counts: it is a limit
_SOCKET_SECONDS: Final = 30.0


def measure_rates(folder: Path, valkey_port: int | None) -> dict[Tier, float]:
    """Bytes a second: of ``memcpy`` in one thread, of a disk read past the page cache (O_DIRECT, four
    threads, 1 MiB each), and of values of 1 MiB over one bare socket, if there is a *valkey_port*.
    """
    rates: dict[Tier, float] = {"host": _memory(), "disk": _disk(folder)}
    if valkey_port is not None:
        rates["remote"] = _remote(valkey_port)
    return rates


def _memory() -> float:
    source = np.ones(_MEMORY_BYTES, np.uint8)
    target = np.empty_like(source)
    np.copyto(target, source)  # its pages are there now
    return _MEMORY_BYTES / min(_timed(lambda: np.copyto(target, source)) for _ in range(_TIMES))


def _disk(folder: Path) -> float:
    path = folder / "limit"
    with path.open("wb") as file:
        file.write(os.urandom(_DISK_BYTES))
        os.fsync(file.fileno())
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # tmpfs has no O_DIRECT, and no page cache before it
        descriptor = os.open(path, os.O_RDONLY)
    buffers = [mmap.mmap(-1, _READ_BYTES) for _ in range(_READERS)]

    def read(reader: int) -> None:
        for offset in range(reader * _READ_BYTES, _DISK_BYTES, _READERS * _READ_BYTES):
            os.preadv(descriptor, [buffers[reader]], offset)

    try:
        with ThreadPoolExecutor(_READERS) as pool:
            seconds = min(
                _timed(lambda: list(pool.map(read, range(_READERS)))) for _ in range(_TIMES)
            )
    finally:
        os.close(descriptor)
        path.unlink()
    return _DISK_BYTES / seconds


def _remote(port: int) -> float:
    buffer = bytearray(_VALUE_BYTES + 64)
    value = os.urandom(_VALUE_BYTES)
    with socket.create_connection(("127.0.0.1", port), _SOCKET_SECONDS) as link:
        for number in range(_VALUES):
            link.sendall(_command(b"SET", b"limit%d" % number, value))
            _receive(link, buffer, len(b"+OK\r\n"))

        def read() -> None:
            for number in range(_VALUES):
                link.sendall(_command(b"GET", b"limit%d" % number))
                _receive(link, buffer, len(b"$%d\r\n\r\n" % _VALUE_BYTES) + _VALUE_BYTES)

        seconds = min(_timed(read) for _ in range(_TIMES))
        link.sendall(_command(b"DEL", *(b"limit%d" % number for number in range(_VALUES))))
        _receive(link, buffer, len(b":%d\r\n" % _VALUES))
    return _VALUES * _VALUE_BYTES / seconds


def _command(*parts: bytes) -> bytes:
    """In RESP: https://valkey.io/topics/protocol/."""
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts)


def _receive(link: socket.socket, buffer: bytearray, count: int) -> None:
    view = memoryview(buffer)[:count]
    while view:
        received = link.recv_into(view)
        if not received:
            raise ConnectionError("the server has closed the connection")
        view = view[received:]


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
