"""A name server that answers or is silent, and a Valkey that is found through it.

Run where /etc/resolv.conf names 127.0.0.1; prints what a store has met, as JSON.
"""

import json
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.remote.valkey_servers import Server, eventually

from kvstrata.core.errors import TierUnavailable
from kvstrata.core.types import Write
from kvstrata.storage.remote.valkey.store import ValkeyStore
from kvstrata.testing.samples import fetch, key, random_value

_BLOCK_BYTES: Final = 4096
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


def met(folder: Path) -> dict[str, object]:
    server, names = Server(folder), NameServer()
    store = ValkeyStore(
        f"valkey://cache.test:{server.port}", block_bytes=_BLOCK_BYTES, timeout_seconds=0.4
    )
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
        server.ask("CLIENT KILL", "TYPE", "normal", "SKIPME", "yes")
        again.append(fetch(store, key(1)) == value)
    still_waiting = questions()
    store.close()
    server.kill()
    return {
        "silent": silent,
        "waiting": waiting,
        "written": fates[-1].value,
        "again": again,
        "still_waiting": still_waiting,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        json.dump(met(Path(place)), sys.stdout)
