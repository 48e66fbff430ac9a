"""KV events over ZMQ: frames, topics, numbers, replays, and a publisher that nobody waits for."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tests.caches import ALICE, BLOCK_BYTES, BOB, config, eventually, keys, save
from tests.server.harness import serving

from kvstrata.core.errors import ConfigError
from kvstrata.manager import feed
from kvstrata.manager.manager import KVManager
from kvstrata.observe import kv_publisher
from kvstrata.observe.block_changes import Change
from kvstrata.observe.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
    event_of,
)
from kvstrata.observe.kv_publisher import KVPublisher
from kvstrata.server.server import Server

PROMPT = keys(1, 2, 3)
NUMBERS: list[int | bytes] = [int.from_bytes(key[-8:], "big") for key in PROMPT]

Socket = zmq.Socket[bytes]


@pytest.fixture
def context() -> Iterator["Sockets"]:
    context = Sockets()
    yield context
    context.destroy(linger=0)


class Sockets(zmq.Context[Socket]):
    """A context whose sockets live as long as it does: none is collected unclosed."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["kept"] = []

    def socket(self, *arguments: Any, **options: Any) -> Socket:
        made = super().socket(*arguments, **options)
        self.__dict__["kept"].append(made)
        return made


@contextmanager
def publishing(folder: Path, **settings: Any) -> Iterator[tuple[KVManager, str]]:
    """A server that publishes; its manager, and the address."""
    address = f"ipc://{folder}/events"
    with serving(config(8, kv_events=address, **settings), folder / "s") as server:
        assert server.manager is not None
        yield server.manager, address


class Subscriber:
    def __init__(self, context: "Sockets", address: str, topic: str = "") -> None:
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.socket.connect(address)
        self.messages: list[tuple[str, int, list[Event]]] = []

    def hear(self) -> None:
        while self.socket.poll(0):
            topic, number, payload = self.socket.recv_multipart()
            assert len(number) == 8
            batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
            self.messages.append((topic.decode(), int.from_bytes(number, "big"), batch.events))

    def events(self, topic: str = "") -> list[Event]:
        self.hear()
        return [e for name, _, events in self.messages if name == topic for e in events]

    def wait(self, count: int, topic: str = "") -> list[Event]:
        eventually(lambda: len(self.events(topic)) >= count, f"not {count} events of {topic!r}")
        return self.events(topic)


def stored(subscriber: Subscriber) -> list[Event]:
    subscriber.hear()
    every = [event for _, _, events in subscriber.messages for event in events]
    return [event for event in every if isinstance(event, BlockStored)]


def has_stored(subscriber: Subscriber, count: int) -> bool:
    return len(stored(subscriber)) >= count


def begin(manager: KVManager, *subscribers: Subscriber) -> None:
    """Until all of *subscribers* hear the publisher; Bob's events of before are no matter."""
    manager.register_namespace(BOB, {"model": "bob"})

    def all_hear() -> bool:
        manager.reset(BOB)
        return all(subscriber.socket.poll(10) for subscriber in subscribers)

    eventually(all_hear, "a subscriber hears nothing")


def test_what_happens_is_published_with_numbers_that_have_no_gap(
    tmp_path: Path, context: "Sockets"
) -> None:
    with publishing(tmp_path, kv_events_topic="kv@{model}") as (manager, address):
        subscriber = Subscriber(context, address)
        begin(manager, subscriber)
        manager.register_namespace(ALICE, {"model": "alice"})
        save(manager, ALICE, PROMPT)
        told = BlockStored(NUMBERS, None, [], 0, None, "CPU", None, group_idx=0)
        assert subscriber.wait(1, "kv@alice") == [told]
        save(manager, ALICE, keys(*range(4, 12)))
        removed = [e for e in subscriber.wait(3, "kv@alice") if isinstance(e, BlockRemoved)]
        assert {number for e in removed for number in e.block_hashes} == set(NUMBERS)
        manager.reset(ALICE)
        assert subscriber.wait(4, "kv@alice")[-1] == AllBlocksCleared()
        for topic in ("kv@alice", "kv@bob"):
            numbers = [number for name, number, _ in subscriber.messages if name == topic]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert next(n for name, n, _ in subscriber.messages if name == "kv@alice") == 0


