"""KV events of a real engine and of the server that it is attached to, read by vLLM's own classes."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
import zmq
from tests.vllm.engine import CacheServer, Engine, wait_until
from tests.vllm.oracle import random_prompt
from tests.vllm.router import Router
from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
)

from kvstrata.core.config import Config
from kvstrata.core.load import load_config

pytestmark = pytest.mark.vllm

TOKENS_PER_BLOCK: Final = 64
ENGINE_TOPIC: Final = "kv@engine@tiny-llama"
SERVER_TOPIC: Final = "kv@server@tiny-llama"


@dataclass
class Bench:
    engine: Engine
    server: CacheServer
    of_engine: Router
    of_server: Router

    def host_blocks(self) -> int:
        return sum(namespace.host_blocks for namespace in self.server.report().namespaces)

    def settle(self) -> None:
        """Until both routers know as many blocks as there are, and the same ones."""

        def agree() -> bool:
            self.of_engine.hear()
            self.of_server.hear()
            same = self.of_engine.held == self.of_server.held
            return same and len(self.of_engine.held) == self.host_blocks()

        wait_until(agree, "the routers do not know what the server holds")


@pytest.fixture(scope="module")
def bench(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("ev")
    addresses = [f"ipc://{folder}/{name}" for name in ("engine", "server")]
    config: Config = load_config(
        {"tiers": "host:4MiB", "kv_events": addresses[1], "kv_events_topic": "kv@server@{model}"}
    )
    transfer = {
        "kv_role": "kv_both",
        "engine_id": "told",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "server": "attached",
            "socket": str(folder / "s"),
            "tokens_per_block": TOKENS_PER_BLOCK,
            "lookup_timeout_seconds": 30,
        },
    }
    events = {"enable_kv_cache_events": True, "endpoint": addresses[0], "topic": ENGINE_TOPIC}
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with (
        CacheServer(config, folder / "s", folder / "server.log") as server,
        Engine(tiny_llama, folder / "engine.log", transfer, {"kv_events_config": events}) as engine,
    ):
        routers = [
            Router(address, topic, context)
            for address, topic in zip(addresses, (ENGINE_TOPIC, SERVER_TOPIC), strict=True)
        ]
        engine.wait_ready()
        bench = Bench(engine, server, *routers)
        # A publisher knows its subscribers a moment after they have connected.
        dice = random.Random(1)
        wait_until(lambda: _hears_all(bench, random_prompt(dice, 70)), "no subscriber hears")
        yield bench
    context.destroy(linger=0)


def _hears_all(bench: Bench, prompt: tuple[int, ...]) -> bool:
    bench.engine.ask(prompt)
    return all(router.socket.poll(2000) for router in (bench.of_engine, bench.of_server))


def test_what_is_stored_evicted_and_cleared_is_told(bench: Bench) -> None:
    dice = random.Random(2)
    prompt = random_prompt(dice, 200)
    engine, of_engine, of_server = bench.engine, bench.of_engine, bench.of_server
    engine.reset_prefix_cache(connector=True)  # what was published before they subscribed is void
    engine.ask(random_prompt(dice, 70))
    wait_until(lambda: bench.host_blocks() == 1, "the prompt of one block is not saved")
    bench.settle()
    of_engine.events.clear()
    of_server.events.clear()

    engine.ask(prompt)
    stored = of_engine.wait(3, of=BlockStored)
    hashes = [h for event in stored for h in event.block_hashes]
    assert [t for event in stored for t in event.token_ids] == list(prompt[: 3 * TOKENS_PER_BLOCK])
    assert {event.block_size for event in stored} == {TOKENS_PER_BLOCK}
    assert {event.lora_name for event in stored} == {None}
    assert {(event.locality, event.ownership) for event in stored} == {(None, None)}
    parents = [event.parent_block_hash for event in stored]
    firsts = [event.block_hashes[0] for event in stored]
    known = {None: -1} | {h: i for i, h in enumerate(hashes)}
    assert [known[parent] + 1 for parent in parents] == [known[first] for first in firsts]
    on_device = [
        event
        for event in of_engine.events
        if isinstance(event, BlockStored) and event.medium == MEDIUM_GPU
    ]
    assert {(e.group_idx, e.kv_cache_spec_kind) for e in stored} == {(0, "full_attention")}
    device_hashes = [h for event in on_device for h in event.block_hashes]
    assert hashes == device_hashes[1:6:2]  # a block of ours ends with every second one of vLLM's

    by_server = of_server.wait(3, of=BlockStored)
    assert [h for event in by_server for h in event.block_hashes] == hashes
    assert {(len(event.token_ids), event.block_size) for event in by_server} == {(0, 0)}
    bench.settle()

    for _ in range(4):
        engine.ask(random_prompt(dice, 400))
    for router in (of_engine, of_server):
        removed = router.wait(3, of=BlockRemoved)
        assert set(hashes) <= {h for event in removed for h in event.block_hashes}
    bench.settle()

    engine.reset_prefix_cache(connector=True)
    engine.ask(random_prompt(dice, 130))
    of_engine.wait_held(2)
    bench.settle()
    of_engine.hear()
    assert len(of_engine.held) == 2
    assert any(isinstance(event, AllBlocksCleared) for event in of_engine.events)
    assert any(isinstance(event, AllBlocksCleared) for event in of_server.events)
