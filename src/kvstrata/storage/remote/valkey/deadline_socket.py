"""A connected stream socket whose calls all end by one deadline."""

import math
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

__all__ = ["DeadlineSocket", "Seen", "remaining_seconds", "wait_readable"]

Seen = Callable[[memoryview], object]

_TIMEVAL: Final = struct.Struct("@ll")
_IOVECS: Final = 900  # of one sendmsg; Linux takes 1024
_PIECE_BYTES: Final = 256 << 10  # what a core's own cache holds beside where it comes from
_LOCAL_PIECE_BYTES: Final = 512 << 10  # more than the kernel holds for one who reads a unix socket
_LATEST_BYTES: Final = 2 << 20  # to be woken for; by default Linux has room for 3 MiB
_SLACK_SECONDS: Final = 0.05  # by how much a call may outlast the deadline
_STEP_SECONDS: Final = 0.01  # timeouts are whole multiples, so that most calls can have the same


def remaining_seconds(deadline: float) -> float:
    """Until *deadline* (of ``time.monotonic``); ``TimeoutError`` if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left


def wait_readable(streams: "Sequence[DeadlineSocket]", deadline: float) -> list[int]:
    """Positions of *streams* on which something has come, at *deadline* maybe none.

    With TLS that may be a word between the peers, and no data yet.
    """
    ready = [number for number, stream in enumerate(streams) if stream.holds_bytes]
    if ready:
        return ready
    poll = select.poll()
    numbers = {stream.fileno(): number for number, stream in enumerate(streams)}
    for descriptor in numbers:
        poll.register(descriptor, select.POLLIN)
    left = max(0.0, deadline - time.monotonic())
    return [numbers[descriptor] for descriptor, _ in poll.poll(math.ceil(left * 1000))]


class DeadlineSocket:
    """Bytes to and from a peer, until ``deadline`` and no longer, however slowly they trickle.

    * What is not done at the deadline raises ``TimeoutError``, what the peer closes
      ``ConnectionError``. The stream is then of no more use.
    * One thread at a time uses it; ``interrupt`` may come from another and ends its calls.
    * Without TLS the kernel keeps the deadline, so that one call takes or sends much.
    """

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self.deadline = deadline  # of time.monotonic; may be changed between calls
        self._socket = connected
        self._is_tls = isinstance(connected, ssl.SSLSocket)
        self._is_tcp = not self._is_tls and connected.family != socket.AF_UNIX
        self._wakes_for = 1
        self._looking = select.poll()
        self._looking.register(connected, select.POLLIN)
        self._armed_seconds = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}
        if not self._is_tls:
            connected.settimeout(None)

    def recv_into(self, buffer: bytearray | memoryview) -> int:
        """Receive what there is, at least one byte; 0 if the peer has closed."""
        self._arm(socket.SO_RCVTIMEO)
        try:
            return self._socket.recv_into(buffer)
        except BlockingIOError:
            raise TimeoutError("nothing came before the deadline") from None

    def receive_all(self, buffer: memoryview, seen: Seen) -> None:
        """Fill *buffer*; *seen* gets what has come, piece by piece, while it is in the cache.

        A peer on this machine goes on writing while a piece is looked at, so all that there is
        is taken as it comes. Over TCP it is the fewer calls and wakeings that count: the first comes when half
        of a long value is there, and the rest comes while that is taken.
        """
        receive = self._socket.recv_into
        flags, step = (
            (socket.MSG_WAITALL, _PIECE_BYTES) if self._is_tcp else (0, _LOCAL_PIECE_BYTES)
        )
        start, end = 0, buffer.nbytes
        late = min(end // 2, _LATEST_BYTES)
        try:
            while start < end:
                stop = start + step
                self._arm(socket.SO_RCVTIMEO)
                if self._is_tcp:
                    self._wake_for(late if end - stop >= late > _PIECE_BYTES else 1)
                received = receive(buffer[start:stop], 0, flags)
                if received == 0:
                    raise ConnectionResetError("the peer has closed the connection in an answer")
                seen(buffer[start : start + received])
                start += received
        except BlockingIOError:
            raise TimeoutError("too little came before the deadline") from None

    def sendall(self, data: bytes | memoryview) -> None:
        self.send_parts([memoryview(data)])

    def send_parts(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send all of *parts*, in order, without joining them."""
        left = [memoryview(part) for part in parts]
        while left:
            sent = self._send(left[:_IOVECS])
            done = 0
            while done < len(left) and sent >= left[done].nbytes:
                sent -= left[done].nbytes
                done += 1
            del left[:done]
            if sent:
                left[0] = left[0][sent:]

    def is_quiet(self) -> bool:
        """Whether the peer has neither closed nor said anything that nobody asked for."""
        return not self._looking.poll(0)

    def interrupt(self) -> None:
        """End the call of another thread, if there is one: to it the peer has closed."""
        with suppress(OSError):  # of TLS too: its own shutdown would disturb that thread
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    @property
    def holds_bytes(self) -> bool:
        """Whether TLS has taken bytes from the system that nobody has read yet."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def shutdown(self, how: int) -> None:
        socket.socket.shutdown(self._socket, how)

    def close(self) -> None:
        self._socket.close()

    def _wake_for(self, wanted_bytes: int) -> None:
        """Have the kernel wake us for no fewer; after the next call so many must still be to come.

        For that call takes what there is before it waits.
        """
        if wanted_bytes != self._wakes_for:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted_bytes)
            self._wakes_for = wanted_bytes

    def _send(self, parts: list[memoryview]) -> int:
        self._arm(socket.SO_SNDTIMEO)
        if self._is_tls:
            return self._send_over_tls(parts[0])
        try:
            return self._socket.sendmsg(parts)
        except BlockingIOError:
            raise TimeoutError("the peer took too little before the deadline") from None

    def _send_over_tls(self, part: memoryview) -> int:
        try:
            return self._socket.send(part)
        except (ssl.SSLEOFError, ConnectionError):
            self._socket.recv(1)  # raises what the peer has said last, such as who it lets in
            raise

    def _arm(self, option: int) -> None:
        """Have the next call end by the deadline, or ``_SLACK_SECONDS`` later."""
        left = self.deadline - time.monotonic()
        if 0 < left <= self._armed_seconds[option] <= left + _SLACK_SECONDS:
            return
        left = remaining_seconds(self.deadline)
        seconds = math.ceil(left / _STEP_SECONDS) * _STEP_SECONDS
        self._armed_seconds[option] = seconds
        if self._is_tls:
            self._socket.settimeout(seconds)
        else:
            whole = int(seconds)
            timeval = _TIMEVAL.pack(whole, int((seconds - whole) * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, option, timeval)
