"""Blended requests of models whose attention does not reach everything, or whose KV is not exact."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.machines import is_nightly
from tests.vllm.blended import BLOCK_TOKENS, Subject, blending, is_exact, whole_blocks
from tests.vllm.engine import (
    MAX_TOKENS,
    TWO_WORKERS,
    Act,
    Ask,
    Engine,
    bound_to_cores,
    report_at_rest,
)
from tests.vllm.oracle import Oracle

from kvstrata.integration.vllm.tiny_model import TinyLlama, write_tiny_llama

pytestmark = pytest.mark.vllm

LAYERS = 4
WINDOW = 100  # less than a document and than the tokens of a step, no multiple of a block


@dataclass(frozen=True)
class Kind:
    model: TinyLlama
    settings: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)


GATHERED = {"blend_attention": "gathered"}

KINDS = {
    # A prompt has device blocks for what is in its last window, and as many again while it is blended.
    "sliding": Kind(TinyLlama(dtype="float32", window=WINDOW), {"num_gpu_blocks_override": 64}),
    "mixed": Kind(
        TinyLlama(dtype="float32", window=WINDOW, full_layers=1),
        {"disable_hybrid_kv_cache_manager": True},
    ),
    "fp8": Kind(TinyLlama(dtype="float32"), {"kv_cache_dtype": "fp8"}),
    "gathered": Kind(TinyLlama(dtype="float32"), {}, GATHERED),
    "gathered-sliding": Kind(
        TinyLlama(dtype="float32", window=WINDOW), {"num_gpu_blocks_override": 64}, GATHERED
    ),
    "gathered-mixed": Kind(
        TinyLlama(dtype="float32", window=WINDOW, full_layers=1),
        {"disable_hybrid_kv_cache_manager": True, **TWO_WORKERS},
        GATHERED,
    ),
    "fp8-e5m2": Kind(TinyLlama(dtype="float32"), {"kv_cache_dtype": "fp8_e5m2"}),
}


@pytest.fixture(
    scope="module", params=KINDS if is_nightly() else ["sliding", "gathered-sliding", "fp8"]
)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    kind = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    path = write_tiny_llama(folder / "model", kind.model)
    alone = kind.settings | {"enable_prefix_caching": False}
    environment = bound_to_cores(kind.settings.get("tensor_parallel_size", 1))
    with (
        Engine(path, folder / "alone.log", settings=alone, environment=environment) as oracle,
        blending(path, Oracle(oracle), folder, kind.settings, environment, kind.extra) as made,
    ):
        yield made


of_sliding = pytest.mark.parametrize("subject", ["sliding", "gathered-sliding"], indirect=True)


def test_everything_computed_anew_is_what_vllm_alone_answers(subject: Subject) -> None:
    """Behind an exact prefix that is longer than the window, and one that is shorter.

    It is loaded, or found on the device, or both.
    """
    for documents in ((0, 2), (2, 0, 1)):
        for state in ("loaded", "on the device"):
            prompt = subject.prompt(*documents)
            if state == "on the device":
                subject.exact(subject.system + subject.documents[documents[0]] + subject.text(9))
            ask = subject.ask(prompt, {"ratio": 1.0})
            answers = subject.run([ask])
            subject.oracle.check([ask], answers)
            assert answers[ask.id].cached_tokens == whole_blocks(prompt), state
            subject.engine.reset_prefix_cache()


def test_documents_in_another_order_are_reused_and_nobody_else_sees_it(subject: Subject) -> None:
    prompt = subject.prompt(3, 2)
    before = subject.reused_tokens()
    assert subject.one(prompt, True).cached_tokens == whole_blocks(prompt)
    documents = sum(len(subject.documents[d]) for d in (3, 2))
    # The first is an exact prefix but for what is behind its last whole block.
    assert documents // 3 < subject.reused_tokens() - before < documents
    found = subject.exact(prompt).cached_tokens  # of the device's cache, and of ours
    assert found == len(subject.system + subject.documents[3]) // BLOCK_TOKENS * BLOCK_TOKENS
    subject.engine.reset_prefix_cache()
    whole = len(prompt) // 64 * 64
    assert subject.exact(prompt).cached_tokens == min(whole, whole_blocks(prompt))


@of_sliding
def test_tokens_that_no_approximate_one_reaches_are_exact(subject: Subject) -> None:
    """The end of the prompt is in no run, and longer than what all layers reach back over."""
    prompt = subject.system + subject.documents[1] + subject.documents[2]
    prompt += subject.text(LAYERS * WINDOW + 40)
    ask = subject.ask(prompt, {"ratio": 0.0})
    answers = subject.run([ask])
    assert answers[ask.id].cached_tokens == whole_blocks(prompt)
    subject.oracle.check([ask], answers)


def test_mixes_of_blended_exact_preempted_and_aborted_requests(subject: Subject) -> None:
    for _ in range(100 if is_nightly() else 1):
        asks, acts = subject.mix()
        answers = subject.run(asks, *acts)
        aborted = {act.what for act in acts if act.kind == "abort"}
        kept = [ask for ask in asks if ask.id not in aborted]
        exact = [ask for ask in kept if is_exact(ask)]
        subject.oracle.check(exact, {ask.id: answers[ask.id] for ask in exact})


def test_a_request_that_is_aborted_while_it_is_blended_leaves_nothing(subject: Subject) -> None:
    prompt = subject.system + subject.text(500) + subject.documents[3] + subject.text(20)
    ask = subject.ask(prompt, {"ratio": 0.0})
    assert ask.id not in subject.run([ask], Act("abort", ask.id, at_step=1))
    subject.engine.reset_prefix_cache()
    assert subject.exact(prompt).cached_tokens == len(subject.system)


def test_afterwards_nothing_is_held(subject: Subject) -> None:
    subject.engine.reset_prefix_cache()  # is refused while a device block is held
    report_at_rest(subject.engine.transfer["engine_id"])  # type: ignore[index]


@of_sliding
def test_a_prompt_that_has_no_room_while_it_is_blended_is_computed(subject: Subject) -> None:
    """Of 64 device blocks others have 28, which would be enough without the 45 for all of it."""
    before = subject.count("requests_total", "no_room")
    others = [Ask(f"other-{i}", subject.text(150), 60) for i in range(7)]
    documents = sum(subject.documents, ())
    prompt = subject.text(60) + documents + subject.text(MAX_TOKENS - len(documents) - 70)
    ask = replace(subject.ask(prompt, {"ratio": 0.0}), at_step=20)
    answers = subject.run([*others, ask])
    subject.oracle.check([ask, *others], answers)
    assert subject.count("requests_total", "no_room") == before + 1
