"""The two hot commands of Valkey and Redis, GET and SET, without a copy of the value.

Every client library hands out values of its own; here the bytes go from the socket into the
caller's buffer and back. Only what these two commands need of RESP 2 is here.
"""

from typing import Final

from kvstrata.storage.remote.valkey.deadline_socket import DeadlineSocket, Seen

__all__ = ["ASKING", "ErrorReply", "NotRespError", "RespReader", "get_command", "set_command"]

_SCRATCH_BYTES: Final = 1024  # what is read too far is copied, so it is small
_END: Final = b"\r\n"
ASKING: Final = b"*1\r\n$6\r\nASKING\r\n"
"""Tells a server of a cluster that another has sent us on for the next command alone."""


class ErrorReply(Exception):
    """The peer has answered with an error, and the stream is where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    @property
    def code(self) -> str:
        return self.text.partition(" ")[0]


class NotRespError(Exception):
    """What the peer says is not RESP, or not an answer to what was asked."""


def get_command(name: bytes, ttl_milliseconds: int | None) -> bytes:
    """``GET name``, or ``GETEX name PX ttl``."""
    if ttl_milliseconds is None:
        return b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name)
    ttl = b"%d" % ttl_milliseconds
    return b"*4\r\n$5\r\nGETEX\r\n$%d\r\n%b\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (
        len(name),
        name,
        len(ttl),
        ttl,
    )


def set_command(
    name: bytes, header: bytes, value: memoryview, ttl_milliseconds: int | None
) -> list[bytes | memoryview]:
    """``SET name header+value NX [PX ttl]``, in parts that together are the command."""
    options = [b"NX"]
    if ttl_milliseconds is not None:
        options += [b"PX", b"%d" % ttl_milliseconds]
    start = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (
        3 + len(options),
        len(name),
        name,
        len(header) + value.nbytes,
    )
    rest = b"".join(b"\r\n$%d\r\n%b" % (len(option), option) for option in options)
    return [start + header, value, rest + _END]


class RespReader:
    """Reads answers from a stream, the values among them straight into buffers.

    Whatever is raised but ``ErrorReply`` leaves the stream somewhere inside an answer: drop it.
    """

    def __init__(self, stream: DeadlineSocket) -> None:
        self._stream = stream
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._start = self._end = 0  # of what is in the scratch and not yet read

    @property
    def is_empty(self) -> bool:
        """Whether every byte that was received has been read."""
        return self._start == self._end

    def status(self) -> bool:
        """True for ``+OK``, false for no value, as SET answers that was not to replace one."""
        line = self._line()
        if line.startswith(b"+"):
            return True
        if self._length(line) is None:
            return False
        raise NotRespError("a value where a status was expected")

    def value(self, head_bytes: int) -> tuple[int, bytearray] | None:
        """Length and first bytes, at most *head_bytes*, of a value; ``None`` if there is none.

        ``receive`` or ``discard`` the rest of it, then ``end_value``.
        """
        length = self._length(self._line())
        if length is None:
            return None
        return length, self.take(min(length, head_bytes))

    def take(self, wanted_bytes: int) -> bytearray:
        """The next *wanted_bytes*, which must be few."""
        while self._end - self._start < wanted_bytes:
            self._fill()
        taken = self._scratch[self._start : self._start + wanted_bytes]
        self._start += wanted_bytes
        return taken

    def receive(self, buffer: memoryview, seen: Seen) -> None:
        """Fill *buffer* with the next bytes; *seen* gets them piece by piece as they come."""
        known = min(buffer.nbytes, self._end - self._start)
        if known:
            buffer[:known] = self._view[self._start : self._start + known]
            self._start += known
            seen(buffer[:known])
        self._stream.receive_all(buffer[known:], seen)

    def discard(self, unwanted_bytes: int, buffer: memoryview) -> None:
        """Read over the next bytes; *buffer* then holds some of them."""
        while unwanted_bytes:
            part = buffer[: min(unwanted_bytes, buffer.nbytes)]
            self.receive(part, _ignore)
            unwanted_bytes -= part.nbytes

    def end_value(self) -> None:
        if self.take(len(_END)) != _END:
            raise NotRespError("a value that does not end where it should")

    def _length(self, line: bytearray) -> int | None:
        if line[:1] == b"$":
            try:
                length = int(line[1:])
            except ValueError:
                raise NotRespError(f"a length of {bytes(line[1:17])!r}") from None
            return length if length >= 0 else None
        if line[:1] == b"-":
            raise ErrorReply(line[1:].decode(errors="replace"))
        raise NotRespError(f"an answer that begins with {bytes(line[:16])!r}")

    def _line(self) -> bytearray:
        while (found := self._scratch.find(_END, self._start, self._end)) < 0:
            self._fill()
        line = self._scratch[self._start : found]
        self._start = found + len(_END)
        return line

    def _fill(self) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            unread_bytes = self._end - self._start
            self._scratch[:unread_bytes] = self._scratch[self._start : self._end]
            self._start, self._end = 0, unread_bytes
        if self._end == _SCRATCH_BYTES:
            raise NotRespError(f"a line of more than {_SCRATCH_BYTES} bytes")
        received = self._stream.recv_into(self._view[self._end :])
        if received == 0:
            raise ConnectionResetError("the peer has closed the connection")
        self._end += received


def _ignore(_: memoryview) -> None:
    """Of what is read over."""
