"""A real DeepSeek, of one worker and of two: what it computes on loaded latents is, bit by bit, what it
computes on those of its own prefix cache.

On processors with AMX: without it vLLM's CPU build goes on from no latents that it did not compute in
the same step, and such an engine is refused (``test_refused_models``).
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from tests.vllm.engine import (
    LOGITS,
    TWO_WORKERS,
    Answer,
    Ask,
    Engine,
    bound_to_cores,
    report_at_rest,
    transfer_config,
    wait_for_worker,
)
from tests.vllm.oracle import random_prompt
from tests.vllm.tiny_deepseek import LATENT, LAYERS, with_amx, write_deepseek

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.alone,  # two workers take turns from all others
    with_amx,
]

BLOCK_TOKENS = 32
TOKENS_PER_BLOCK = 2 * BLOCK_TOKENS
SETTINGS = {"dtype": "bfloat16", "block_size": BLOCK_TOKENS, "max_num_batched_tokens": 256}
FAR = 1.0  # of logits with a deviation of 1.2: vLLM's own, of a hit and of a miss, are up to 0.05 apart


@dataclass
class Subject:
    engine: Engine
    name: str
    asked: int = 0

    def ask(self, prompt: Sequence[int]) -> Answer:
        self.asked += 1
        one = Ask(f"one-{self.asked}", tuple(prompt), 4, logits=True)
        answer = self.engine.run([one])[one.id]
        report_at_rest(self.name)
        return answer


@pytest.fixture(scope="module", params=[1, 2])
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    workers: int = request.param
    folder = tmp_path_factory.mktemp("latents")
    write_deepseek(folder / "model")
    name = f"latents-{random.randrange(1 << 30)}"
    transfer = transfer_config(name, TOKENS_PER_BLOCK, tiers="host:64MiB")
    settings = SETTINGS | LOGITS | (TWO_WORKERS if workers > 1 else {})
    environment = bound_to_cores(workers)
    with Engine(
        folder / "model", folder / "log", transfer, settings, environment=environment
    ) as engine:
        engine.wait_ready()
        wait_for_worker(name, workers=workers)
        yield Subject(engine, name)


@pytest.mark.parametrize("length", [TOKENS_PER_BLOCK + 1, 140, 270, 660])
def test_loaded_answers_as_a_hit_of_vllms_own_cache_bit_by_bit(
    subject: Subject, length: int
) -> None:
    prompt = random_prompt(random.Random(length), length)
    computed = subject.ask(prompt)
    hit = subject.ask(prompt)
    end = (length - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    assert (computed.cached_tokens, hit.cached_tokens) == (0, end)
    subject.engine.reset_prefix_cache()
    loaded = subject.ask(prompt)
    assert loaded.cached_tokens == end
    assert loaded.logits == hit.logits


def test_other_latents_give_other_logits(subject: Subject) -> None:
    """Else the test above would show nothing."""
    rng = random.Random(1)
    last = random_prompt(rng, 20)
    prompts = [(*random_prompt(rng, 256), *last) for _ in range(2)]
    for prompt in prompts:
        subject.ask(prompt)
    subject.engine.reset_prefix_cache()
    one, other = (subject.ask(prompt) for prompt in prompts)
    assert one.cached_tokens == other.cached_tokens == 256
    assert far(one, other) > FAR


def test_latents_are_kept_once_however_many_workers_hold_them(subject: Subject) -> None:
    subject.ask(random_prompt(random.Random(2), 100))
    (host,) = report_at_rest(subject.name).tiers
    assert host.block_bytes == LAYERS * TOKENS_PER_BLOCK * LATENT * 2


def far(one: Answer, other: Answer) -> float:
    """How far the logits of the first token are apart, at most."""
    return float(np.abs(np.array(one.logits[0]) - np.array(other.logits[0])).max())
