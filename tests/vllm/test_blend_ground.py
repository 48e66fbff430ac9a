"""Tokens of a real engine's cache read, written and computed one by one."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.machines import is_nightly
from tests.vllm.engine import Engine

pytestmark = pytest.mark.vllm


Told = list[dict[str, Any]]

EAGER = {"enforce_eager": True}
COMPILED = {"enforce_eager": False}  # for tokens of any number, as vLLM does by default
TWO_WORKERS = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "gpu_memory_utilization": 0.3,  # of a worker
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("float32", EAGER), id="float32"),
        pytest.param(("bfloat16", EAGER), id="bfloat16"),
        *(
            (
                pytest.param(("float32", COMPILED), id="float32-compiled"),
                pytest.param(("bfloat16", COMPILED), id="bfloat16-compiled"),
                pytest.param(("float32", TWO_WORKERS), id="float32-two"),
                pytest.param(("bfloat16", TWO_WORKERS), id="bfloat16-two"),
            )
            if is_nightly()
            else ()
        ),
    ],
)
def told(
    request: pytest.FixtureRequest,
    tiny_llama: Path,
    tiny_llama_bfloat16: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Told]:
    """What the probes say in each worker."""
    dtype, settings = request.param
    folder = tmp_path_factory.mktemp("ground")
    model = tiny_llama if dtype == "float32" else tiny_llama_bfloat16
    workers = settings.get("tensor_parallel_size", 1)
    transfer = {
        "kv_connector": "ProbeConnector",
        "kv_connector_module_path": "tests.vllm.blend_probe",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "server": "attached",
            "socket": str(folder / "told.sock"),
            "start_timeout_seconds": 0.1,
        },
    }
    cores = sorted(os.sched_getaffinity(0))
    environment = {"OMP_NUM_THREADS": "1"}
    if workers > 1:  # without it vLLM wants a NUMA node for each
        environment["VLLM_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
    settings = {"dtype": dtype, **settings}
    with Engine(model, folder / "log", transfer, settings, environment=environment) as engine:
        engine.wait_ready()
        yield [json.loads((folder / f"told.{rank}.json").read_text()) for rank in range(workers)]


def test_what_is_written_by_token_is_read_by_token_and_touches_no_other(told: Told) -> None:
    assert [worker["written_is_read"] for worker in told] == [{"right": True}] * len(told)


def test_tokens_that_are_run_again_are_bit_equal_to_a_whole_prefill(told: Told) -> None:
    for worker in told:
        assert worker["recomputed_is_equal"] == {
            "spoilt": True,
            "kv": True,
            "hidden": True,
            "batched": True,
        }


def test_the_gate_lets_in_the_models_own_rope_and_no_other(told: Told) -> None:
    for worker in told:
        verdicts = dict(worker["gate_knows_the_model"])
        assert verdicts.pop("own") == "let in"
        refused = ["are not those of the model" in verdict for verdict in verdicts.values()]
        assert all(refused), verdicts


def test_a_forward_stops_behind_a_layer_whose_kv_it_has_written(told: Told) -> None:
    for worker in told:
        seen = worker["taps_stop_behind_a_layer"]
        assert seen["changed"] == [True, True, False, False]
        assert seen["final"] == [True, True, False, False]
        assert set(seen["queries"]) == {"0", "1"}
        assert seen["queries"]["0"] == seen["queries"]["1"] == [32, 8 // len(told), 32]


def test_steps_of_several_prompts_in_one_forward_do_what_each_does_alone(told: Told) -> None:
    kinds = ("attention", "deviation", "recompute")
    for worker in told:
        assert worker["steps_of_several_prompts"] == {kind: [True, True] for kind in kinds}
