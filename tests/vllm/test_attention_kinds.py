"""Real vLLM on models with windows and chunks: right tokens, and what is reused, by kind of model."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from tests.vllm.engine import (
    BLOCK_SIZE,
    MAX_TOKENS,
    Act,
    Ask,
    Engine,
    embedded_report,
    report_at_rest,
    transfer_config,
    wait_for_worker,
)
from tests.vllm.oracle import Oracle, ReuseModel, random_prompt, random_prompts
from tests.vllm.tiny_llama4 import write_tiny_llama4

from kvstrata.integration.vllm.tiny_model import TinyLlama, write_tiny_llama

pytestmark = pytest.mark.vllm

WINDOW = 100  # less than a prompt and than the tokens of a step, no multiple of a block
CHUNK = 192  # likewise, but for blocks of ours, which must divide it
TOKENS_PER_BLOCK = 64


@dataclass(frozen=True)
class Kind:
    write: Callable[[Path], Path]
    device_blocks: int
    groups: int
    parts_chunks: bool = False  # from full attention, which vLLM does only when told to


KINDS = {
    "sliding": Kind(
        partial(write_tiny_llama, model=TinyLlama(dtype="float32", window=WINDOW)), 56, groups=1
    ),
    "mixed": Kind(
        partial(write_tiny_llama, model=TinyLlama(dtype="float32", window=WINDOW, full_layers=1)),
        96,
        groups=4,
    ),
    "chunked": Kind(partial(write_tiny_llama4, chunk=CHUNK), 96, groups=4, parts_chunks=True),
    "chunked-in-one-group": Kind(partial(write_tiny_llama4, chunk=CHUNK), 56, groups=1),
}


@dataclass
class Subject:
    engine: Engine
    oracle: Oracle
    name: str


@pytest.fixture(scope="module", params=KINDS)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    kind = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    path = kind.write(folder / "model")
    name = f"{folder.name}-{random.randrange(1 << 30)}"
    transfer = transfer_config(name, TOKENS_PER_BLOCK, tiers="host:256MiB")
    settings = {"num_gpu_blocks_override": kind.device_blocks}
    alone = settings | {"enable_prefix_caching": False}
    told = {"VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": str(int(kind.parts_chunks))}
    with (
        Engine(path, folder / "alone.log", settings=alone, environment=told) as oracle,
        Engine(path, folder / "vllm.log", transfer, settings, environment=told) as engine,
    ):
        engine.wait_ready()
        wait_for_worker(name)
        (namespace,) = embedded_report(name).namespaces
        assert len(namespace.parts["device_block_tokens"].split(",")) == kind.groups
        yield Subject(engine, Oracle(oracle), name)


def test_what_is_reused_is_all_but_the_block_of_the_last_token(subject: Subject) -> None:
    """Prompts longer than a step, and hits longer than the window."""
    rng = random.Random(20261122)
    prompts = random_prompts(rng, 14, most_tokens=MAX_TOKENS - 8)
    prompts += [random_prompt(rng, 640), random_prompt(rng, 1300)]
    prompts += rng.sample(prompts, 4)  # the very same again
    prompts += [prompts[14]]  # full to the last token: its last device block is computed again
    asks = [Ask(f"one-{i}", prompt, rng.randrange(1, 9)) for i, prompt in enumerate(prompts)]
    model = ReuseModel(TOKENS_PER_BLOCK)
    longest = 0
    for ask in asks:
        subject.engine.reset_prefix_cache()
        expected = min(model.reusable(ask.prompt), _all_but_the_last(ask.prompt))
        answers = subject.engine.run([ask])
        subject.oracle.check([ask], answers)
        assert answers[ask.id].cached_tokens == expected, f"{ask.id}: {len(ask.prompt)} tokens"
        model.answered(ask.prompt, answers[ask.id])
        longest = max(longest, expected)
    assert longest > 5 * WINDOW


def test_blocks_that_decoding_completes_are_saved(subject: Subject) -> None:
    prompt = random_prompt(random.Random(5), 90)
    first = Ask("first", prompt, 3 * TOKENS_PER_BLOCK)
    subject.engine.reset_prefix_cache()
    answer = subject.engine.run([first])["first"]
    subject.oracle.check([first], {"first": answer})
    subject.engine.reset_prefix_cache()
    second = Ask("second", (*prompt, *answer.tokens, 7), 4)
    answers = subject.engine.run([second])
    subject.oracle.check([second], answers)
    assert answers["second"].cached_tokens == 4 * TOKENS_PER_BLOCK


def test_a_load_goes_on_from_what_the_device_still_has(subject: Subject) -> None:
    """Two prompts with a beginning in common: the second adds blocks of ours to those of vLLM."""
    rng = random.Random(6)
    common, one, other = random_prompt(rng, 320), random_prompt(rng, 300), random_prompt(rng, 300)
    subject.engine.reset_prefix_cache()
    for i, prompt in enumerate([common + one, common + other]):
        ask = Ask(f"fill-{i}", prompt, 4)
        subject.oracle.check([ask], subject.engine.run([ask]))
    subject.engine.reset_prefix_cache()
    for i, prompt in enumerate([common, common + one, common + other]):
        ask = Ask(f"on-{i}", prompt, 4)
        answers = subject.engine.run([ask])
        subject.oracle.check([ask], answers)
        found = len(prompt) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
        assert answers[ask.id].cached_tokens == min(found, _all_but_the_last(prompt))


def test_all_at_once_with_preemption_aborts_and_resets(subject: Subject) -> None:
    rng = random.Random(1)
    prompts = random_prompts(rng, 40, most_tokens=700, documents=5)
    prompts += [random_prompt(rng, MAX_TOKENS - 40)]
    prompts += rng.sample(prompts, 12)
    rng.shuffle(prompts)
    asks = [
        Ask(f"all-{i}", prompt, rng.randrange(1, 40), at_step=rng.randrange(160))
        for i, prompt in enumerate(prompts)
    ]
    aborts = {ask.id: ask.at_step + rng.randrange(20) for ask in rng.sample(asks, 6)}
    acts = [Act("abort", id, at_step) for id, at_step in aborts.items()]
    acts += [Act("reset", at_step=rng.randrange(160)) for _ in range(8)]
    acts += [Act("reset", "running", at_step=rng.randrange(160)) for _ in range(3)]
    subject.engine.reset_prefix_cache()
    before = subject.engine.counters()["vllm:num_preemptions"]
    answers = subject.engine.run([*asks, *acts])
    subject.oracle.check(asks, answers, aborted=aborts)
    assert subject.engine.counters()["vllm:num_preemptions"] > before
    subject.engine.reset_prefix_cache()  # is refused while a device block is held
    report = report_at_rest(subject.name)
    assert report.counters["kvstrata_loaded_blocks_total"] > 0
    assert report.counters["kvstrata_failed_loads_total"] == 0


def _all_but_the_last(prompt: tuple[int, ...]) -> int:
    return (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
