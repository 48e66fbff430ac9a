"""``load_mode: layerwise`` under vLLM's scheduler, with and without loads that fail."""

import threading
import traceback
from dataclasses import replace
from typing import Any

import pydantic
import pytest
from tests.caches import PATIENCE_SECONDS
from tests.vllm.bench import Bench, prompt
from tests.vllm.driven import Engine
from tests.vllm.fake_runner import LAYERS, continuation
from tests.vllm.faults import Copies
from tests.vllm.plans import chunked, copiers, full, group, sliding
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.request import RequestStatus

from kvstrata.core.errors import ConfigError, KVStrataError
from kvstrata.core.load import load_config
from kvstrata.integration.vllm.connector import KVStrataConnector
from kvstrata.integration.vllm.layerwise import obstacle_to_taking_back
from kvstrata.integration.vllm.metadata import StepPlan


def layerwise(bench: Bench, **settings: Any) -> Engine:
    return bench.engine(load_mode="layerwise", **settings)


@pytest.mark.parametrize("mode", ["layerwise", "auto", "blockwise"])
def test_the_hooks_of_layers_are_called_only_where_they_have_something_to_do(mode: str) -> None:
    connector: Any = object.__new__(KVStrataConnector)
    connector._config = load_config({"load_mode": mode}, environ={})
    connector._connector_metadata = StepPlan(b"")
    assert connector.has_connector_metadata() is (mode == "layerwise")
    connector.clear_connector_metadata()
    assert not connector.has_connector_metadata()


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_request_runs_in_the_step_that_loads_it(bench: Bench, drafts: int) -> None:
    engine = layerwise(bench, drafts=drafts)
    engine.serve("a", prompt(1, 60), 12)
    engine.forget_device()
    request = engine.add("b", prompt(1, 60), 1)
    engine.step()
    assert engine.runner.loaded_tokens["b"] == 56
    assert request.is_finished()
    assert list(request.output_token_ids) == continuation(prompt(1, 60), 1)


def test_of_a_whole_prompt_the_last_device_block_is_computed(bench: Bench) -> None:
    """A load and the forward must not write the same device block."""
    engine = layerwise(bench)
    engine.serve("a", prompt(1, 64), 2)
    engine.forget_device()
    assert engine.serve("b", prompt(1, 64), 2) == 60
    engine.forget_device()
    assert engine.serve("c", [*prompt(1, 64), 7], 2) == 64


def test_layers_are_loaded_and_saved_one_by_one(bench: Bench) -> None:
    engine = layerwise(bench)
    copier: Any = copiers(engine.runner.half)[0]
    loaded, saved = list[int | None](), list[int | None]()
    to_device, to_host = copier.copy_to_device, copier.copy_to_host

    def load(blocks: Any, rows: Any, layer: int | None = None) -> None:
        loaded.append(layer)
        to_device(blocks, rows, layer)

    def save(blocks: Any, rows: Any, layer: int | None = None) -> None:
        saved.append(layer)
        to_host(blocks, rows, layer)

    copier.copy_to_device, copier.copy_to_host = load, save
    engine.serve("a", prompt(1, 60), 4)
    assert {*range(LAYERS)} <= {*saved}
    engine.forget_device()
    engine.serve("b", prompt(1, 60), 4)
    assert loaded == sorted(loaded, key=lambda layer: layer or 0)
    assert {*loaded} == {*range(LAYERS)}


def test_a_layer_waits_for_its_own_load_only(bench: Bench) -> None:
    engine = layerwise(bench)
    engine.serve("a", prompt(1, 60), 2)
    engine.forget_device()
    half = engine.runner.half
    copier: Any = copiers(half)[0]
    real, last, begun = copier.copy_to_device, threading.Event(), list[str]()

    def held(blocks: Any, rows: Any, layer: int) -> None:
        if layer == LAYERS - 1:
            assert last.wait(PATIENCE_SECONDS)
        real(blocks, rows, layer)

    wait = half.wait_for_layer

    def waits(layer: str) -> None:
        if layer == half.geometry.layers[-1]:
            last.set()  # so the layers before it did not wait for it
        wait(layer)
        begun.append(layer)

    copier.copy_to_device, half.wait_for_layer = held, waits  # type: ignore[method-assign]
    engine.serve("b", prompt(1, 60), 1)
    assert begun[:LAYERS] == list(half.geometry.layers)


