"""KV that a sender calls approximate, received beside the plain connector."""

from typing import Any

import pytest
from tests.vllm.bench import Bench, prompt
from tests.vllm.driven import Engine
from tests.vllm.fake_runner import TOKENS

PROMPT = prompt(1, 42)  # 5 blocks of 8 tokens, or 10 device blocks of 4, and 2 tokens
ANSWER = 12


def received(engine: Engine, name: str, taint_from: object, **others: Any) -> None:
    engine.add(name, PROMPT, ANSWER, {"taint_from": taint_from, **others})
    engine.run()


def names(bench: Bench, engine: Engine, blocks: int) -> set[bytes]:
    """Of the first *blocks* of the prompt and what follows it, if all of it is exact."""
    request = engine.add("named", PROMPT, ANSWER)
    engine.run()
    keys = engine.half._math.keys(request, 0, blocks)
    return {engine.half._namespace + key for key in keys}


@pytest.mark.parametrize(
    ("taint_from", "blocks", "shared_tokens"),
    [(0, 0, 0), (16, 2, 16), (18, 2, 16), (23, 2, 20), (39, 4, 36), (41, 4, 36)],
)
def test_of_what_is_received_only_exact_blocks_are_saved_and_shared(
    bench: Bench, taint_from: int, blocks: int, shared_tokens: int
) -> None:
    engine = bench.engine()
    received(engine, "received", taint_from)
    saved = bench.saved_keys()
    exact = engine.add("exact", PROMPT, ANSWER)
    assert engine.scheduler.kv_cache_manager.get_computed_blocks(exact)[1] == shared_tokens
    engine.run()
    assert saved == names(bench, engine, blocks)
    assert len(bench.saved_keys()) == 6  # now that they have been computed
    assert bench.check_saved_bytes(engine) > 0
    assert not any(engine.leftovers().values())


def test_a_request_that_decodes_behind_its_taint_is_looked_at_once_a_block(bench: Bench) -> None:
    engine = bench.engine()
    engine.watch_frontiers()
    engine.add("received", PROMPT, 10 * TOKENS, {"taint_from": 18})
    engine.run()
    looks = [each.offered_tokens for each in engine.frontiers]
    end = len(PROMPT) + 10 * TOKENS - 1  # the last token is no input
    assert looks == [32, 42, *range(48, end, TOKENS), end]


def test_behind_the_token_that_a_sender_names_nothing_is_loaded(bench: Bench) -> None:
    engine = bench.engine()
    engine.serve("before", PROMPT, ANSWER)
    engine.forget_device()
    received(engine, "received", 30)
    assert engine.runner.loaded_tokens["received"] == 24


def test_a_request_does_not_wait_for_blocks_that_its_sender_has_not_saved(bench: Bench) -> None:
    engine = bench.engine()
    engine.serve("sender", PROMPT[:24], 2)
    engine.forget_device()
    received(engine, "received", 26, kvstrata_wait_seconds=60)  # which no test waits for
    assert engine.runner.loaded_tokens["received"] == 24


@pytest.mark.parametrize("said", [-1, True, 42, 1 << 40, "18", 18.0, None, [18]])
def test_what_is_no_token_of_the_prompt_taints_nothing(bench: Bench, said: object) -> None:
    engine = bench.engine()
    received(engine, "received", said)
    assert bench.saved_keys() == names(bench, engine, 6)


def test_a_prompt_without_a_whole_block_is_kept_apart_once_it_has_one(bench: Bench) -> None:
    engine = bench.engine()
    request = engine.add("received", PROMPT[:3], ANSWER, {"taint_from": 1})
    engine.run()
    assert bench.saved_keys() == set()
    exact = engine.add("exact", list(request.all_token_ids), 2)
    assert engine.scheduler.kv_cache_manager.get_computed_blocks(exact)[1] == 0
    engine.run()
    assert len(bench.saved_keys()) == bench.check_saved_bytes(engine) > 0
