"""A name server that answers or is silent, and an engine that is found through it.

Run where /etc/resolv.conf names 127.0.0.1, with ``valkey`` or ``objects``; prints what a store of
that kind has met, as JSON.
"""

import json
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Final

from tests.remote.objects_engine import KEY_ID, SECRET, environment
from tests.remote.odd_server import OddServer, Request, answer
from tests.remote.valkey_servers import Server, eventually

from kvstrata.core.errors import TierUnavailable
from kvstrata.core.types import Write
from kvstrata.storage.remote.objects.store import ObjectAccess, ObjectStore
from kvstrata.storage.remote.valkey.store import ValkeyStore
from kvstrata.storage.store import Store
from kvstrata.testing.samples import fetch, key, random_value

_BLOCK_BYTES: Final = 4096
_CALL_SECONDS: Final = 0.4
_ANSWER: Final = b"\xc0\x0c\0\x01\0\x01\0\0\0\0\0\x04" + socket.inet_aton("127.0.0.1")


class NameServer:
    """Says that every name is 127.0.0.1 while it *talks*."""

    def __init__(self) -> None:
        self.talks = threading.Event()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 53))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            question, asker = self._socket.recvfrom(4096)
            if self.talks.is_set():
                end = question.index(b"\0", 12) + 5
                is_for_ipv4 = question[end - 4 : end - 2] == b"\0\x01"
                head = question[:2] + b"\x81\x80\0\x01" + bytes([0, is_for_ipv4]) + bytes(4)
                self._socket.sendto(
                    head + question[12:end] + (_ANSWER if is_for_ipv4 else b""), asker
                )


def questions() -> int:
    """How many threads wait for the system's resolver."""
    return sum(each.name.startswith("kvstrata-resolve") for each in threading.enumerate())


def cause_of(call: Callable[[], object]) -> str:
    try:
        call()
    except TierUnavailable as e:
        return e.cause
    return "none"


Opened = tuple[Store, Callable[[], object]]
"""A store, and what ends its connections."""


@contextmanager
def valkey(folder: Path) -> Iterator[Opened]:
    server = Server(folder)
    url = f"valkey://cache.test:{server.port}"
    store = ValkeyStore(url, block_bytes=_BLOCK_BYTES, timeout_seconds=_CALL_SECONDS)
    with closing(store):
        yield store, lambda: server.ask("CLIENT KILL", "TYPE", "normal", "SKIPME", "yes")
    server.kill()


@contextmanager
def objects(_: Path) -> Iterator[Opened]:
    kept: dict[str, bytes] = {}

    def reply(request: Request) -> bytes:
        name = request.target.partition("?")[0]
        if request.method == "PUT":
            kept[name] = request.body
            return answer("200 OK")
        date = "Last-Modified: Sun, 22 Nov 2026 11:56:20 GMT"
        return answer("200 OK", kept[name], date) if name in kept else answer("404 Not Found")

    keys = {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET, "no_proxy": "*"}
    with closing(OddServer(reply)) as server, environment(keys):
        server.closes = True
        store = ObjectStore(
            "s3://bucket/prefix",
            block_bytes=_BLOCK_BYTES,
            timeout_seconds=_CALL_SECONDS,
            access=ObjectAccess(endpoint=f"http://cache.test:{server.port}"),
        )
        with closing(store):
            yield store, lambda: time.sleep(0.05)  # until the end of the connection has come


_ENGINES: Final[dict[str, Callable[[Path], AbstractContextManager[Opened]]]] = {
    "valkey": valkey,
    "objects": objects,
}


def met(store: Store, hang_up: Callable[[], object]) -> dict[str, object]:
    names = NameServer()
    value = random_value(1, _BLOCK_BYTES)
    silent = [cause_of(lambda: store.exists([key(1)])) for _ in range(4)]
    waiting = questions()

    names.talks.set()
    fates: list[Write] = []

    def is_written() -> bool:
        return (
            cause_of(lambda: fates.extend(store.write([key(1)], [None], [memoryview(value)])))
            == "none"
        )

    eventually(is_written, "the name is not found")
    eventually(lambda: not questions(), "a question has no end")

    names.talks.clear()
    again: list[bool] = []
    for _ in range(4):
        hang_up()
        again.append(fetch(store, key(1)) == value)
    still_waiting = questions()
    return {
        "silent": silent,
        "waiting": waiting,
        "written": fates[-1].value,
        "again": again,
        "still_waiting": still_waiting,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, _ENGINES[sys.argv[1]](Path(place)) as opened:
        json.dump(met(*opened), sys.stdout)