def test_a_topic_names_the_namespace_and_hashes_can_be_bytes(
    tmp_path: Path, context: "Sockets"
) -> None:
    with publishing(tmp_path, kv_events_topic="{namespace}", kv_events_hashes="bytes") as (
        manager,
        address,
    ):
        subscriber = Subscriber(context, address)
        begin(manager, subscriber)
        manager.register_namespace(ALICE, {})
        save(manager, ALICE, PROMPT[:1])
        save(manager, ALICE, PROMPT[1:], parent=PROMPT[0])
        assert [
            (e.block_hashes, e.parent_block_hash)
            for e in subscriber.wait(2, ALICE.hex())
            if isinstance(e, BlockStored)
        ] == [(PROMPT[:1], None), (PROMPT[1:], PROMPT[0])]


def test_others_of_a_topic_that_is_cleared_are_published_again(
    tmp_path: Path, context: "Sockets"
) -> None:
    with publishing(tmp_path) as (manager, address):
        subscriber = Subscriber(context, address)
        begin(manager, subscriber)
        manager.register_namespace(ALICE, {"model": "alice"})
        save(manager, ALICE, PROMPT)

        eventually(lambda: len(stored(subscriber)) == 1, "Alice's blocks are not published")
        manager.reset(BOB)
        eventually(lambda: len(stored(subscriber)) == 2, "Alice's blocks are not published again")
        assert stored(subscriber)[0] == stored(subscriber)[1] == subscriber.events()[-1]
        assert subscriber.events()[-2] == AllBlocksCleared()


def test_what_no_engine_has_registered_is_not_published(tmp_path: Path, context: "Sockets") -> None:
    with publishing(tmp_path, kv_events_topic="{namespace}") as (manager, address):
        subscriber = Subscriber(context, address)
        begin(manager, subscriber)
        save(manager, ALICE, PROMPT)
        save(manager, BOB, PROMPT[:1])
        eventually(
            lambda: any(isinstance(e, BlockStored) for e in subscriber.events(BOB.hex())),
            "Bob's block is not published",
        )
        assert not subscriber.events(ALICE.hex())


def test_a_publisher_that_falls_behind_declares_all_void_and_begins_anew(
    tmp_path: Path, context: "Sockets", monkeypatch: pytest.MonkeyPatch
) -> None:
    with publishing(tmp_path, kv_events_topic="{model}") as (manager, address):
        subscriber = Subscriber(context, address)
        begin(manager, subscriber)
        manager.register_namespace(ALICE, {"model": "alice"})
        save(manager, ALICE, PROMPT)
        subscriber.wait(1, "alice")
        with manager._lock:  # the publisher cannot take anything now
            monkeypatch.setattr(feed, "_MOST_BLOCKS", 1)
            save(manager, ALICE, keys(7))
            save(manager, ALICE, keys(8))
        kinds = [type(event) for event in subscriber.wait(5, "alice")[1:]]
        assert kinds == [AllBlocksCleared, *[BlockStored] * 3]
        assert subscriber.events("bob")[-1] == AllBlocksCleared()


def test_lost_messages_can_be_asked_for(tmp_path: Path, context: "Sockets") -> None:
    replay = f"ipc://{tmp_path}/replay"
    with publishing(tmp_path, kv_events_replay=replay, kv_events_topic="t") as (manager, address):
        subscriber = Subscriber(context, address)
        begin(manager, subscriber)
        for number in range(5):
            manager.register_namespace(ALICE, {})
            save(manager, ALICE, keys(number))
            wanted = number + 1
            eventually(partial(has_stored, subscriber, wanted), "a block is not published")
        sent = [number for _, number, _ in subscriber.messages]
        asking = context.socket(zmq.REQ)
        asking.connect(replay)
        asking.send(b"nonsense that is not a number")
        asking.close(linger=100)
        asking = context.socket(zmq.DEALER)
        asking.connect(replay)
        asking.send_multipart([b"", (sent[-1] - 2).to_bytes(8, "big")])
        heard: list[int] = []
        while not heard or heard[-1] != -1:
            assert asking.poll(20_000)
            _, topic, last, payload = asking.recv_multipart()
            heard.append(int.from_bytes(last, "big", signed=True))
            assert (topic, bool(payload)) == ((b"t", True) if heard[-1] >= 0 else (b"", False))
        assert heard == [*sent[-3:], -1]


