"""The event log of a real engine's cache, replayed: the hits that the cache had."""

import random
from pathlib import Path

import pytest
from tests.vllm.engine import Engine, embedded_report, wait_for_worker, wait_until
from tests.vllm.oracle import random_prompt

from kvstrata.replay.cost import Costs, Rates
from kvstrata.replay.formats import Reading, open_trace
from kvstrata.replay.reuse import find_reuse
from kvstrata.replay.scan import scan
from kvstrata.replay.simulator import CachePlan, simulate
from kvstrata.replay.sizes import Sizes

pytestmark = pytest.mark.vllm

TOKENS_PER_BLOCK = 64


def test_a_replay_of_an_engines_log_has_the_hits_that_the_engine_had(
    tiny_llama: Path, tmp_path: Path
) -> None:
    log = tmp_path / "events"
    transfer = {
        "kv_role": "kv_both",
        "engine_id": "logged",
        "kv_connector_extra_config": {
            "tiers": "host:64MiB",
            "tokens_per_block": TOKENS_PER_BLOCK,
            "event_log": str(log),
            "lookup_timeout_seconds": 30,
        },
    }
    dice = random.Random(5)
    prompts = [random_prompt(dice, 300 + 64 * n) for n in range(4)]
    with Engine(tiny_llama, tmp_path / "engine.log", transfer) as engine:
        engine.wait_ready()
        wait_for_worker("logged")
        for prompt in [*prompts, *prompts, prompts[0][:200] + prompts[1]]:
            engine.ask(prompt)
            engine.reset_prefix_cache()
        counters = embedded_report("logged").counters
    expected = counters["kvstrata_lookup_blocks_total{tier=host}"]
    missed = counters["kvstrata_lookup_blocks_total{tier=none}"]
    assert expected >= sum(len(prompt) // TOKENS_PER_BLOCK for prompt in prompts)

    def is_replayed() -> bool:  # the server outlives its engine, and writes all then
        if not log.stat().st_size:
            return False
        trace = open_trace(log, Reading())
        folder = tmp_path / f"spool-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        spool = scan(trace, folder)
        assert trace.block_bytes is not None
        assert trace.tokens_per_block == TOKENS_PER_BLOCK
        costs = Costs(Rates(), trace.tokens_per_block, trace.block_bytes)
        outcome = simulate(
            spool,
            costs,
            CachePlan("lru", Sizes(64 << 20, 0)),
            most_blocks=find_reuse(spool).distinct_blocks,
        )
        return (outcome.hits, spool.lookup_blocks - outcome.hits) == (expected, missed)

    wait_until(is_replayed, f"the replay never has {expected} hits and {missed} misses")
