"""The ZMQ end of KV events: the frames that vLLM 0.32 sends, and its way to ask for lost ones.

A message is a topic, a sequence number of eight bytes, big-endian, and a ``KVEventBatch`` in msgpack.
Every topic has a sequence of its own, so that who subscribes to one sees no gap but where something
was lost. Who asks at the replay address from which number on is sent what is left of it, of all
topics, and at the end a message of number -1 without content.
"""

import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final

import msgspec

from kvstrata.core.errors import ConfigError
from kvstrata.observe.kv_events import Event, KVEventBatch

if TYPE_CHECKING:
    import zmq

__all__ = ["KVPublisher"]

_UNSENT_MESSAGES: Final = 10_000  # that wait for one subscriber; then it loses some
_KEPT_MESSAGES: Final = 10_000  # for replay
_KEPT_BYTES: Final = 64 << 20
_MOST_TOPICS: Final = 4096
_COPIED_BYTES: Final = 1024  # of a frame; a longer one is sent from where it is
_REPLAYS_AT_A_TIME: Final = 8
_LINGER_MS: Final = 500  # for what is unsent at the end
_END: Final = (-1).to_bytes(8, "big", signed=True)
_SEQUENCE_BYTES: Final = 8


class KVPublisher:
    """Sends batches to whoever subscribes; waits for nobody. For one thread at a time."""

    def __init__(self, address: str, replay_address: str | None) -> None:
        """Listen; ``ConfigError`` if that cannot be, or pyzmq is not there."""
        try:
            import zmq
        except ImportError as e:
            raise ConfigError(
                "kv_events needs pyzmq, which is not installed",
                hint="pip install 'kvstrata[events]'",
            ) from e
        self._context = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._pub = self._bound(zmq.PUB, address, "kv_events")
            if replay_address is not None:
                self._replay = self._bound(zmq.ROUTER, replay_address, "kv_events_replay")
                self._replay.copy_threshold = _COPIED_BYTES
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._encoder = msgspec.msgpack.Encoder()
        self._sequences: OrderedDict[str, int] = OrderedDict()  # the next of each topic
        self._kept: deque[tuple[bytes, int, bytes]] = deque()
        self._kept_bytes = 0

    @property
    def topics(self) -> list[str]:
        """Those under which something was sent, of the last 4096."""
        return list(self._sequences)

    def publish(self, topic: str, events: list[Event]) -> None:
        """Send *events* to who subscribes to *topic*. To who has too many waiting, they are lost."""
        sequence = self._sequences.pop(topic, 0)
        self._sequences[topic] = sequence + 1
        if len(self._sequences) > _MOST_TOPICS:
            self._sequences.popitem(last=False)
        name = topic.encode()
        payload = self._encoder.encode(KVEventBatch(time.time(), events))
        self._pub.send_multipart([name, sequence.to_bytes(_SEQUENCE_BYTES, "big"), payload])
        if self._replay is not None:
            self._keep(name, sequence, payload)

    def answer_replays(self) -> None:
        """Send to those who ask what they have lost, as far as it is kept."""
        if self._replay is None:
            return
        for _ in range(_REPLAYS_AT_A_TIME):
            if not self._replay.poll(0):
                return
            frames = self._replay.recv_multipart()
            if len(frames) == 3 and len(frames[2]) == _SEQUENCE_BYTES:
                self._send_kept(frames[0], int.from_bytes(frames[2], "big"))

    def close(self) -> None:
        self._context.destroy(linger=_LINGER_MS)

    def _bound(self, kind: int, address: str, setting: str) -> "zmq.Socket[bytes]":
        import zmq

        socket = self._context.socket(kind)
        socket.set_hwm(_UNSENT_MESSAGES)
        try:
            socket.bind(address)
        except zmq.ZMQError as e:
            raise ConfigError(
                f"{setting}: nobody can listen at {address!r}: {e.strerror}",
                hint="give an address of this machine and a free port, as in tcp://127.0.0.1:5557",
            ) from e
        return socket

    def _keep(self, name: bytes, sequence: int, payload: bytes) -> None:
        self._kept.append((name, sequence, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > _KEPT_MESSAGES or self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[2])

    def _send_kept(self, who: bytes, start: int) -> None:
        assert self._replay is not None
        for name, sequence, payload in self._kept:
            if sequence >= start:
                number = sequence.to_bytes(_SEQUENCE_BYTES, "big")
                # Who asks and does not read keeps nothing but references to what is kept anyway.
                self._replay.send_multipart([who, b"", name, number, payload], copy=False)
        self._replay.send_multipart([who, b"", b"", _END, b""])
