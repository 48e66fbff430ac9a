"""Tokens of a real engine's cache read, written and computed one by one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.machines import is_nightly
from tests.vllm.engine import ROUNDED_ALIKE, TWO_WORKERS, Engine, bound_to_cores
from tests.vllm.tiny_deepseek import QUERY, with_amx, write_deepseek
from tests.vllm.tiny_glm4 import write_glm4

from kvstrata.integration.vllm.tiny_model import TinyLlama, write_tiny_llama

pytestmark = pytest.mark.vllm


Told = list[dict[str, Any]]

WINDOW = 40  # less than the tokens that the probes run, no multiple of a block
EAGER = {"enforce_eager": True}
FP8 = {"kv_cache_dtype": "fp8"}
ONE_GROUP = {"disable_hybrid_kv_cache_manager": True}
COMPILED = {"enforce_eager": False}  # for tokens of any number, as vLLM does by default
ROPES: dict[str, dict[str, Any]] = {
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "max_trained_positions": 2048},
}
USUAL_ROPES = ("llama3", "yarn")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("float32", EAGER), id="float32"),
        pytest.param(("bfloat16", EAGER), id="bfloat16"),
        pytest.param(("sliding", EAGER), id="sliding"),
        pytest.param(("mixed", ONE_GROUP), id="mixed"),
        pytest.param(("float32", FP8), id="fp8"),
        *(
            pytest.param((rope, EAGER), id=rope)
            for rope in (ROPES if is_nightly() else USUAL_ROPES)
        ),
        pytest.param(("latents", EAGER), id="latents", marks=with_amx),
        *(
            (
                pytest.param(("float32", COMPILED), id="float32-compiled"),
                pytest.param(("bfloat16", COMPILED), id="bfloat16-compiled"),
                pytest.param(("float32", TWO_WORKERS), id="float32-two"),
                pytest.param(("bfloat16", TWO_WORKERS), id="bfloat16-two"),
                pytest.param(("float32", TWO_WORKERS | COMPILED), id="float32-two-compiled"),
                pytest.param(("bfloat16", TWO_WORKERS | COMPILED), id="bfloat16-two-compiled"),
                pytest.param(("sliding", COMPILED), id="sliding-compiled"),
                pytest.param(("sliding", TWO_WORKERS), id="sliding-two"),
                pytest.param(("heads-of-32", FP8), id="bfloat16-fp8"),
                pytest.param(("float32", FP8 | {"kv_cache_dtype": "fp8_e5m2"}), id="fp8-e5m2"),
                pytest.param(("float32", FP8 | TWO_WORKERS), id="fp8-two"),
                pytest.param(("glm4", EAGER), id="glm4"),
                pytest.param(("latents", COMPILED), id="latents-compiled", marks=with_amx),
                pytest.param(("latents", TWO_WORKERS), id="latents-two", marks=with_amx),
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
    kind, settings = request.param
    folder = tmp_path_factory.mktemp("ground")
    match kind:
        case "sliding" | "mixed":
            windows = TinyLlama(dtype="float32", window=WINDOW, full_layers=int(kind == "mixed"))
            model = write_tiny_llama(folder / "model", windows)
        case _ if kind in ROPES:
            scaled = TinyLlama(dtype="float32", rope=ROPES[kind])
            model = write_tiny_llama(folder / "model", scaled)
        case "latents":
            write_deepseek(model := folder / "model")
        case "glm4":
            model = write_glm4(folder / "model")
        case "heads-of-32":
            model = write_tiny_llama(folder / "model", TinyLlama(dtype="bfloat16"))
        case _:
            model = tiny_llama if kind == "float32" else tiny_llama_bfloat16
    dtype = "bfloat16" if kind in {"bfloat16", "heads-of-32", "latents"} else "float32"
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
    environment = bound_to_cores(workers)
    if kind not in {
        "heads-of-32",
        "latents",
    }:  # vLLM's attention with AMX dies where oneDNN may not use it
        environment |= ROUNDED_ALIKE
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


def test_attention_by_position_is_what_the_engines_own_is(
    told: Told, request: pytest.FixtureRequest
) -> None:
    kind, settings = request.node.callspec.params["told"]
    if kind == "latents":  # none attends to them so
        return
    close = 0.02 if kind == "bfloat16" else 1e-5
    if "kv_cache_dtype" in settings:
        close = 0.2  # what is rounded once becomes another number of few
    for worker in told:
        found = worker["gathered_is_close"]
        assert found["spoilt"] > 0.3
        assert max(found["kv"], found["hidden"]) < close


def test_kv_that_stays_where_it_was_is_bit_equal_and_so_is_what_is_said_behind_it(
    told: Told,
) -> None:
    for worker in told:
        assert worker["kept_where_it_was_is_equal"] == {"kv": True, "hidden": True}


def test_a_window_is_attended_to_and_scored_to_its_first_token_and_no_further(
    told: Told, request: pytest.FixtureRequest
) -> None:
    kind, _ = request.node.callspec.params["told"]
    layers = {"sliding": "0123", "mixed": "012"}.get(kind, "")
    right = {"scored": [False, True], "sum": True, "seen": [False, True]}
    for worker in told:
        assert worker["attention_reaches_its_window"] == dict.fromkeys(layers, right)


def test_the_gate_lets_in_the_models_own_rope_and_no_other(
    told: Told, request: pytest.FixtureRequest
) -> None:
    kind, _ = request.node.callspec.params["told"]
    for worker in told:
        verdicts = dict(worker["gate_knows_the_model"])
        assert verdicts.pop("own") == "let in"
        if kind != "latents":
            assert verdicts.pop("own, gathered") == "let in"
        if kind not in {*ROPES, "latents"}:
            assert verdicts.pop("not scaled") == "let in"
        refused = ["are not those of the model" in verdict for verdict in verdicts.values()]
        assert all(refused), verdicts


def test_a_forward_stops_behind_a_layer_whose_kv_it_has_written(
    told: Told, request: pytest.FixtureRequest
) -> None:
    kind, _ = request.node.callspec.params["told"]
    for worker in told:
        seen = worker["taps_stop_behind_a_layer"]
        heads, size, behind = 8, seen["head_size"], [False, False]
        if kind == "latents":
            heads, size, behind = 4, QUERY, [False]
        assert seen["changed"] == [True, True, *behind]
        assert seen["final"] == [True, True, *behind]
        shape = [32, heads // len(told), size]
        assert seen["queries"] == {"0": shape, "1": shape}


def test_queries_are_multiplied_with_latents_as_with_the_keys_that_these_become(
    told: Told, request: pytest.FixtureRequest
) -> None:
    kind, _ = request.node.callspec.params["told"]
    for worker in told:
        found = worker["queries_meet_what_they_are_multiplied_with"]
        assert list(found) == (["difference"] if kind == "latents" else [])
        assert all(difference < 0.01 for difference in found.values())


def test_steps_of_several_prompts_in_one_forward_do_what_each_does_alone(told: Told) -> None:
    kinds = ("attention", "deviation", "recompute")
    for worker in told:
        assert worker["steps_of_several_prompts"] == {kind: [True, True] for kind in kinds}
