"""KV events of a tier that nodes share: a real server publishes, and vLLM's own classes read."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import zmq
from tests.caches import ALICE, BOB, keys
from tests.remote.valkey_servers import Server, name_of
from tests.server.harness import engine, worker
from tests.vllm.engine import CacheServer, wait_until, wait_until_written
from tests.vllm.router import Router
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored

from kvstrata.core.load import load_config
from kvstrata.core.types import BlockKey, NamespaceId
from kvstrata.server.client import ManagerClient

STORAGE: Final = "STORAGE"
PREFIX: Final = "told"
PROMPT: Final = keys(1, 2, 3)


def number(block: BlockKey) -> int:
    """As events name it."""
    return int.from_bytes(block[-8:], "big")


NUMBERS: Final = [number(block) for block in PROMPT]


@dataclass
class Node:
    """A server with room for eight blocks, what its engine says to it, and who follows it."""

    client: ManagerClient
    socket: Path
    router: Router

    def save(self, namespace: NamespaceId, blocks: list[BlockKey]) -> None:
        task = self.client.put_match(namespace, blocks)
        self.client.launch([task.task_id])
        self.client.complete([task.task_id])
        wait_until_written(self.socket)

    def load(self, blocks: list[BlockKey]) -> int:
        """How many leading ones are brought into host memory."""
        task = self.client.get_match(ALICE, blocks)
        if not task.task_id:
            return 0
        found = self.client.wait([task.task_id], 30)[task.task_id]
        self.client.cancel([task.task_id])
        return len(found.slots)

    def hears(self, number: int, kind: Any, medium: str = STORAGE) -> Any:
        """The first event of this *kind* that names the block."""

        def found() -> list[Any]:
            self.router.hear()
            return [
                event
                for event in self.router.events
                if isinstance(event, kind)
                and event.medium == medium
                and number in event.block_hashes
            ]

        wait_until(lambda: bool(found()), f"{kind.__name__} of {medium} is not told")
        return found()[0]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def node(redis: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("ev")
    redis.ask("FLUSHALL")
    address, socket = f"ipc://{folder}/events", folder / "s"
    remote = f"valkey://127.0.0.1:{redis.port}?prefix={PREFIX}&missing_seconds=0"
    config = load_config(
        {"tiers": f"host:32KiB | {remote}", "kv_events": address, "recompute": "never"}, environ={}
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with (
        CacheServer(config, socket, folder / "server.log"),
        closing(engine(socket)) as client,
        closing(worker(socket)),
    ):
        for namespace in (ALICE, BOB):
            client.register_namespace(namespace, {"model": "tiny"})
        node = Node(client, socket, Router(address, "", context, medium=STORAGE))
        wait_until(lambda: _hears(node), "the subscriber hears nothing")
        yield node
    context.destroy(linger=0)


def _hears(node: Node) -> bool:
    """A publisher knows its subscribers a moment after they have connected."""
    node.client.reset(BOB)
    return bool(node.router.socket.poll(20))


def test_what_goes_to_the_shared_tier_and_is_known_to_have_left_it_is_told(
    node: Node, redis: Server
) -> None:
    node.save(ALICE, PROMPT)
    stored = [node.hears(block, BlockStored) for block in NUMBERS]
    assert {(event.locality, event.ownership) for event in stored} == {("REMOTE", "remote")}
    assert stored[0].parent_block_hash is None
    assert {node.hears(block, BlockStored, MEDIUM_CPU).locality for block in NUMBERS} == {None}

    node.save(BOB, keys(*range(4, 12)))
    for block in NUMBERS:  # it leaves host memory, and nothing else
        node.hears(block, BlockRemoved, MEDIUM_CPU)
    assert set(NUMBERS) <= node.router.held

    damaged = name_of(ALICE + PROMPT[1], PREFIX)
    redis.ask("SETRANGE", damaged, 500, b"another byte")
    assert node.load(PROMPT) == 1
    assert node.hears(NUMBERS[1], BlockRemoved).ownership == "remote"
    assert redis.ask("EXISTS", damaged) == 0
    assert node.router.held & set(NUMBERS) == {NUMBERS[0], NUMBERS[2]}

    node.save(ALICE, PROMPT)  # as an engine that has computed it again
    wait_until(lambda: redis.ask("EXISTS", damaged) == 1, "it is not written again")

    def is_told_again() -> bool:
        node.router.hear()
        return set(NUMBERS) <= node.router.held

    wait_until(is_told_again, "what is written again is not told")


def test_what_another_node_has_written_is_told_when_it_is_found(node: Node, redis: Server) -> None:
    node.save(ALICE, PROMPT)
    node.save(BOB, keys(*range(4, 12)))
    values = {
        name: redis.ask("GET", name) for name in redis.ask("KEYS", f"{PREFIX}:{ALICE.hex()}:*")
    }
    node.client.reset(ALICE)  # forgets all, here and there
    wait_until(lambda: not redis.ask("EXISTS", *values), "a reset does not reach the shared tier")
    node.router.hear()
    node.router.events.clear()
    for name, value in values.items():
        redis.ask("SET", name, value)

    assert node.load(PROMPT) == 3
    for block in NUMBERS:
        assert node.hears(block, BlockStored).locality == "REMOTE"
        node.hears(block, BlockStored, MEDIUM_CPU)