def test_what_is_kept_for_replays_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = KVPublisher(f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r")
    for name, most, kept in [("_KEPT_MESSAGES", 3, 3), ("_KEPT_BYTES", 0, 0)]:
        monkeypatch.setattr(kv_publisher, name, most)
        for _ in range(5):
            publisher.publish("t", [AllBlocksCleared()])
        assert len(publisher._kept) == kept
    monkeypatch.setattr(kv_publisher, "_MOST_TOPICS", 2)
    for topic in "abc":
        publisher.publish(topic, [])
    assert publisher.topics == ["b", "c"]
    publisher.close()


def test_those_who_ask_for_replays_and_do_not_read_take_no_memory(
    tmp_path: Path, context: "Sockets"
) -> None:
    publisher = KVPublisher(f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r")
    for _ in range(400):
        hashes: list[int | bytes] = [os.urandom(32) for _ in range(1024)]
        publisher.publish("t", [BlockRemoved(hashes, "CPU")])
    assert publisher._kept_bytes > 12 << 20
    asking = [context.socket(zmq.DEALER) for _ in range(12)]
    before = resident_bytes()
    for socket in asking:
        socket.set_hwm(1)
        socket.connect(f"ipc://{tmp_path}/r")
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
    for _ in range(100):
        publisher.answer_replays()
        time.sleep(0.005)  # for requests that are on their way
    assert resident_bytes() - before < 64 << 20
    publisher.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_nobody_needs_to_subscribe(tmp_path: Path) -> None:
    with publishing(tmp_path) as (manager, _):
        manager.register_namespace(ALICE, {})
        for number in range(100):
            save(manager, ALICE, keys(number))
        follower = manager.feed._followers[0]
        eventually(lambda: follower._next == manager.feed.end, "the publisher stands still")


def test_an_address_that_is_taken_is_a_config_error_and_leaves_nothing(
    tmp_path: Path, context: "Sockets"
) -> None:
    taken = context.socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    address = f"tcp://127.0.0.1:{port}"
    free = f"ipc://{tmp_path}/free"
    for settings in (
        config(4, kv_events=address),
        config(4, kv_events=free, kv_events_replay=address),
    ):
        with pytest.raises(ConfigError, match="nobody can listen"):
            Server(settings, tmp_path / "s", block_bytes=BLOCK_BYTES)
        assert not (tmp_path / "s").exists()
    taken.close()


def test_without_pyzmq_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError) as error:
        Server(config(4, kv_events=f"ipc://{tmp_path}/e"), tmp_path / "s")
    assert error.value.hint == "pip install 'kvstrata[events]'"


def test_a_server_whose_socket_is_taken_lets_the_address_go(tmp_path: Path) -> None:
    settings = config(4, kv_events=f"ipc://{tmp_path}/e")
    with serving(config(4), tmp_path / "s"):
        with pytest.raises(ConfigError):
            Server(settings, tmp_path / "s")
        with serving(settings, tmp_path / "other"):
            pass


@pytest.mark.parametrize(
    ("tier", "medium", "locality", "ownership"),
    [
        ("host", "CPU", None, None),
        ("disk", "STORAGE", "LOCAL", "disk"),
        ("remote", "STORAGE", "REMOTE", "remote"),
    ],
)
def test_tiers_have_the_names_of_vllm(
    tier: Any, medium: str, locality: str | None, ownership: str | None
) -> None:
    for kind in ("stored", "removed"):
        event = event_of(Change(kind, ALICE, tier, PROMPT[0]), as_numbers=True)
        assert isinstance(event, BlockStored | BlockRemoved)
        assert (event.medium, event.locality, event.ownership) == (medium, locality, ownership)
