"""Blended requests whose answers are drafted from the words of the prompt (speculative decoding)."""

from pathlib import Path

import pytest
from tests.vllm.blended import blending, whole_blocks
from tests.vllm.engine import EngineFailed
from tests.vllm.oracle import Oracle

pytestmark = pytest.mark.vllm

NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}


def test_drafts_change_no_answer(tiny_llama: Path, oracle: Oracle, tmp_path: Path) -> None:
    settings = {"speculative_config": NGRAMS}
    with blending(tiny_llama, oracle, tmp_path, settings) as subject:
        prompts = [subject.prompt(2, 0) + subject.text(20) * 3 for _ in range(2)]
        exact = subject.ask(prompts[0], {"ratio": 1.0}, tokens=60)
        other = subject.ask(prompts[1], True, tokens=60)
        answers = subject.run([exact, other])
        oracle.check([exact], answers)
        for ask in (exact, other):
            assert answers[ask.id].cached_tokens == whole_blocks(ask.prompt)
            assert len(answers[ask.id].tokens) == 60
        assert subject.count("requests_total", "blended") == 2
        for prompt in prompts:  # of what they have computed nobody finds anything
            found = subject.exact(prompt).cached_tokens
            assert found <= len(subject.system + subject.documents[2])
        counters = subject.engine.counters()
    drafted, accepted = (
        counters[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted")
    )
    assert 0 < accepted < drafted


def test_a_draft_model_stops_the_engine_with_the_reason(
    tiny_llama: Path, oracle: Oracle, tmp_path: Path
) -> None:
    drafts = {"method": "draft_model", "model": str(tiny_llama), "num_speculative_tokens": 2}
    with (
        pytest.raises(EngineFailed, match="the method of speculative_config is 'draft_model'"),
        blending(tiny_llama, oracle, tmp_path, {"speculative_config": drafts}),
    ):
        pass
