"""Greedy tokens and reused tokens of real vLLM with KVStrata, against vLLM alone and a model."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.vllm.engine import (
    BLOCK_SIZE,
    DEVICE_BLOCKS,
    MAX_TOKENS,
    Act,
    Ask,
    Engine,
    embedded_report,
    report_at_rest,
    transfer_config,
    wait_for_disk,
    wait_for_worker,
)
from tests.vllm.oracle import (
    Oracle,
    ReuseModel,
    loaded_at_once,
    random_prompt,
    random_prompts,
)

pytestmark = pytest.mark.vllm

DEVICE_TOKENS = DEVICE_BLOCKS * BLOCK_SIZE
NEW_TOKENS = 40  # at most; a running request grows by two device blocks


class Subject:
    """vLLM with KVStrata, and the block size that it was given."""

    def __init__(
        self, engine: Engine, name: str, tokens_per_block: int, *, disk: bool, at_once: bool
    ) -> None:
        self.engine = engine
        self.name = name
        self.tokens_per_block = tokens_per_block
        self.at_once = at_once  # requests run in the step that loads them
        self._disk = disk

    def settle(self) -> None:
        """Empty the device cache, after which all is saved; host memory may lose nothing then."""
        self.engine.reset_prefix_cache()
        if self._disk:
            wait_for_disk(self.name)

    def counters(self) -> dict[str, float]:
        """Those of vLLM and those of the server."""
        return self.engine.counters() | embedded_report(self.name).counters


@pytest.fixture(
    scope="module",
    params=[
        (1, "host:256MiB", "auto"),
        (4, "host:16MiB | disk:{}:1GiB", "auto"),
        (4, "host:16MiB | disk:{}:1GiB", "blockwise"),
    ],
    ids=["1x-host", "4x-disk", "4x-disk-blockwise"],
)
def subject(
    request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    times, tiers, load_mode = request.param
    folder = tmp_path_factory.mktemp("differential")
    name = f"{folder.name}-{times}-{random.randrange(1 << 30)}"
    transfer = transfer_config(
        name, times * BLOCK_SIZE, tiers=tiers.format(folder / "disk"), load_mode=load_mode
    )
    with Engine(tiny_llama, folder / "vllm.log", transfer, is_split=times == 1) as engine:
        engine.wait_ready()
        wait_for_worker(name)
        tokens, at_once = times * BLOCK_SIZE, load_mode == "auto"
        yield Subject(engine, name, tokens, disk="disk" in tiers, at_once=at_once)


def test_one_by_one_every_request_reuses_exactly_what_the_model_says(
    subject: Subject, oracle: Oracle
) -> None:
    rng = random.Random(20261120 + subject.tokens_per_block)
    prompts = random_prompts(rng, 20, most_tokens=MAX_TOKENS - 8)
    prompts += rng.sample(prompts, 6)  # the very same again
    prompts += [random_prompt(rng, MAX_TOKENS - 8), random_prompt(rng, 128)]
    prompts += prompts[-2:]  # blocks are full to the last token: nothing is left to compute
    asks = [Ask(f"one-{i}", prompt, rng.randrange(1, 9)) for i, prompt in enumerate(prompts)]
    model = ReuseModel(subject.tokens_per_block)
    reused = 0
    for ask in asks:
        subject.settle()
        expected = model.reusable(ask.prompt)
        if subject.at_once:
            expected = loaded_at_once(len(ask.prompt), expected)
        answers = subject.engine.run([ask])
        oracle.check([ask], answers)
        assert answers[ask.id].cached_tokens == expected, f"{ask.id}: {len(ask.prompt)} tokens"
        model.answered(ask.prompt, answers[ask.id])
        reused += expected
    assert reused > 2 * DEVICE_TOKENS


def test_a_continuation_finds_the_tokens_that_were_generated(
    subject: Subject, oracle: Oracle
) -> None:
    step = subject.tokens_per_block
    prompt = random_prompt(random.Random(5), step // 2)
    first = Ask("first", prompt, 2 * step)
    subject.settle()
    answer = subject.engine.run([first])["first"]
    oracle.check([first], {"first": answer})
    subject.settle()
    second = Ask("second", (*prompt, *answer.tokens, 7), 4)
    answers = subject.engine.run([second])
    oracle.check([second], answers)
    assert answers["second"].cached_tokens == 2 * step  # of 2.5 blocks that had keys and values


@pytest.mark.parametrize("seed", range(3))
def test_all_at_once_with_preemption_aborts_and_resets(
    subject: Subject, oracle: Oracle, seed: int
) -> None:
    rng = random.Random(seed)
    prompts = random_prompts(rng, 70, most_tokens=700, documents=6)
    prompts += [random_prompt(rng, MAX_TOKENS - NEW_TOKENS) for _ in range(2)]
    prompts += rng.sample(prompts, 20)
    rng.shuffle(prompts)
    assert len(set(prompts)) > 60
    asks = [
        Ask(f"all-{i}", prompt, rng.randrange(1, NEW_TOKENS), at_step=rng.randrange(300))
        for i, prompt in enumerate(prompts)
    ]
    assert _unshared_tokens(prompts) > 3 * DEVICE_TOKENS
    aborts = {ask.id: ask.at_step + rng.randrange(20) for ask in rng.sample(asks, 10)}
    acts = [Act("abort", id, at_step) for id, at_step in aborts.items()]
    acts += [Act("reset", at_step=rng.randrange(300)) for _ in range(10)]
    acts += [Act("reset", "running", at_step=rng.randrange(300)) for _ in range(3)]
    acts += [Act("reset", "connector", at_step=rng.randrange(300))]
    subject.settle()
    before = subject.counters()
    answers = subject.engine.run([*asks, *acts])
    after = subject.counters()
    oracle.check(asks, answers, aborted=aborts)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown["vllm:num_preemptions"] > 0
    # vLLM's own counter of external hits leaves out requests that were preempted.
    assert grown["kvstrata_loaded_blocks_total"] > 0
    assert after["kvstrata_failed_loads_total"] == 0
    assert after["kvstrata_corrupt_blocks_total"] == 0


def test_after_a_reset_of_the_connector_nothing_of_before_is_found(
    subject: Subject, oracle: Oracle
) -> None:
    asks = [Ask(f"epoch-{i}", random_prompt(random.Random(31000 + i), 700), 4) for i in range(3)]
    full = 700 // subject.tokens_per_block * subject.tokens_per_block
    for expected in (0, full):
        for ask in asks:
            subject.settle()
            answers = subject.engine.run([ask])
            oracle.check([ask], answers)
            assert answers[ask.id].cached_tokens == expected
    subject.engine.reset_prefix_cache(connector=True)
    for expected in (0, full):
        for ask in asks:
            subject.settle()
            answers = subject.engine.run([ask])
            oracle.check([ask], answers)
            assert answers[ask.id].cached_tokens == expected


def test_afterwards_nothing_is_held(subject: Subject, oracle: Oracle) -> None:
    """Leases, reserved slots and device blocks all come back, whatever was aborted."""
    rng = random.Random(77)
    asks = [Ask(f"held-{i}", random_prompt(rng, 500), 20, at_step=i) for i in range(12)]
    acts = [Act("abort", ask.id, at_step=ask.at_step + i % 6) for i, ask in enumerate(asks)]
    answers = subject.engine.run([*asks, *acts])
    oracle.check(asks, answers, aborted={ask.id for ask in asks})
    subject.settle()  # is refused while a device block is held
    whole_cache = Ask("whole", random_prompt(rng, MAX_TOKENS - 4), 4)
    oracle.check([whole_cache], subject.engine.run([whole_cache]))
    subject.settle()
    report = report_at_rest(subject.name)
    assert report.tiers[0].used_blocks == sum(each.host_blocks for each in report.namespaces)


def _unshared_tokens(prompts: list[tuple[int, ...]]) -> int:
    """Device memory, in tokens, that all *prompts* would take at once, shared blocks counted once."""
    model = ReuseModel(BLOCK_SIZE)
    total = 0
    for prompt in prompts:
        total += len(prompt) - model.reusable(prompt)
        model.computed(prompt)
    return total
