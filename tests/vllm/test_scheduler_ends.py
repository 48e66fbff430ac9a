"""Requests that are aborted, preempted, or come in any order."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
from tests.caches import eventually
from tests.vllm.bench import Bench, in_all_modes, prompt, start
from tests.vllm.fake_runner import continuation
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("after_steps", [0, 1, 3, 7])
def test_abort_at_any_time_lets_go_of_every_block(
    bench: Bench, asynchronous: bool, after_steps: int
) -> None:
    engine = bench.engine(asynchronous=asynchronous)
    engine.serve("warm", prompt(1, 60), 1)
    engine.forget_device()
    for i in range(3):
        engine.add(f"r{i}", prompt(i, 90), 9)
    for _ in range(after_steps):
        engine.step()
    engine.scheduler.finish_requests(["r0", "r1", "r2"], RequestStatus.FINISHED_ABORTED)
    engine.run()
    eventually(engine.is_at_rest, "device blocks are kept")
    eventually(lambda: engine.holds_nothing(bench.manager), "a lease is kept")
    engine.serve("after", prompt(1, 90), 9)


PROMPT = prompt(33, 41)  # its 7th and 8th token are the same, and no two before them
TWICE = RepetitionDetectionParams(max_pattern_size=1, min_count=2)
OTHER_PROMPT = prompt(1, 41)  # its 8th token is none of those before it
ENDS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "STOP": (OTHER_PROMPT, {"stop_token_ids": [continuation(OTHER_PROMPT, 8)[-1]]}),
    "LENGTH": (PROMPT, {}),
    "REPETITION": (PROMPT, {"repetition_detection": TWICE}),
    "ABORT": (PROMPT, {}),
    "ERROR": (PROMPT, {}),
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("reason", ENDS)
def test_whatever_ends_a_request_all_its_complete_blocks_are_saved(
    bench: Bench, asynchronous: bool, reason: str
) -> None:
    """41 prompt tokens and 8 sampled: the KV of 48 exist, which are 6 blocks of 8."""
    engine = bench.engine(asynchronous=asynchronous)
    tokens, sampling = ENDS[reason]
    request = engine.add("a", tokens, 8 if reason == "LENGTH" else 30, sampling=sampling)
    while request.num_output_tokens < 8:
        engine.step()
    if reason in ("ABORT", "ERROR"):
        finished = {"ABORT": RequestStatus.FINISHED_ABORTED, "ERROR": RequestStatus.FINISHED_ERROR}
        engine.scheduler.finish_requests(["a"], finished[reason])
    engine.run()
    assert (request.get_finished_reason(), request.num_output_tokens) == (FinishReason[reason], 8)
    keys = engine.half._math.keys(request, 0, 6)
    assert bench.saved_keys() == {engine.half._namespace + key for key in keys}
    assert bench.check_saved_bytes(engine) == 6


def test_the_last_tokens_leave_before_what_is_left_to_be_saved(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM sends them on a thread that needs the interpreter; while a request runs nobody waits."""
    engine = bench.engine()
    engine.add("a", prompt(1, 20), 2)
    engine.add("b", prompt(2, 20), 4)
    steps: list[tuple[int, int, int]] = []  # requests, tokens, and pauses of each
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    while engine.scheduler.has_requests():
        running, before = len(engine.half._requests), len(pauses)
        output = engine.scheduler.schedule()
        steps.append((running, output.total_num_scheduled_tokens, len(pauses) - before))
        engine.in_flight.append(output)
        engine.finish_step()
    assert steps[:6] == [(2, 32, 0), (2, 9, 0), (1, 1, 0), (1, 1, 0), (1, 1, 0), (0, 0, 1)], steps
    assert set(steps[6:]) <= {(0, 0, 0)}, steps  # as many as the saves take
    engine.half.give_way()
    assert len(pauses) == 1


@in_all_modes
def test_preempted_requests_save_nothing_twice(
    bench: Bench, asynchronous: bool, drafts: int
) -> None:
    """40 device blocks for four requests that need 30 each, and host memory for all."""
    engine = bench.engine(asynchronous=asynchronous, drafts=drafts, num_blocks=40)
    for i in range(6):
        engine.add(f"r{i}", prompt(0, 40) + prompt(i + 1, 30), 45)
    engine.run()
    assert sum(r.num_preemptions for r in engine.requests.values()) > 0
    # 5 blocks of the first 40 tokens; of each request 114 tokens have KV, which are 14.
    assert len(bench.saved_keys()) == 5 + 6 * 9
    assert bench.counters()["kvstrata_saved_blocks_total"] == 5 + 6 * 9


@in_all_modes
def test_preempted_requests_go_on_as_if_nothing_had_happened(
    folder: Path, asynchronous: bool, drafts: int
) -> None:
    """40 device blocks for four requests that need 30 each, over 12 slots of host memory."""
    with start(folder, 12) as bench:
        engine = bench.engine(asynchronous=asynchronous, drafts=drafts, num_blocks=40)
        prompts = [prompt(0, 40) + prompt(i + 1, 30) for i in range(6)]
        for i, tokens in enumerate(prompts):
            engine.add(f"r{i}", tokens, 45)
        engine.run()
        for i, tokens in enumerate(prompts):
            assert list(engine.requests[f"r{i}"].output_token_ids) == continuation(tokens, 45)
        assert sum(r.num_preemptions for r in engine.requests.values()) > 0
        assert bench.check_saved_bytes(engine) > 0


@in_all_modes
def test_any_traffic_gives_right_tokens_from_right_pages(
    folder: Path, asynchronous: bool, drafts: int
) -> None:
    """Shared prefixes, aborts, resets, a small device and a small cache."""
    rng = random.Random(5)
    with start(folder, 60) as bench:
        engine = bench.engine(asynchronous=asynchronous, drafts=drafts, num_blocks=60)
        wanted: dict[str, list[int]] = {}
        aborted = set[str]()
        stems = [prompt(i, 64) for i in range(8)]

        def disturb() -> None:
            if len(wanted) < 40 and rng.random() < 0.2:
                name = f"r{len(wanted)}"
                tokens = rng.choice(stems)[: rng.randint(1, 64)] + prompt(
                    rng.randint(0, 3), rng.randint(0, 20)
                )
                wanted[name] = continuation(tokens, 12)
                engine.add(name, tokens, 12)
            if wanted and rng.random() < 0.02:
                name = rng.choice(list(wanted))
                if not engine.requests[name].is_finished():
                    aborted.add(name)
                    engine.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
            if rng.random() < 0.01:
                engine.connector.reset_cache()

        while len(wanted) < 40:
            disturb()
            engine.step()
        engine.run()
        for name, tokens in wanted.items():
            if name not in aborted:
                assert list(engine.requests[name].output_token_ids) == tokens
        assert bench.counters()["kvstrata_loaded_blocks_total"] > 20
