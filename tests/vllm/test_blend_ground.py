"""Tokens of a real engine's cache read, written and computed one by one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engine import Engine

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def told(
    request: pytest.FixtureRequest,
    tiny_llama: Path,
    tiny_llama_bfloat16: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ground")
    model = tiny_llama if request.param == "float32" else tiny_llama_bfloat16
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
    with Engine(model, folder / "log", transfer, {"dtype": request.param}) as engine:
        engine.wait_ready()
        yield json.loads((folder / "told.json").read_text())


def test_what_is_written_by_token_is_read_by_token_and_touches_no_other(
    told: dict[str, Any],
) -> None:
    assert told["written_is_read"] == {"right": True}


def test_tokens_that_are_run_again_are_bit_equal_to_a_whole_prefill(told: dict[str, Any]) -> None:
    assert told["recomputed_is_equal"] == {
        "spoilt": True,
        "kv": True,
        "hidden": True,
        "batched": True,
    }


def test_the_gate_lets_in_the_models_own_rope_and_no_other(told: dict[str, Any]) -> None:
    verdicts = told["gate_knows_the_model"]
    assert verdicts.pop("own") == "let in"
    assert all("are not those of the model" in verdict for verdict in verdicts.values()), verdicts


def test_a_forward_stops_behind_a_layer_whose_kv_it_has_written(told: dict[str, Any]) -> None:
    seen = told["taps_stop_behind_a_layer"]
    assert seen["changed"] == [True, True, False, False]
    assert seen["final"] == [True, True, False, False]
    assert set(seen["queries"]) == {"0", "1"}
    assert seen["queries"]["0"] == seen["queries"]["1"] == [32, 8, 32]


def test_steps_of_several_prompts_in_one_forward_do_what_each_does_alone(
    told: dict[str, Any],
) -> None:
    kinds = ("attention", "deviation", "recompute")
    assert told["steps_of_several_prompts"] == {kind: [True, True] for kind in kinds}
