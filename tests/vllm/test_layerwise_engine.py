"""Real vLLM with ``load_mode: layerwise``: its attention layers wait for their own share."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.vllm.engine import MAX_TOKENS, Ask, Engine, embedded_report, wait_for_worker
from tests.vllm.oracle import (
    Oracle,
    ReuseModel,
    loaded_at_once,
    random_prompt,
    random_prompts,
)

pytestmark = pytest.mark.vllm

TOKENS_PER_BLOCK = 64
NEW_TOKENS = 6
NAME = f"layerwise-{random.randrange(1 << 30)}"


@pytest.fixture(scope="module")
def engine(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    transfer = {
        "engine_id": NAME,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "tiers": "host:64MiB",
            "load_mode": "layerwise",
            "recompute": "never",
            "tokens_per_block": TOKENS_PER_BLOCK,
            "lookup_timeout_seconds": 30,
            "load_timeout_seconds": 30,
            "save_timeout_seconds": 30,
        },
    }
    log = tmp_path_factory.mktemp("layerwise") / "vllm.log"
    with Engine(tiny_llama, log, transfer) as engine:
        engine.wait_ready()
        wait_for_worker(NAME)
        yield engine


def test_a_prompt_is_loaded_but_for_its_last_device_block(engine: Engine, oracle: Oracle) -> None:
    """One by one, so that it is known what can be reused."""
    rng, model = random.Random(5), ReuseModel(TOKENS_PER_BLOCK)
    stem = random_prompt(rng, 700)
    for i, length in enumerate((640, 640, 639, 641, 64, 65, 32, 320, 640)):
        engine.reset_prefix_cache()
        ask = Ask(f"one-{i}", stem[:length], NEW_TOKENS)
        answer = engine.run([ask])[ask.id]
        oracle.check([ask], {ask.id: answer})
        assert answer.cached_tokens == loaded_at_once(length, model.reusable(ask.prompt))
        model.answered(ask.prompt, answer)


def test_many_at_once_share_loads_in_the_step_that_loads_them(
    engine: Engine, oracle: Oracle
) -> None:
    rng = random.Random(6)
    prompts = random_prompts(rng, 24, most_tokens=MAX_TOKENS // 3)
    for round_number in range(3):
        asks = [
            Ask(f"many-{round_number}-{i}", prompt, NEW_TOKENS, at_step=rng.randrange(20))
            for i, prompt in enumerate(prompts)
        ]
        oracle.check(asks, engine.run(asks))
        engine.reset_prefix_cache()
    counters = engine.counters()
    assert counters["vllm:external_prefix_cache_hits"] > 0
    assert embedded_report(NAME).counters["kvstrata_failed_loads_total"] == 0
