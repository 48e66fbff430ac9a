"""Models with several KV cache groups, on vLLM's own schedulers."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.any_traffic import serve_any_traffic
from tests.vllm.bench import Bench, in_all_modes, prompt, start
from tests.vllm.driven import Engine
from tests.vllm.fake_runner import DEVICE_TOKENS, TOKENS
from tests.vllm.plans import chunked, copiers, full, group, model_folder, sliding
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

WINDOW = 11  # tokens; a block of ours and a little more
CHUNK = 24
Groups = Sequence[KVCacheGroupSpec]

small: dict[str, Any] = {"block_size": DEVICE_TOKENS}
window: dict[str, Any] = {"sliding_window": WINDOW}
KINDS: dict[str, dict[str, Any]] = {
    "sliding": {"groups": [group(sliding(**small, **window))]},
    "mixed": {
        "groups": [
            group(full(**small), 2),
            group(sliding(**small, **window), 2, first=2),
        ]
    },
    "two-windows": {
        "groups": [
            group(sliding(**small, **window), 2),
            group(sliding(**small, sliding_window=20), 2, first=2),
        ]
    },
    "block-sizes": {
        "groups": [
            group(full(block_size=2 * DEVICE_TOKENS), 2),
            group(sliding(**small, **window), 2, first=2),
        ],
    },
    "chunked": {
        "groups": [
            group(full(**small), 2),
            group(chunked(**small, attention_chunk_size=CHUNK), 2, first=2),
        ]
    },
}
ANY_KIND = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with start(model_folder(tmp_path), 400) as made:
        yield made


def loadable(tokens: int, kind: str) -> int:
    """Of a prompt whose every block is cached: device blocks before its last token."""
    step: int = max(each.kv_cache_spec.block_size for each in KINDS[kind]["groups"])
    return min(tokens // TOKENS * TOKENS, (tokens - 1) // step * step)


@ANY_KIND
@in_all_modes
def test_every_complete_block_is_saved_whole_and_found_again(
    bench: Bench, kind: str, asynchronous: bool, drafts: int
) -> None:
    """101 prompt tokens, in steps of 32, and 30 sampled: the KV of 130 exist, 16 blocks of 8."""
    engine = bench.engine(asynchronous=asynchronous, drafts=drafts, **KINDS[kind])
    hits = _hits(engine)
    tokens = prompt(1, 101)
    engine.serve("a", tokens, 30)
    keys = engine.half._math.keys(engine.requests["a"], 0, 16)
    saved = {key[-32:] for key in bench.saved_keys()}
    assert saved <= set(keys)
    assert bench.check_saved_bytes(engine) == len(saved)
    # Drafts may carry a request across the end of a chunk before its last token is known.
    assert set(keys) == saved or (kind == "chunked" and drafts)
    for length in (101, 96, 25, 72):
        engine.forget_device()
        engine.runner.soil()
        name = f"again-{length}"
        engine.serve(name, tokens[:length], 3)
        assert hits[name] == loadable(length, kind)


@ANY_KIND
def test_a_load_continues_what_the_device_has(bench: Bench, kind: str) -> None:
    """The device has the first 40 tokens; what of them is out of reach it has let go."""
    engine = bench.engine(**KINDS[kind])
    hits = _hits(engine)
    tokens = prompt(1, 150)
    engine.serve("a", tokens, 2)
    engine.forget_device()
    engine.runner.soil()
    engine.serve("short", tokens[:41], 2)
    engine.serve("long", tokens, 2)
    assert hits["long"] == loadable(150, kind)
    assert engine.runner.loaded_tokens["long"] <= loadable(150, kind) - 32


@ANY_KIND
def test_a_window_is_loaded_and_no_more(bench: Bench, kind: str) -> None:
    engine = bench.engine(**KINDS[kind])
    tokens = prompt(1, 150)
    engine.serve("a", tokens, 2)
    engine.forget_device()
    engine.runner.soil()
    loads = _planned_loads(engine)
    engine.serve("b", tokens, 2)
    (load,) = loads
    end = loadable(150, kind)
    wanted = 0
    for each in engine.runner.groups:
        size = each.block_size
        wanted += end // size - each.reach.first_needed(end) // size
    assert sum(block != 0 for block in load.device_blocks) == wanted


@ANY_KIND
def test_failed_loads_are_computed_instead(
    bench: Bench, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bench.engine(**KINDS[kind])
    hits = _hits(engine)
    tokens = prompt(1, 60)
    engine.serve("a", tokens, 2)
    engine.forget_device()
    engine.runner.soil()
    copier: Any = copiers(engine.runner.half)[-1]

    def broken(device_blocks: Any, rows: Any) -> None:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(copier, "copy_to_device", broken)
        engine.serve("b", tokens, 2)
    assert bench.counters()["kvstrata_failed_loads_total"] == 1
    engine.forget_device()
    engine.runner.soil()
    engine.serve("c", tokens, 2)
    assert hits["c"] == loadable(60, kind)


@ANY_KIND
def test_what_has_left_a_window_is_not_saved(bench: Bench, kind: str) -> None:
    """Without a server the beginning of a prompt is computed; when it comes the pages are gone."""
    engine = bench.engine(**KINDS[kind])
    hits = _hits(engine)
    saves = engine.half._saves
    saves._held._limit = engine.half._math.ratio  # of the four blocks of a step one is held
    tokens = prompt(1, 150)
    engine.serve("a", tokens, 2)
    saves._held._limit = 4096
    saved = {key[-32:] for key in bench.saved_keys()}
    keys = engine.half._math.keys(engine.requests["a"], 0, 18)
    assert keys[0] in saved
    assert keys[2] not in saved
    assert bench.check_saved_bytes(engine) == len(saved)
    engine.forget_device()
    engine.runner.soil()
    engine.serve("b", tokens, 2)  # from the blocks before the first gap; and what lacked is saved
    engine.forget_device()
    engine.runner.soil()
    engine.serve("c", tokens, 2)
    assert hits["c"] == loadable(150, kind)


@ANY_KIND
@in_all_modes
@pytest.mark.parametrize("seed", range(2))
def test_any_traffic_gives_right_tokens_from_right_pages(
    bench: Bench, kind: str, asynchronous: bool, drafts: int, seed: int
) -> None:
    """Preemption, aborts and resets of the device cache among requests that share beginnings."""
    rng = random.Random(seed)
    engine = bench.engine(asynchronous=asynchronous, drafts=drafts, num_blocks=100, **KINDS[kind])
    serve_any_traffic(bench, engine, rng, asynchronous=asynchronous)


@ANY_KIND
def test_the_device_cache_is_asked_for_every_group(bench: Bench, kind: str) -> None:
    """What vLLM itself finds of a prompt the probe says, too, as the cache is reused in vLLM's order."""
    engine = bench.engine(**KINDS[kind])
    engine.half._saves._held._limit = 0  # or blocks would be free in the order in which saves end
    tokens = prompt(1, 150)
    engine.serve("a", tokens, 2)
    find = engine.scheduler.kv_cache_manager.coordinator.find_longest_cache_hit
    found, wrong = list[int](), list[tuple[int, int]]()
    for block in engine.pool.free_block_queue.get_all_free_blocks():
        for length in (33, 100, 150):
            request = _request(engine, tokens[:length])
            _, hit, _ = find(request.block_hashes, length)
            probe = engine.half._math.cached_on_device(request, engine.pool)
            found.append(hit)
            if abs(probe - hit) >= TOKENS:
                wrong.append((probe, hit))
        engine.pool.evict_blocks({block.block_id})
    assert {0, 144} <= {hit // TOKENS * TOKENS for hit in found}
    assert wrong == []


def _request(engine: Engine, tokens: list[int]) -> Any:
    """A request that only has its block hashes."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    size = engine.half._math.hash_tokens
    hasher = get_request_block_hasher(size, sha256)
    return Request(
        f"p{len(tokens)}", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher
    )


def _hits(engine: Engine) -> dict[str, int]:
    """By request, filled with the tokens that need not be computed, as vLLM was told last."""
    hits: dict[str, int] = {}
    match = engine.half.match

    def noted(request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        tokens, is_async = match(request, computed_tokens)
        hits[request.request_id] = computed_tokens + (tokens or 0)
        return tokens, is_async

    engine.half.match = noted  # type: ignore[method-assign]  # a spy
    return hits


def _planned_loads(engine: Engine) -> list[Any]:
    """Filled with the loads that the scheduler half plans."""
    loads: list[Any] = []
    take = engine.half._loads.take_plans

    def taken() -> list[Any]:
        plans = take()
        loads.extend(plans)
        return plans

    engine.half._loads.take_plans = taken  # type: ignore[method-assign]  # a spy
    return loads
