"""A router that follows KV events, with vLLM's own classes for what they say."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
from tests.vllm.engine import wait_until
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    AllBlocksCleared,
    BlockRemoved,
    KVEventBatch,
)


@dataclass
class Router:
    """Follows one publisher, as vLLM's example subscriber does."""

    address: str
    topic: str
    context: "zmq.Context[zmq.Socket[bytes]]"
    events: list[Any] = field(default_factory=list)
    medium: str = MEDIUM_CPU  # that it counts on
    held: set[int] = field(default_factory=set)  # there
    sequence: int = -1

    def __post_init__(self) -> None:
        self.socket = self.context.socket(zmq.SUB)
        self.socket.connect(self.address)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, self.topic)
        self._decoder = msgspec.msgpack.Decoder(type=KVEventBatch)

    def hear(self) -> None:
        while self.socket.poll(0):
            topic, number, payload = self.socket.recv_multipart()
            assert topic.decode() == self.topic
            sequence = int.from_bytes(number, "big")
            assert self.sequence in {-1, sequence - 1}, "a message is lost"
            self.sequence = sequence
            for event in self._decoder.decode(payload).events:
                self.events.append(event)
                self.apply(event)

    def apply(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            self.held.clear()
        elif event.medium == self.medium and isinstance(event, BlockRemoved):
            self.held.difference_update(event.block_hashes)
        elif event.medium == self.medium:
            self.held.update(event.block_hashes)

    def wait(self, count: int, *, of: Any, medium: str | None = MEDIUM_CPU) -> list[Any]:
        """The events *of* this type in *medium*, as soon as they name *count* blocks."""

        def found() -> list[Any]:
            self.hear()
            alike = [event for event in self.events if isinstance(event, of)]
            return [event for event in alike if event.medium == medium]

        def is_enough() -> bool:
            return sum(len(event.block_hashes) for event in found()) >= count

        wait_until(is_enough, f"{self.topic}: not {count} blocks in {self.events}")
        return found()

    def wait_held(self, count: int) -> None:
        """Until *count* blocks are there, and no others."""

        def is_so() -> bool:
            self.hear()
            return len(self.held) == count

        wait_until(is_so, f"{self.topic}: not {count} blocks are held")
