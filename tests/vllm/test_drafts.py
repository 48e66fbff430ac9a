"""Speculative decoding on a real engine: right tokens, computed and behind answers that were drafted."""

import random
from pathlib import Path

import pytest
from tests.vllm.engine import Ask, Engine, report_at_rest, transfer_config, wait_for_worker
from tests.vllm.oracle import Oracle, random_prompt

pytestmark = pytest.mark.vllm

TOKENS_PER_BLOCK = 64
NEW_TOKENS = 100
NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}


def _whole(tokens: int) -> int:
    return tokens // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK


def test_prompts_and_drafted_answers_are_found_again(
    tiny_llama: Path, tmp_path: Path, oracle: Oracle
) -> None:
    name = f"drafts-{random.randrange(1 << 30)}"
    transfer = transfer_config(name, TOKENS_PER_BLOCK, tiers="host:64MiB")
    settings = {"speculative_config": NGRAMS}
    rng = random.Random(3)
    asks = [Ask(f"cold-{i}", random_prompt(rng, 40) * 5, NEW_TOKENS) for i in range(4)]
    with Engine(tiny_llama, tmp_path / "vllm.log", transfer, settings) as engine:
        engine.wait_ready()
        wait_for_worker(name)
        cold = engine.run(asks)
        oracle.check(asks, cold)
        assert {answer.cached_tokens for answer in cold.values()} == {0}
        # The very same prompts, then what continues them.
        again = [Ask(f"again-{ask.id}", ask.prompt, NEW_TOKENS) for ask in asks]
        longer = [
            Ask(f"longer-{ask.id}", (*ask.prompt, *cold[ask.id].tokens, 7), NEW_TOKENS)
            for ask in asks
        ]
        for warm in (again, longer):
            engine.reset_prefix_cache()
            answers = engine.run(warm)
            oracle.check(warm, answers)
            for ask in warm:
                assert answers[ask.id].cached_tokens == _whole(len(ask.prompt)), ask.id
        counters = engine.counters()
        report = report_at_rest(name)
    drafted, accepted = (
        counters[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted")
    )
    assert 0 < accepted < drafted
    assert report.counters["kvstrata_loaded_blocks_total"] > 0
    assert report.counters["kvstrata_failed_loads_total"] == 0
    assert report.counters["kvstrata_corrupt_blocks_total"] == 0
