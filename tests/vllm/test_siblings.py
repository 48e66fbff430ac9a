"""Other connectors beside ours under vLLM's scheduler, as ``MultiConnector`` shows them to it."""

from pathlib import Path
from typing import Any

import pytest
from tests.vllm.bench import Bench, prompt, start
from tests.vllm.driven import Engine
from tests.vllm.fake_runner import LAYERS, continuation
from tests.vllm.plans import model_folder
from vllm.v1.request import RequestStatus

PARKED = RequestStatus.WAITING_FOR_REMOTE_KVS
LOADED_TOKENS = 40


class Sibling:
    """Promises the first tokens of request ``b``, and never writes them."""

    def __init__(self, engine: Engine, *, is_asynchronous: bool) -> None:
        self.has_ended = self.has_failed = False
        self.reports_bad_blocks = 0  # steps
        connector, runner = engine.connector, engine.runner
        half: Any = runner.half
        match, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
        execute, take_invalid = runner.execute, half.take_invalid_blocks
        bad: list[int] = []

        def matched(request: Any, computed: int) -> Any:
            ours = match(request, computed)
            return (LOADED_TOKENS, is_asynchronous) if request.request_id == "b" else ours

        def after(request: Any, blocks: Any, tokens: int) -> None:
            if request.request_id == "b" and tokens:
                bad.extend(blocks.get_block_ids()[0][: LOADED_TOKENS // 4])
            allocated(request, blocks, 0 if request.request_id == "b" else tokens)

        def executed(output: Any) -> Any:
            done = execute(output)
            if self.has_ended:
                self.has_ended = False
                told = done.kv_connector_output
                told.finished_recving = (told.finished_recving or set()) | {"b"}
                if self.has_failed:
                    told.failed_recving = (told.failed_recving or set()) | {"b"}
            return done

        def invalid() -> set[int]:
            is_now = bool(bad) and self.reports_bad_blocks > 0
            self.reports_bad_blocks -= is_now
            ours: set[int] = take_invalid()
            return ours | (set(bad) if is_now else set())

        connector.get_num_new_matched_tokens = matched
        connector.update_state_after_alloc = after
        runner.execute = executed  # type: ignore[method-assign]  # a spy
        half.take_invalid_blocks = invalid


def saved_requests(bench: Bench, engine: Engine) -> set[str]:
    saved = bench.saved_keys()
    return {name for key, (name, _) in bench.named_blocks(engine).items() if key in saved}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_that_is_aborted_while_another_connector_loads_it_is_not_saved(
    bench: Bench, asynchronous: bool
) -> None:
    engine = bench.engine(asynchronous=asynchronous)
    sibling = Sibling(engine, is_asynchronous=True)
    request = engine.add("b", prompt(1, 60), 2)
    engine.step()
    assert request.status is PARKED
    engine.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    other = engine.add("c", prompt(2, 60), 2)
    while not other.is_finished():
        engine.step()
    sibling.has_ended = True
    engine.step()
    engine.run()
    assert saved_requests(bench, engine) == {"c"}


def test_a_request_that_another_connector_fails_to_load_is_not_saved(bench: Bench) -> None:
    """Under the policy that ends such requests with an error."""
    engine = bench.engine(policy="fail")
    sibling = Sibling(engine, is_asynchronous=True)
    request = engine.add("b", prompt(1, 60), 2)
    engine.step()
    sibling.has_ended = sibling.has_failed = True
    engine.run()
    assert request.status is RequestStatus.FINISHED_ERROR
    engine.serve("c", prompt(2, 60), 2)
    assert saved_requests(bench, engine) == {"c"}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_stands_on_blocks_that_another_connector_did_not_load_is_not_saved(
    bench: Bench, asynchronous: bool
) -> None:
    """With asynchronous scheduling it hears of them when the next step has been planned."""
    engine = bench.engine(asynchronous=asynchronous, policy="fail")
    sibling = Sibling(engine, is_asynchronous=False)
    sibling.reports_bad_blocks = 2 if asynchronous else 1
    request = engine.add("b", prompt(1, 60), 4)
    engine.run()
    assert request.status is RequestStatus.FINISHED_ERROR
    engine.serve("c", prompt(2, 60), 2)
    assert saved_requests(bench, engine) == {"c"}


def test_what_a_pipeline_stands_on_bad_blocks_is_not_saved(folder: Path) -> None:
    """The other stage has begun the next step when it is heard of them."""
    model_folder(folder, num_hidden_layers=2 * LAYERS)
    with start(folder, 400, ranks=2) as bench:
        engine = bench.engine(stages=2, policy="fail")
        sibling = Sibling(engine, is_asynchronous=False)
        sibling.reports_bad_blocks = 2
        request = engine.add("b", prompt(1, 120), 4)
        engine.run()
        assert request.status is RequestStatus.FINISHED_ERROR
        engine.serve("c", prompt(2, 60), 2)
        assert saved_requests(bench, engine) == {"c"}
        assert bench.check_saved_bytes(engine) == 7


def test_what_another_connector_has_loaded_is_saved(bench: Bench) -> None:
    """The same prompt on the device stands for its load."""
    engine = bench.engine()
    sibling = Sibling(engine, is_asynchronous=True)
    request = engine.add("b", prompt(1, 60), 20)
    engine.step()
    (blocks,) = engine.scheduler.kv_cache_manager.get_block_ids("b")
    engine.runner.fill(blocks[: LOADED_TOKENS // 4], prompt(1, LOADED_TOKENS))
    sibling.has_ended = True
    engine.run()
    assert list(request.output_token_ids) == continuation(prompt(1, 60), 20)
    assert saved_requests(bench, engine) == {"b"}
    bench.check_saved_bytes(engine)
