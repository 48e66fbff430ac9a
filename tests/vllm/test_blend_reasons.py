"""Why a request is not blended, as it is counted, by vLLM's own scheduler and a real server."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.caches import eventually
from tests.vllm.bench import Bench, prompt, start
from tests.vllm.driven import Engine
from tests.vllm.fake_runner import TOKENS
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

from kvstrata.integration.vllm.blend.connector import BlendConnector

TEXT = prompt(1, 10 * TOKENS)
MOVED = [7, *TEXT, 7]  # by one token
ASKED = {"blend": {"ratio": 0}}
SETTINGS = {
    "connector": BlendConnector,
    "blend_chunk_size": 2 * TOKENS,
    "blend_min_saved_tokens": 40,
    "blend_min_saved_share": 0.5,
}
IMAGE = MultiModalFeatureSpec(None, "image", "x", PlaceholderRange(offset=3, length=9))


def counting(engine: Engine) -> Counter[str]:
    """What became of requests, by its reason, as vLLM is told of it."""
    results: Counter[str] = Counter()
    inner: Any = engine.half.take_stats

    def take_stats() -> Any:
        if (found := inner()) is not None:
            for name, count in found.data["counters"].items():
                metric, _, result = name.partition("|")
                if metric == "kvstrata_blend_requests_total":
                    results[result] += count
        return found

    engine.half.take_stats = take_stats  # type: ignore[method-assign]  # a spy
    return results


def allow_images(engine: Engine) -> None:
    """What an encoder gives is no matter here."""
    scheduler: Any = engine.scheduler
    scheduler.max_num_encoder_input_tokens = len(MOVED)
    scheduler.encoder_cache_manager = EncoderCacheManager(len(MOVED))


def ask(engine: Engine, tokens: list[int], transfer: dict[str, Any], **kind: Any) -> None:
    engine.add("asked", tokens, 2, transfer, **kind)
    engine.run()
    engine.half.take_stats()


@pytest.mark.parametrize(
    ("reason", "tokens", "transfer", "kind"),
    [
        ("not_asked", MOVED, {"blend": False}, {}),
        ("not_understood", MOVED, {"blend": "perhaps"}, {}),
        ("adapter", MOVED, ASKED, {"lora_request": LoRARequest("a", 1, "/nowhere")}),
        ("images", MOVED, ASKED, {"mm_features": [IMAGE]}),
        ("embeddings", MOVED, ASKED, {"prompt_embeds": torch.zeros(len(MOVED), 8)}),
        ("prompt_logprobs", MOVED, ASKED, {"sampling": {"prompt_logprobs": 1}}),
        ("tainted", MOVED, ASKED | {"taint_from": TOKENS}, {}),
        ("no_run", prompt(2, len(MOVED)), ASKED, {}),
        ("few_tokens", [7, *TEXT[:32], 7], ASKED, {}),
        ("small_share", MOVED + prompt(3, 2 * len(MOVED)), ASKED, {}),
    ],
)
def test_a_reason_is_counted(
    bench: Bench,
    reason: str,
    tokens: list[int],
    transfer: dict[str, Any],
    kind: dict[str, Any],
) -> None:
    engine = bench.engine(**SETTINGS)
    allow_images(engine)
    engine.serve("known", TEXT, 2)
    bench.hears()
    engine.forget_device()
    engine.half.take_stats()
    results = counting(engine)
    ask(engine, tokens, transfer, **kind)
    assert results == {reason: 1}


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        ({}, len(TEXT)),
        ({"lora_request": LoRARequest("a", 1, "/nowhere")}, 0),
        ({"mm_features": [IMAGE]}, 0),
    ],
    ids=["plain", "adapter", "images"],
)
def test_what_depends_on_more_than_tokens_is_learned_by_nobody(
    bench: Bench, kind: dict[str, Any], tokens: int
) -> None:
    engine = bench.engine(**SETTINGS)
    allow_images(engine)
    engine.add("known", TEXT, 2, **kind)
    engine.run()
    assert bench.saved_keys()
    half: Any = engine.half
    asked = Request("asked", MOVED, SamplingParams(max_tokens=1), None)
    assert half._learning.runs(asked, half._namespace, 0).tokens == tokens


def is_alone(engine: Engine) -> bool:
    engine.half._link.tick()
    return not engine.half._link.ready


def test_a_server_that_is_gone_is_a_reason(folder: Path) -> None:
    with start(folder, 100) as server:
        engine = server.engine(**SETTINGS)
        server.engines.clear()
    try:
        eventually(partial(is_alone, engine), "the engine does not notice")
        results = counting(engine)
        ask(engine, MOVED, ASKED)
        assert results == {"no_server": 1}
    finally:
        engine.close()