@pytest.mark.parametrize("is_partial", [False, True])
@pytest.mark.parametrize("failing", [1, 7, 20])
def test_a_failed_load_is_computed_in_the_next_steps(
    bench: Bench, failing: int, is_partial: bool
) -> None:
    engine = layerwise(bench)
    engine.serve("a", prompt(1, 60), 2)
    engine.forget_device()
    copies = Copies(engine)
    copies.failing_loads, copies.is_partial = failing, is_partial
    engine.serve("b", prompt(1, 60), 6)
    assert copies.seen["failed loads of rank 0"] == 1  # the other layers are spared
    assert bench.counters()["kvstrata_failed_loads_total"] == 1
    copies.heal()
    engine.forget_device()
    assert engine.serve("c", prompt(1, 60), 6) == 56
    bench.check_saved_bytes(engine)


def test_of_requests_that_end_with_a_failed_load_nothing_is_saved(bench: Bench) -> None:
    """Under policy ``fail`` vLLM ends them all, those that share it too, before it tells us."""
    engine = layerwise(bench, policy="fail")
    engine.serve("a", prompt(1, 40), 2)
    engine.forget_device()
    Copies(engine).failing_loads = 1
    longer = prompt(1, 40) + prompt(2, 20)
    requests = [engine.add(name, longer, 6) for name in ("b", "c")]
    engine.run()
    assert {request.status for request in requests} == {RequestStatus.FINISHED_ERROR}
    bench.check_saved_bytes(engine)


def test_a_load_that_fails_takes_no_other_of_its_step_with_it(bench: Bench) -> None:
    """Under the policy that ends the requests of failed loads with an error."""
    engine = layerwise(bench, policy="fail", num_blocks=60)
    for seed in (1, 2):
        engine.serve(f"a{seed}", prompt(seed, 40), 2)
    engine.forget_device()
    copies = Copies(engine)
    copies.failing_loads = 1
    first, second = (engine.add(f"b{seed}", prompt(seed, 40), 2) for seed in (1, 2))
    engine.step()
    assert engine.runner.loaded_tokens == {"b1": 36, "b2": 36}
    engine.run()
    assert first.status is RequestStatus.FINISHED_ERROR
    assert list(second.output_token_ids) == continuation(prompt(2, 40), 2)


def test_a_save_that_fails_takes_no_other_of_its_step_with_it(bench: Bench) -> None:
    engine = layerwise(bench)
    copies = Copies(engine)
    copies.failing_saves = 1
    requests = [engine.add(f"a{seed}", prompt(seed, 8), 4) for seed in (1, 2, 3)]
    engine.run()
    assert all(request.is_finished() for request in requests)
    assert len(bench.saved_keys()) == bench.check_saved_bytes(engine) == 2


def test_after_a_failed_load_all_is_offered_again(bench: Bench) -> None:
    engine = layerwise(bench)
    engine.serve("a", prompt(1, 60), 2)
    bench.manager.reset(engine.half._namespace)
    engine.serve("b", prompt(2, 60), 2)
    engine.forget_device()
    other = engine.add("c", prompt(3, 24), 60)
    engine.step()
    Copies(engine).failing_loads = 1
    engine.serve("d", prompt(2, 60), 2)
    engine.run()
    assert other.is_finished()
    keys = {engine.half._namespace + engine.half._math.key(other, i) for i in range(10)}
    assert keys <= bench.saved_keys()
    bench.check_saved_bytes(engine)


def test_a_load_that_is_late_is_stopped_and_computed(bench: Bench) -> None:
    engine = layerwise(bench)
    engine.serve("a", prompt(1, 60), 2)
    engine.forget_device()
    half, copies = engine.runner.half, Copies(engine)
    copies.hold()
    stop = half._lanes.cancel

    def stopped(handle: Any) -> None:
        stop(handle)
        copies.go()

    half._lanes.cancel = stopped  # type: ignore[method-assign]
    half._settings = replace(half._settings, load_timeout_seconds=0.01)
    engine.serve("b", prompt(1, 60), 2)
    assert bench.counters()["kvstrata_failed_loads_total"] == 1
    assert bench.counters()["kvstrata_saved_blocks_total"] == 7  # none is lost and saved again


