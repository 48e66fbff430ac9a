"""A model in bfloat16 with a KV head for each head (MHA): loaded blocks give vLLM's own answers.

A sum in bfloat16 may depend on what else is computed with it, so prompts come one at a time.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from tests.vllm.engine import (
    MAX_TOKENS,
    Ask,
    Engine,
    report_at_rest,
    transfer_config,
    wait_for_worker,
)
from tests.vllm.oracle import Oracle, ReuseModel, loaded_at_once, random_prompts

from kvstrata.integration.vllm.tiny_model import TinyLlama, write_tiny_llama

pytestmark = pytest.mark.vllm

TOKENS_PER_BLOCK = 64
NEW_TOKENS = 8


def test_one_by_one_what_is_loaded_answers_as_what_is_computed(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny-mha", TinyLlama(dtype="bfloat16", kv_heads=8))
    name = f"bfloat16-{random.randrange(1 << 30)}"
    transfer = transfer_config(name, TOKENS_PER_BLOCK, tiers="host:64MiB")
    settings = {"dtype": "bfloat16"}
    alone = settings | {"enable_prefix_caching": False}
    rng = random.Random(20261126)
    prompts = random_prompts(rng, 12, most_tokens=MAX_TOKENS - NEW_TOKENS)
    asks = [Ask(f"first-{i}", prompt, NEW_TOKENS) for i, prompt in enumerate(prompts)]
    asks += [replace(ask, id=f"again-{ask.id}") for ask in asks[:6]]
    reuse = ReuseModel(TOKENS_PER_BLOCK)
    with (
        Engine(model, tmp_path / "alone.log", settings=alone) as other,
        Engine(model, tmp_path / "vllm.log", transfer, settings) as engine,
    ):
        engine.wait_ready()
        wait_for_worker(name)
        oracle = Oracle(other)
        reused = 0
        for ask in asks:
            engine.reset_prefix_cache()
            expected = loaded_at_once(len(ask.prompt), reuse.reusable(ask.prompt))
            answers = engine.run([ask])
            oracle.check([ask], answers)
            assert answers[ask.id].cached_tokens == expected, f"{ask.id}: {len(ask.prompt)} tokens"
            reuse.answered(ask.prompt, answers[ask.id])
            reused += expected
        report = report_at_rest(name)
    assert reused > 2 * MAX_TOKENS
    assert report.counters["kvstrata_failed_loads_total"] == 0
