"""A TCP relay on loopback that can be made to fail: what a network does between a store and its engine."""

import enum
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

RELAY: Final = "relay"  # the name of the thread of a connection, which has two descriptors
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST
_PIECE_BYTES: Final = 16 << 10


class Fault(enum.Enum):
    """What becomes of connections."""

    NONE = "none"
    REFUSE = "refuse"  # new ones are reset at once, and so are those that are open
    SILENCE = "silence"  # bytes are taken and go nowhere, after ``after_bytes`` more of the answers
    RESET = "reset"  # with RST, after ``after_bytes`` more of the answers
    CUT = "cut"  # with FIN, after ``after_bytes`` more of the answers
    SLOW = "slow"  # answers and requests at ``bytes_per_second``


class Proxy:
    """Relays connections to ``port`` on to *target*. Faults take effect at once, also on open ones."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.fault = Fault.NONE
        self.after_bytes = 0
        self.bytes_per_second = 125_000  # 1 Mbit/s
        self.asked_bytes = 0
        self.answered_bytes = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._closing = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    @contextmanager
    def failing(
        self, fault: Fault, *, after_bytes: int = 0, bytes_per_second: int = 125_000
    ) -> Iterator[None]:
        """*fault* inside the context, none after it."""
        self.after_bytes, self.bytes_per_second, self.fault = after_bytes, bytes_per_second, fault
        try:
            yield
        finally:
            self.fault = Fault.NONE

    def close(self) -> None:
        self._closing.set()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=[client], name=RELAY, daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        with suppress(OSError), client:
            if self.fault is Fault.REFUSE:
                _reset(client)
                return
            with socket.create_connection(self.target, 5) as engine:
                self._pump(client, engine)

    def _pump(self, client: socket.socket, engine: socket.socket) -> None:
        while not self._closing.is_set():
            if self.fault is Fault.REFUSE:
                _reset(client)
                return
            for ready in select.select([client, engine], [], [], 0.02)[0]:
                data = ready.recv(_PIECE_BYTES)
                if not data:
                    return
                fault, is_answer = self.fault, ready is engine
                if fault is Fault.SLOW:
                    time.sleep(len(data) / self.bytes_per_second)
                passed = self._passed(data, fault, is_answer=is_answer)
                if is_answer:
                    self.answered_bytes += len(passed)
                else:
                    self.asked_bytes += len(passed)
                (client if is_answer else engine).sendall(passed)
                if len(passed) < len(data) and fault is not Fault.SILENCE:
                    if fault is Fault.RESET:
                        _reset(client)
                    return

    def _passed(self, data: bytes, fault: Fault, *, is_answer: bool) -> bytes:
        """What goes on of *data*."""
        if fault not in {Fault.SILENCE, Fault.RESET, Fault.CUT}:
            return data
        if not is_answer:
            return b"" if fault is Fault.SILENCE and not self.after_bytes else data
        passed = data[: self.after_bytes]
        self.after_bytes = max(0, self.after_bytes - len(passed))  # others count, too
        return passed


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    connection.close()
