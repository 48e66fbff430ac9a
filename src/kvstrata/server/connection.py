"""One client's socket: bytes in, bytes out, never waiting for either. Not thread-safe."""

import contextlib
import socket
import time
from typing import Final

from kvstrata.server import protocol as p
from kvstrata.server.sockets import peer_of

_RECEIVE_BYTES: Final = 256 << 10


class Connection:
    """Frames from and to a client.

    ``receive`` and ``flush`` do what can be done at once. ``is_ended`` is true once the client
    sends no more; frames that came before can still be taken. ``is_deaf`` is true once nothing
    reaches it any more. ``has_frame`` says whether ``take_frame`` has something to say.
    """

    def __init__(self, sock: socket.socket) -> None:
        """*sock* is the connection's from now on."""
        sock.setblocking(False)
        self.sock = sock
        self.pid, self.uid = peer_of(sock)
        self.is_ended = False
        self.is_deaf = False
        self.has_frame = False
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._frame_since: float | None = None  # monotonic seconds: when a part of one came
        self._unread_since: float | None = None  # when the client last took bytes that waited

    @property
    def unread_bytes(self) -> int:
        """What waits until the client reads."""
        return len(self._outbox)

    @property
    def buffered_bytes(self) -> int:
        return len(self._inbox) + len(self._outbox)

    @property
    def is_timed(self) -> bool:
        """Whether ``overdue`` may become true by time alone."""
        return self._frame_since is not None or self._unread_since is not None

    def overdue(
        self, now: float, *, is_read: bool, frame_seconds: float, send_seconds: float
    ) -> str | None:
        """What this client has been at for too long, if anything.

        The clock of a frame stands still while the server itself does not read (*is_read*).
        """
        if self._unread_since is not None and now - self._unread_since > send_seconds:
            return f"it has read nothing for {send_seconds} s"
        if self._frame_since is not None and not is_read:
            self._frame_since = now
        elif self._frame_since is not None and now - self._frame_since > frame_seconds:
            return f"a message is not whole after {frame_seconds} s"
        return None

    def receive(self) -> None:
        """Take in what has arrived, a bounded piece of it."""
        try:
            data = self.sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:  # it went with replies unread
            data = b""
        self.is_ended = not data
        self._inbox += data
        self._look_for_frame()

    def take_frame(self) -> bytes:
        """The body of the frame that is there; raises ``ProtocolError`` if it is too long for one."""
        start = p.LENGTH.size
        end = start + p.frame_length(self._inbox[:start])
        with memoryview(self._inbox) as inbox:
            body = bytes(inbox[start:end])
        del self._inbox[:end]
        self._look_for_frame()
        return body

    def send(self, frame: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send *frame*, later if the client is slow. Descriptors only go with a first frame."""
        if descriptors:
            with contextlib.suppress(OSError):
                sent = socket.send_fds(self.sock, [frame], descriptors)
                frame = frame[sent:]
        if not self.is_deaf:
            self._outbox += frame
            self.flush()

    def flush(self) -> None:
        """Send what waits, as much as the client has room for."""
        if not self._outbox:
            return
        try:
            sent = self.sock.send(self._outbox)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.is_deaf = True
            self._outbox.clear()
        else:
            del self._outbox[:sent]
        if not self._outbox:
            self._unread_since = None
        elif sent or self._unread_since is None:
            self._unread_since = time.monotonic()

    def close(self) -> None:
        self.sock.close()

    def _look_for_frame(self) -> None:
        """Run the clock of a frame whose end has not come yet."""
        inbox = self._inbox
        self.has_frame = False
        if len(inbox) >= p.LENGTH.size:
            body_bytes: int = p.LENGTH.unpack_from(inbox)[0]
            is_whole = len(inbox) >= p.LENGTH.size + body_bytes
            self.has_frame = is_whole or body_bytes > p.MAX_FRAME_BYTES
        if not inbox or self.has_frame:
            self._frame_since = None
        elif self._frame_since is None:
            self._frame_since = time.monotonic()
