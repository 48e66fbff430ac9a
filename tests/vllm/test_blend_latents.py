"""Blended requests of a DeepSeek, whose cache keeps latents and one turned key (MLA).

On processors with AMX: without it vLLM's CPU build goes on from no latents.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.machines import is_nightly
from tests.vllm.blended import BLOCK_TOKENS, Prompt, Subject, blending, is_exact, whole_blocks
from tests.vllm.engine import (
    LOGITS,
    TWO_WORKERS,
    Answer,
    Ask,
    Engine,
    EngineFailed,
    bound_to_cores,
    report_at_rest,
)
from tests.vllm.oracle import Oracle
from tests.vllm.tiny_deepseek import with_amx, write_deepseek

pytestmark = [pytest.mark.vllm, with_amx]

SETTINGS = {"dtype": "bfloat16", **LOGITS}
NOBODY: Any = None
ROUNDING = 0.15  # of logits with a deviation of 1.2: what AMX rounds otherwise in another batch


@pytest.fixture(
    scope="module",
    params=[{}, pytest.param(TWO_WORKERS, marks=pytest.mark.alone)] if is_nightly() else [{}],
    ids=lambda settings: "two workers" if settings else "one",
)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    settings = SETTINGS | request.param
    folder = tmp_path_factory.mktemp("latents")
    write_deepseek(folder / "model")
    environment = bound_to_cores(settings.get("tensor_parallel_size", 1))
    alone = settings | {"enable_prefix_caching": False}
    with (
        Engine(
            folder / "model", folder / "alone.log", settings=alone, environment=environment
        ) as vllm,
        blending(folder / "model", Close(vllm), folder, settings, environment) as made,
    ):
        yield made


class Close(Oracle):
    """vLLM alone: the logits of its first token are those of an answer that has some, but for rounding."""

    def check(
        self, asks: Iterable[Ask], answers: Mapping[str, Answer], *, aborted: Iterable[str] = ()
    ) -> None:
        checked = [ask for ask in asks if ask.logits and ask.id not in aborted]
        alone = [replace(ask, id=f"alone-{ask.id}", at_step=0, transfer=None) for ask in checked]
        known = self._engine.run(alone) if alone else {}
        for ask in checked:
            assert far(answers[ask.id], known[f"alone-{ask.id}"]) < ROUNDING, ask.id


def far(one: Answer, other: Answer) -> float:
    """How far the logits of the first token are apart, at most."""
    return float(np.abs(np.array(one.logits[0]) - np.array(other.logits[0])).max())


def answered(subject: Subject, prompt: Prompt, blend: object) -> Answer:
    """With logits, checked against vLLM alone if nothing of it may be approximate."""
    ask = replace(subject.ask(prompt, blend), logits=True)
    answers = subject.run([ask])
    if is_exact(ask):
        subject.oracle.check([ask], answers)
    return answers[ask.id]


def test_everything_computed_anew_is_what_vllm_alone_answers(subject: Subject) -> None:
    for documents in ((0, 2), (2, 0, 1)):
        prompt = subject.prompt(*documents)
        answer = answered(subject, prompt, {"ratio": 1.0})
        assert answer.cached_tokens == whole_blocks(prompt)
        subject.engine.reset_prefix_cache()


def test_documents_in_another_order_are_reused_and_nobody_else_sees_it(subject: Subject) -> None:
    prompt = subject.prompt(3, 2)
    before = subject.reused_tokens()
    blended = answered(subject, prompt, {"ratio": 0.0})
    assert blended.cached_tokens == whole_blocks(prompt)
    documents = sum(len(subject.documents[d]) for d in (3, 2))
    # The first is an exact prefix but for what is behind its last whole block.
    assert documents // 3 < subject.reused_tokens() - before < documents
    exact = answered(subject, prompt, False)  # of the device's cache, and of ours
    assert exact.cached_tokens == len(subject.system + subject.documents[3]) // BLOCK_TOKENS * 32
    assert far(blended, exact) > 2 * ROUNDING  # else nothing here would show a difference


def test_what_is_computed_of_a_few_tokens_is_nearer_than_nothing(subject: Subject) -> None:
    """The chosen ones, by the attention that is paid to latents, and not just any."""
    apart = np.zeros(2)
    for first in range(4):
        prompt = subject.prompt(*((first + i) % 4 for i in (3, 2, 1)))
        answers = []
        for blend in ({"ratio": 0.0}, {"ratio": 0.3}, False):  # what is exact is found from then on
            answers.append(answered(subject, prompt, blend))
            subject.engine.reset_prefix_cache()
        *blended, exact = answers
        apart += [far(answer, exact) for answer in blended]
    assert apart[1] < apart[0]


def test_mixes_of_blended_exact_preempted_and_aborted_requests(subject: Subject) -> None:
    for _ in range(30 if is_nightly() else 1):
        asks, acts = subject.mix(logits=True)
        answers = subject.run(asks, *acts)
        aborted = {act.what for act in acts if act.kind == "abort"}
        subject.oracle.check(filter(is_exact, asks), answers, aborted=aborted)


def test_afterwards_nothing_is_held(subject: Subject) -> None:
    subject.engine.reset_prefix_cache()  # is refused while a device block is held
    report_at_rest(subject.engine.transfer["engine_id"])  # type: ignore[index]  # a mapping here


def test_a_model_whose_keys_vllm_turns_wrongly_is_refused(tmp_path: Path) -> None:
    write_deepseek(tmp_path / "model", is_scaled=False)
    with (
        pytest.raises(EngineFailed),
        blending(tmp_path / "model", NOBODY, tmp_path, SETTINGS),
    ):
        pass
    log = (tmp_path / "log").read_text()
    assert "the keys of layer model.layers.0.self_attn.attn are not those of the model" in log
