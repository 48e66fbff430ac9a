"""A producer and a consumer at one attached server."""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engine import Answer, Ask, CacheServer, Engine
from tests.vllm.oracle import Oracle, loaded_at_once, random_prompt

from kvstrata.core.load import load_config
from kvstrata.server.sockets import runtime_directory

pytestmark = pytest.mark.vllm

TOKENS_PER_BLOCK = 64


@dataclass
class Pair:
    producer: Engine
    consumer: Engine
    server: CacheServer


@pytest.fixture(scope="module")
def pair(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("roles")
    socket = runtime_directory() / f"roles-{os.getpid()}-{random.randrange(1 << 30)}"
    extra: dict[str, Any] = {
        "server": "attached",
        "socket": str(socket),
        "tokens_per_block": TOKENS_PER_BLOCK,
        "lookup_timeout_seconds": 30,
    }

    def engine(role: str) -> Engine:
        transfer = {
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
        return Engine(tiny_llama, folder / f"{role}.log", transfer)

    with (
        CacheServer(load_config({"tiers": "host:64MiB"}), socket, folder / "server.log") as server,
        engine("kv_producer") as producer,
        engine("kv_consumer") as consumer,
    ):
        yield Pair(producer, consumer, server)
    socket.unlink(missing_ok=True)


def _ask(engine: Engine, oracle: Oracle, id: str, prompt: tuple[int, ...]) -> Answer:
    """The answer of *engine* with nothing in its own cache before and no save under way after."""
    engine.reset_prefix_cache()
    ask = Ask(id, prompt, 6)
    answers = engine.run([ask])
    oracle.check([ask], answers)
    engine.reset_prefix_cache()
    return answers[id]


def test_what_the_producer_computes_is_a_hit_of_the_consumer(pair: Pair, oracle: Oracle) -> None:
    rng = random.Random(1)
    for tokens in (64, 65, 300, 1400):
        prompt = random_prompt(rng, tokens)
        assert _ask(pair.producer, oracle, f"made-{tokens}", prompt).cached_tokens == 0
        answer = _ask(pair.consumer, oracle, f"used-{tokens}", prompt)
        blocks = tokens // TOKENS_PER_BLOCK
        assert answer.cached_tokens == loaded_at_once(tokens, blocks * TOKENS_PER_BLOCK)


def test_the_producer_never_loads(pair: Pair, oracle: Oracle) -> None:
    prompt = random_prompt(random.Random(2), 300)
    for i in range(2):
        assert _ask(pair.producer, oracle, f"produced-{i}", prompt).cached_tokens == 0
    assert pair.producer.counters().get("vllm:external_prefix_cache_hits", 0) == 0


def test_the_consumer_never_saves(pair: Pair, oracle: Oracle) -> None:
    prompt = random_prompt(random.Random(3), 300)
    _ask(pair.producer, oracle, "settled", random_prompt(random.Random(4), 64))
    saved = pair.server.report().counters["kvstrata_saved_blocks_total"]
    for i in range(2):
        assert _ask(pair.consumer, oracle, f"consumed-{i}", prompt).cached_tokens == 0
    assert pair.server.report().counters["kvstrata_saved_blocks_total"] == saved
