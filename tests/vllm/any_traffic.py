"""Requests at random that share beginnings, and what has to be true behind them."""

import contextlib
import random

from tests.vllm.bench import Bench, prompt
from tests.vllm.driven import Engine
from tests.vllm.fake_runner import continuation
from vllm.v1.request import RequestStatus

__all__ = ["serve_any_traffic"]


def serve_any_traffic(
    bench: Bench, engine: Engine, rng: random.Random, *, asynchronous: bool
) -> None:
    """With preemption, aborts and resets of the device cache: all answers and saved bytes are right."""
    for i in range(24):
        length = rng.randrange(1, 150)
        own = prompt(1000 + i, rng.randrange(1, 40))
        tokens = [*prompt(rng.randrange(3), length), *own]
        engine.add(f"r{i}", tokens, rng.randrange(1, 30))
        for _ in range(rng.randrange(6)):
            engine.step()
        if rng.random() < 0.2:
            engine.scheduler.finish_requests([f"r{i}"], RequestStatus.FINISHED_ABORTED)
        if rng.random() < 0.3:
            engine.try_to_forget_device()
        if rng.random() < 0.1 and not asynchronous:
            with contextlib.suppress(RuntimeError):  # blocks are held: requests are preempted only
                engine.try_to_forget_device(running=True)
    engine.run()
    for request in engine.requests.values():
        if request.status is not RequestStatus.FINISHED_ABORTED:
            made = list(request.output_token_ids)
            assert made == continuation(list(request.prompt_token_ids or ()), len(made))
    assert bench.check_saved_bytes(engine) > 20
    assert bench.counters()["kvstrata_loaded_blocks_total"] > 0
