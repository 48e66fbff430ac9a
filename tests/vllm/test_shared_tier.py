"""Two engines with host memory of their own and one directory that both have mounted."""

import random
from pathlib import Path

import pytest
from tests.vllm.engine import Ask, Engine, transfer_config, wait_for_disk, wait_for_worker
from tests.vllm.oracle import Oracle, random_prompt

pytestmark = pytest.mark.vllm

TOKENS_PER_BLOCK = 64
PROMPT_TOKENS = 300
WHOLE = PROMPT_TOKENS // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
SOURCES = ("host", "disk", "external_unspecified")


def _engine(model: Path, folder: Path, name: str) -> Engine:
    transfer = transfer_config(
        name,
        TOKENS_PER_BLOCK,
        tiers=f"host:64MiB | shared:{folder}/kv:256MiB",
        remote_lookup_seconds=30,
    )
    return Engine(model, folder / f"{name}.log", transfer)


def _found(engine: Engine) -> list[float]:
    """Tokens of prompts so far that vLLM has counted as of each of ``SOURCES``."""
    counters = engine.counters()
    return [counters.get(f"vllm:prompt_tokens_cached_by_source{{{each}}}", 0) for each in SOURCES]


def test_what_another_node_has_saved_is_counted_as_of_the_tier_that_both_share(
    tiny_llama: Path, tmp_path: Path, oracle: Oracle
) -> None:
    names = [f"shared-{i}-{random.randrange(1 << 30)}" for i in (1, 2)]
    prompt = random_prompt(random.Random(12), PROMPT_TOKENS)
    with (
        _engine(tiny_llama, tmp_path, names[0]) as maker,
        _engine(tiny_llama, tmp_path, names[1]) as finder,
    ):
        for engine, name in zip((maker, finder), names, strict=True):
            engine.wait_ready()
            wait_for_worker(name)
        for engine, expected in (
            (maker, [0, 0, 0]),
            (finder, [0, 0, WHOLE]),
            (finder, [WHOLE, 0, WHOLE]),  # in its own host memory since
        ):
            ask = Ask(f"ask-{sum(expected)}", prompt)
            answers = engine.run([ask])
            oracle.check([ask], answers)
            assert _found(engine) == expected
            engine.reset_prefix_cache()  # waits until all is saved
            wait_for_disk(names[0])