def test_requests_that_share_a_failed_load_are_all_computed(bench: Bench) -> None:
    """One takes the blocks of the other from vLLM's prefix cache in the step that loads them.

    With a threshold for long prompts the other goes on before the first has computed them again.
    """
    engine = layerwise(bench)
    engine.serve("a", prompt(1, 120), 2)
    engine.forget_device()
    engine.scheduler.scheduler_config.long_prefill_token_threshold = 8
    Copies(engine).failing_loads = 1
    first = engine.add("b", prompt(1, 120), 6)
    second = engine.add("c", prompt(1, 120), 6)
    engine.step()
    assert engine.runner.loaded_tokens == {"b": 116}
    assert second.status is RequestStatus.RUNNING
    assert engine.pool.get_cached_block(first.block_hashes[0], [0]) is None
    engine.run()
    for request in (first, second):
        assert list(request.output_token_ids) == continuation(prompt(1, 120), 6)
    bench.check_saved_bytes(engine)


def test_nothing_is_saved_that_stands_on_a_failed_load(bench: Bench) -> None:
    """The step of the load computes blocks after it, and offers them."""
    engine = layerwise(bench)
    engine.serve("a", prompt(1, 32), 2)
    engine.forget_device()
    longer = prompt(1, 32) + prompt(2, 40)
    Copies(engine).failing_loads = 1
    engine.add("b", longer, 2)
    engine.step()
    assert engine.runner.loaded_tokens["b"] == 32
    engine.run()
    assert list(engine.requests["b"].output_token_ids) == continuation(longer, 2)
    bench.check_saved_bytes(engine)
    engine.forget_device()
    engine.serve("c", longer, 2)


def test_with_policy_fail_the_requests_end_with_an_error(bench: Bench) -> None:
    engine = layerwise(bench, policy="fail")
    engine.serve("a", prompt(1, 60), 2)
    engine.forget_device()
    Copies(engine).failing_loads = 1
    request = engine.add("b", prompt(1, 60), 6)
    engine.run()
    assert request.status is RequestStatus.FINISHED_ERROR
    assert engine.serve("c", prompt(1, 60), 6) == 0  # no block is kept whose load has failed
    engine.forget_device()
    assert engine.serve("d", prompt(1, 60), 6) == 56
    bench.check_saved_bytes(engine)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"asynchronous": True}, "--no-async-scheduling"),
        (
            {
                "groups": (
                    group(full(block_size=4), layers=1),
                    group(sliding(block_size=4), layers=1),
                )
            },
            "several KV cache groups",
        ),
        ({"groups": (group(sliding(block_size=4)),)}, "sliding window"),
        ({"groups": (group(chunked(block_size=4)),)}, "chunked attention"),
    ],
)
def test_where_a_failed_load_cannot_be_taken_back_it_is_refused(
    bench: Bench, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        layerwise(bench, **settings)


def test_beside_another_connector_it_is_refused(bench: Bench) -> None:
    """It may have a request wait on top of what this step loads, which vLLM would not take back."""

    class Making(MultiConnector):
        def __init__(self) -> None:
            layerwise(bench)

    with pytest.raises(ConfigError, match="other connectors beside this one"):
        Making()


def test_a_model_runner_that_takes_nothing_back_is_an_obstacle(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bench.engine()
    asked = engine.scheduler.vllm_config, engine.runner.half.geometry
    assert obstacle_to_taking_back(*asked) is None
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    obstacle = obstacle_to_taking_back(*asked)
    assert obstacle is not None
    assert obstacle.hint.startswith("set VLLM_USE_V2_MODEL_RUNNER=0")


def test_graphs_are_piecewise_in_this_mode_alone() -> None:
    asks = KVStrataConnector.requires_piecewise_for_cudagraph
    assert asks({"load_mode": "layerwise"})
    assert not asks({})


def test_wrong_settings_are_told_in_our_words_where_vllm_asks_while_it_validates() -> None:
    """Its configuration is a pydantic dataclass, which wraps a ValueError and ends with a link of its own."""

    @pydantic.dataclasses.dataclass
    class Asking:
        def __post_init__(self) -> None:
            KVStrataConnector.requires_piecewise_for_cudagraph({"tiers": "hots:8GiB"})

    with pytest.raises(KVStrataError) as caught:
        Asking()
    message = str(caught.value)
    assert message.startswith("tiers (from kv_connector_extra_config): unknown tier 'hots'\n")
    assert message.endswith("\n  hint: did you mean 'host'?")
    assert "pydantic" not in "".join(traceback.format_exception(caught.value)[-1:])
