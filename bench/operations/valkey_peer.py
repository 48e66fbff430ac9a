"""A Valkey on the other end of a socket, in this process and on the thread that asks it."""

import mmap
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final, Self
from unittest.mock import patch

from kvstrata.storage.remote.valkey import links
from kvstrata.storage.remote.valkey.deadline_socket import DeadlineSocket
from kvstrata.storage.remote.valkey.store import ValkeyStore

__all__ = ["ValkeyPeer"]

_MOST_BYTES: Final = 64 << 20  # of all commands
_END: Final = b"\r\n"


class ValkeyPeer:
    """What ``store`` sends is answered when it is sent, in full: no read waits, or finds less than all.

    The clock stands meanwhile. Else on a slow machine the kernel would be told more often what time is left.
    """

    def __init__(self, block_bytes: int) -> None:
        self.store = ValkeyStore("unix:///nowhere", block_bytes=block_bytes)
        self._heard = mmap.mmap(-1, _MOST_BYTES)  # which does not count as allocated
        self._heard_bytes = 0
        self._values: dict[bytes, memoryview] = {}
        self._socket, self._theirs = socket.socketpair()
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        send = DeadlineSocket.send_parts

        def send_parts(stream: DeadlineSocket, parts: Sequence[bytes | memoryview]) -> None:
            send(stream, parts)
            self._answer()

        for patched in (
            patch.object(links._Connection, "_dial", lambda _: self._theirs),
            patch.object(DeadlineSocket, "send_parts", send_parts),
            patch("time.monotonic", lambda: 0.0),
        ):
            self._patches.enter_context(patched)
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()
        self._theirs.close()
        self._socket.close()

    def _answer(self) -> None:
        start = self._heard_bytes
        self._heard_bytes += self._socket.recv_into(memoryview(self._heard)[start:])
        answers: list[bytes | memoryview] = []
        while start < self._heard_bytes:
            words, start = self._command(start)
            answers += self._carry_out(*words)
        self._socket.sendmsg(answers)

    def _carry_out(
        self, word: memoryview, key: memoryview, *rest: memoryview
    ) -> list[bytes | memoryview]:
        name = bytes(key)
        match bytes(word):
            case b"EXISTS":
                return [b":%d" % (name in self._values), _END]
            case b"SET":
                self._values[name] = rest[0]
                return [b"+OK", _END]
            case _:
                found = self._values[name]
                return [b"$%d" % len(found), _END, found, _END]

    def _command(self, start: int) -> tuple[list[memoryview], int]:
        """The words of the command that begins there, and where the next one does."""
        count, start = self._number(start)
        words = []
        for _ in range(count):
            length, start = self._number(start)
            words.append(memoryview(self._heard)[start : start + length])
            start += length + len(_END)
        return words, start

    def _number(self, start: int) -> tuple[int, int]:
        end = self._heard.find(_END, start)
        return int(self._heard[start + 1 : end]), end + len(_END)
