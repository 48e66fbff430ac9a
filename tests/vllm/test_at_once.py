"""``load_mode: auto`` under vLLM's scheduler: short loads in the step that runs their request."""

import threading
from typing import Any

import pytest
from tests.caches import eventually
from tests.vllm.bench import Bench, prompt
from tests.vllm.driven import Engine
from tests.vllm.fake_runner import DEVICE_TOKENS, continuation
from tests.vllm.faults import Copies
from tests.vllm.plans import copiers, group, sliding
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.v1.request import RequestStatus

from kvstrata.integration.vllm.at_once import AtOnce

PARKED = RequestStatus.WAITING_FOR_REMOTE_KVS


def auto(bench: Bench, *, most_blocks: int | None = None, **settings: Any) -> Engine:
    engine = bench.engine(load_mode="auto", **settings)
    if most_blocks is not None:
        engine.half._loads._at_once = AtOnce(most_blocks)
    return engine


def loads_of(engine: Engine, seed: int, tokens: int = 60) -> None:
    """Put a prompt where it has to be loaded from."""
    engine.serve(f"a{seed}", prompt(seed, tokens), 2)
    engine.forget_device()


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_request_runs_in_the_step_that_loads_it(bench: Bench, drafts: int) -> None:
    engine = auto(bench, drafts=drafts)
    loads_of(engine, 1)
    request = engine.add("b", prompt(1, 60), 1)
    engine.step()
    assert engine.runner.loaded_tokens["b"] == 56
    assert request.is_finished()
    assert list(request.output_token_ids) == continuation(prompt(1, 60), 1)


def test_beside_another_connector_requests_are_parked(bench: Bench) -> None:
    """It may park a request on what this step loads, which vLLM would not take back."""

    class Making(ExampleConnector):  # whatever vLLM calls the class that makes several
        def __init__(self) -> None:
            self.engine = auto(bench)

    engine = Making().engine
    loads_of(engine, 1)
    request = engine.add("b", prompt(1, 60), 1)
    engine.step()
    assert request.status is PARKED
    engine.run()
    assert engine.runner.loaded_tokens["b"] == 56


def test_the_engines_own_thread_copies(bench: Bench) -> None:
    engine = auto(bench)
    loads_of(engine, 1)
    copier: Any = copiers(engine.runner.half)[0]
    real, threads = copier.copy_to_device, set[int]()

    def load(*args: Any) -> None:
        threads.add(threading.get_ident())
        real(*args)

    copier.copy_to_device = load
    engine.serve("b", prompt(1, 60), 1)
    assert threads == {threading.get_ident()}


def test_a_request_waits_for_a_load_that_takes_longer(bench: Bench) -> None:
    engine = auto(bench, most_blocks=6)
    loads_of(engine, 1)
    request = engine.add("b", prompt(1, 60), 4)  # seven blocks
    engine.step()
    assert request.status is PARKED
    engine.run()
    assert engine.runner.loaded_tokens["b"] == 56
    assert list(request.output_token_ids) == continuation(prompt(1, 60), 4)


def test_a_step_loads_so_much_and_no_more_at_once(bench: Bench) -> None:
    engine = auto(bench, most_blocks=7)
    for seed in (1, 2):
        engine.serve(f"a{seed}", prompt(seed, 40), 2)
    engine.forget_device()
    first, second = (engine.add(f"b{seed}", prompt(seed, 40), 4) for seed in (1, 2))
    engine.step()
    assert first.status is RequestStatus.RUNNING
    assert second.status is PARKED
    engine.run()
    assert engine.runner.loaded_tokens == {"b1": 36, "b2": 40}
    loads_of(engine, 3, 40)
    assert engine.serve("c", prompt(3, 40), 2) == 36  # the next step may again


@pytest.mark.parametrize("is_partial", [False, True])
def test_a_failed_load_is_computed_in_the_next_steps(bench: Bench, is_partial: bool) -> None:
    engine = auto(bench)
    loads_of(engine, 1)
    copies = Copies(engine)
    copies.failing_loads, copies.is_partial = 1, is_partial
    engine.serve("b", prompt(1, 60), 6)
    assert copies.seen["failed loads of rank 0"] == 1
    assert bench.counters()["kvstrata_failed_loads_total"] == 1
    engine.forget_device()
    assert engine.serve("c", prompt(1, 60), 6) == 56
    bench.check_saved_bytes(engine)


def test_a_load_that_fails_takes_no_other_of_its_step_with_it(bench: Bench) -> None:
    """Under the policy that ends the requests of failed loads with an error."""
    engine = auto(bench, policy="fail", num_blocks=60)
    for seed in (1, 2):
        engine.serve(f"a{seed}", prompt(seed, 40), 2)
    engine.forget_device()
    Copies(engine).failing_loads = 1
    first, second = (engine.add(f"b{seed}", prompt(seed, 40), 2) for seed in (1, 2))
    engine.run()
    assert first.status is RequestStatus.FINISHED_ERROR
    assert list(second.output_token_ids) == continuation(prompt(2, 40), 2)


def test_no_request_waits_on_top_of_blocks_that_are_loaded_at_once(bench: Bench) -> None:
    """It would run as soon as its own load has ended, whatever became of the blocks below."""
    engine = auto(bench, most_blocks=7)
    longer = prompt(1, 40) + prompt(2, 40)
    engine.serve("a", longer, 2)
    engine.forget_device()
    Copies(engine).failing_loads = 1
    below, above = engine.add("b", prompt(1, 41), 6), engine.add("c", longer, 6)
    engine.step()
    assert engine.runner.loaded_tokens == {"b": 40}
    assert above.status is RequestStatus.WAITING
    engine.run()
    assert list(below.output_token_ids) == continuation(prompt(1, 41), 6)
    assert list(above.output_token_ids) == continuation(longer, 6)
    bench.check_saved_bytes(engine)


@pytest.mark.parametrize(
    "settings",
    [
        {"asynchronous": True},
        {"groups": (group(sliding(block_size=DEVICE_TOKENS, sliding_window=11)),)},
    ],
)
def test_where_a_failed_load_cannot_be_taken_back_requests_wait(
    bench: Bench, settings: dict[str, Any]
) -> None:
    engine = auto(bench, **settings)
    loads_of(engine, 1)
    request = engine.add("b", prompt(1, 60), 2)
    engine.step()
    assert request.status is PARKED
    engine.run()
    assert list(request.output_token_ids) == continuation(prompt(1, 60), 2)


def test_the_server_hears_that_a_load_has_ended_though_no_other_request_comes(bench: Bench) -> None:
    """It is told in the step that ends the request: none need follow."""
    engine = auto(bench)
    loads_of(engine, 1)
    engine.add("b", prompt(1, 60), 1)
    engine.step()
    assert not engine.half._requests
    eventually(lambda: bench.manager.stats().running_gets == 0, "a load has no end")
