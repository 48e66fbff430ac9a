"""An engine of two workers that each hold half of the KV heads: exact reuse, and blending.

Its workers spin while they wait for each other, which on two cores takes turns from all others.
"""

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.vllm.blended import BLOCK_TOKENS, Subject, blending, whole_blocks
from tests.vllm.engine import (
    TWO_WORKERS,
    Act,
    Ask,
    Engine,
    bound_to_cores,
    report_at_rest,
    transfer_config,
    wait_for_worker,
)
from tests.vllm.oracle import (
    Oracle,
    ReuseModel,
    loaded_at_once,
    random_prompt,
    random_prompts,
)

pytestmark = [pytest.mark.vllm, pytest.mark.alone]

TOKENS_PER_BLOCK = 2 * BLOCK_TOKENS


@pytest.fixture(scope="module")
def subject(
    tiny_llama: Path, oracle: Oracle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    folder = tmp_path_factory.mktemp("tensor-parallel")
    audited = {"blend_audit_share": 1}
    with blending(tiny_llama, oracle, folder, TWO_WORKERS, bound_to_cores(2), audited) as made:
        yield made


def test_copies_are_not_bound_to_the_processors_that_compute(subject: Subject) -> None:
    subject.exact(random_prompt(subject.rng, 300))
    places = [places_of_threads(pid) for pid in subject.engine.process_ids()]
    workers = [each for each in places if len(each[0]) == 1]
    assert len(workers) == 2
    for each in workers:
        assert each.count(frozenset(os.sched_getaffinity(0))) == 1


def places_of_threads(pid: int) -> list[frozenset[int]]:
    """Processors of each thread of *pid*, its first one first."""
    places = []
    for thread in sorted(int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            places.append(frozenset(os.sched_getaffinity(thread)))
    return places


def test_what_both_workers_have_saved_is_found(subject: Subject) -> None:
    for prompt in random_prompts(subject.rng, 3, most_tokens=600):
        subject.exact(prompt)
        subject.engine.reset_prefix_cache()
        whole = len(prompt) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
        assert subject.exact(prompt).cached_tokens == whole
        subject.engine.reset_prefix_cache()


def test_preempted_and_aborted_requests_leave_right_answers(subject: Subject) -> None:
    rng = random.Random(subject.rng.random())
    prompts = random_prompts(rng, 12, most_tokens=600)
    asks = [
        Ask(f"traffic-{i}", prompt, rng.randrange(1, 30), at_step=rng.randrange(40))
        for i, prompt in enumerate(prompts)
    ]
    aborted = [ask.id for ask in rng.sample(asks, 3)]
    acts = [Act("abort", id, at_step=rng.randrange(50)) for id in aborted]
    acts += [Act("reset", "running", at_step=rng.randrange(50)) for _ in range(3)]
    subject.oracle.check(asks, subject.run(asks, *acts), aborted=aborted)


def test_blending_all_of_a_prompt_gives_what_vllm_alone_answers(subject: Subject) -> None:
    audits, divergence = subject.count("audits_total"), subject.count("audit_divergence_total")
    for documents in ((2, 0), (3, 1, 0)):
        ask = subject.ask(subject.prompt(*documents), {"ratio": 1.0})
        answers = subject.run([ask])
        subject.oracle.check([ask], answers)
        assert answers[ask.id].cached_tokens == whole_blocks(ask.prompt)
    assert subject.count("audits_total") == audits + 2
    assert subject.count("audit_divergence_total") < divergence + 1e-6


def test_exact_and_blended_requests_share_the_engine(subject: Subject) -> None:
    """The default rule scores over both workers (test_blend_worker.py has what it chooses then)."""
    asks = []
    for i in range(10):
        blend = [False, True, {"ratio": 1.0}, {"ratio": 0.3}, {"ratio": 0.0}][i % 5]
        ask = subject.ask(subject.prompt(i % 4, (i + 1) % 4), blend, tokens=6)
        asks.append(Ask(ask.id, ask.prompt, 6, at_step=5 * i, transfer=ask.transfer))
    answers = subject.run(asks, Act("abort", asks[6].id, 33), Act("reset", "running", 20))
    exact = [asks[i] for i in (0, 2, 5, 7)]
    subject.oracle.check(exact, {ask.id: answers[ask.id] for ask in exact})


def test_afterwards_nothing_is_held(subject: Subject) -> None:
    subject.engine.reset_prefix_cache()
    report_at_rest(subject.engine.transfer["engine_id"])  # type: ignore[index]


def test_the_connector_itself_loads_at_once_on_both_workers(
    tiny_llama: Path, oracle: Oracle, tmp_path: Path
) -> None:
    """``BlendConnector`` does not: its requests wait for what they load."""
    rng, reuse = random.Random(20261127), ReuseModel(TOKENS_PER_BLOCK)
    prompts = random_prompts(rng, 3, most_tokens=600)
    prompts.append(random_prompt(rng, 8 * TOKENS_PER_BLOCK))  # who waits loads it to its last token
    name = f"at-once-{random.randrange(1 << 30)}"
    transfer = transfer_config(name, TOKENS_PER_BLOCK, tiers="host:256MiB")
    log, environment = tmp_path / "vllm.log", bound_to_cores(2)
    with Engine(tiny_llama, log, transfer, TWO_WORKERS, environment=environment) as engine:
        engine.wait_ready()
        wait_for_worker(name, workers=2)
        for i, prompt in enumerate([*prompts, *prompts]):
            engine.reset_prefix_cache()
            ask = Ask(f"one-{i}", prompt)
            expected = loaded_at_once(len(prompt), reuse.reusable(prompt))
            answers = engine.run([ask])
            oracle.check([ask], answers)
            assert answers[ask.id].cached_tokens == expected, f"{ask.id}: {len(prompt)} tokens"
            reuse.answered(prompt, answers[ask.id])
        engine.reset_prefix_cache()
        asks = [Ask(f"many-{i}", each, 12, at_step=3 * i) for i, each in enumerate(2 * prompts)]
        oracle.check(asks, engine.run([*asks, Act("reset", "running", 10)]))
        report = report_at_rest(name)
    assert report.counters["kvstrata_failed_loads_total"] == 0
