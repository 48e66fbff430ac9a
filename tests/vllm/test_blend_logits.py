"""Logits of requests in an engine that blends, bit by bit beside those of vLLM alone.

vLLM alone computes each prompt whole, without a prefix cache, in steps of as many tokens. So it
computes other tokens in one step than the blended engine, which has the start of the prompt from
a cache, and in a step of its own what is behind the last whole block.

Requests come one at a time. Where a token is alone in its run of tokens, vLLM's attention on a CPU
may split its sums between threads, by what else is in the forward: tokens that are chosen here and
there are rounded otherwise for that, as those are that vLLM alone decodes beside other requests.
Both engines are told not to.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from tests.machines import is_nightly
from tests.vllm.blended import BLOCK_TOKENS, Prompt, Subject, blending, whole_blocks
from tests.vllm.engine import (
    LOGITS,
    ROUNDED_ALIKE,
    TWO_WORKERS,
    Answer,
    Ask,
    Engine,
    bound_to_cores,
)
from tests.vllm.oracle import VOCABULARY, Oracle

pytestmark = pytest.mark.vllm

NEW_TOKENS = 4
TOKENS_PER_BLOCK = 2 * BLOCK_TOKENS  # of KVStrata's
SAME = [0] * NEW_TOKENS

ALL = [
    f"{dtype}{workers}{mode}"
    for dtype in ("float32", "bfloat16")
    for workers in ("", "-two")
    for mode in ("", "-compiled")
]


@dataclass
class Pair:
    """The same model in an engine that blends and in one without a connector."""

    subject: Subject
    alone: Engine

    def blended(self, prompt: Prompt, blend: object) -> Answer:
        ask = replace(self.subject.ask(prompt, blend, NEW_TOKENS), logits=True)
        return self.subject.run([ask])[ask.id]

    def other_logits(self, prompt: Prompt, answer: Answer) -> list[int]:
        """Of each token of *answer*, how many logits are not those of vLLM alone, in any bit."""
        ask = Ask("whole", prompt, NEW_TOKENS, logits=True)
        right = self.alone.run([ask])[ask.id]
        different = bits(answer.logits) != bits(right.logits)
        return [int(each) for each in different.sum(1)]


def bits(logits: Sequence[Sequence[float]]) -> np.ndarray:
    numbers = np.array(logits, np.float32)
    assert numbers.shape == (NEW_TOKENS, VOCABULARY)
    return numbers.view(np.uint32)


@pytest.fixture(scope="module", params=ALL if is_nightly() else ["float32", "bfloat16-compiled"])
def pair(
    request: pytest.FixtureRequest,
    tiny_llama: Path,
    tiny_llama_bfloat16: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    dtype, *rest = request.param.split("-")
    model = tiny_llama if dtype == "float32" else tiny_llama_bfloat16
    settings = {"dtype": dtype, "enforce_eager": "compiled" not in rest, **LOGITS}
    if "two" in rest:
        settings |= TWO_WORKERS
    environment = bound_to_cores(2 if "two" in rest else 1) | ROUNDED_ALIKE
    folder = tmp_path_factory.mktemp(request.param)
    extra = {"blend_audit_share": 0, "blend_again": True}
    with ExitStack() as stack:
        whole = settings | {"enable_prefix_caching": False}
        alone = stack.enter_context(
            Engine(model, folder / "alone.log", settings=whole, environment=environment)
        )
        subject = stack.enter_context(
            blending(model, Oracle(alone), folder, settings, environment, extra)
        )
        yield Pair(subject, alone)


def test_everything_computed_anew_at_other_places_has_the_logits_of_a_whole_prefill(
    pair: Pair,
) -> None:
    subject = pair.subject
    nothing_exact = subject.text(5) + subject.prompt(1, 3)
    for prompt in (subject.prompt(2, 0), subject.prompt(3, 1, 0), nothing_exact):
        blended, reused = subject.count("requests_total", "blended"), subject.reused_tokens()
        answer = pair.blended(prompt, {"ratio": 1.0})
        assert pair.other_logits(prompt, answer) == SAME
        assert answer.cached_tokens == whole_blocks(prompt)
        assert subject.count("requests_total", "blended") == blended + 1
        assert subject.reused_tokens() >= reused + 2 * TOKENS_PER_BLOCK


def test_less_computed_anew_at_other_places_has_other_logits(pair: Pair) -> None:
    """So the model tells KV of another context."""
    prompt = pair.subject.prompt(3, 1, 0)
    answer = pair.blended(prompt, {"ratio": 0.3})
    assert answer.cached_tokens == whole_blocks(prompt)
    assert min(pair.other_logits(prompt, answer)) > VOCABULARY // 2


def test_a_blended_chunk_at_its_old_place_behind_the_same_tokens_has_the_logits_of_a_whole_prefill(
    pair: Pair,
) -> None:
    """The chunk was computed behind documents that were blended, which have exact KV since."""
    subject = pair.subject
    before = subject.prompt(2, 0)
    known = len(before) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    chunk = subject.text(4 * TOKENS_PER_BLOCK)
    answer = pair.blended(before + chunk, {"ratio": 1.0})
    assert pair.other_logits(before + chunk, answer) == SAME
    subject.exact(before)
    subject.engine.reset_prefix_cache()
    for ratio in (0.0, 0.3):
        prompt = before + chunk + subject.text(2 * BLOCK_TOKENS)
        reused = subject.reused_tokens()
        answer = pair.blended(prompt, {"ratio": ratio})
        assert pair.other_logits(prompt, answer) == SAME
        assert answer.transfer == {"taint_from": known}
        assert answer.cached_tokens == whole_blocks(prompt)
        assert subject.reused_tokens() == reused + len(chunk)


def test_a_prompt_that_is_reused_exactly_has_the_logits_of_a_whole_prefill(pair: Pair) -> None:
    subject = pair.subject
    prompt = subject.system + subject.text(301)
    computed = pair.blended(prompt, False)
    assert pair.other_logits(prompt, computed) == SAME
    assert computed.cached_tokens <= len(subject.system)
    subject.engine.reset_prefix_cache()
    blended, known = (subject.count("requests_total", each) for each in ("blended", "no_run"))
    answer = pair.blended(prompt, True)
    assert pair.other_logits(prompt, answer) == SAME
    assert answer.transfer is None
    assert answer.cached_tokens == len(prompt) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    assert subject.count("requests_total", "blended") == blended
    assert subject.count("requests_total", "no_run") == known + 1
