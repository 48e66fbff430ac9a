"""An engine that serves LoRA adapters: what is blended is blended without them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.vllm.blended import blending, whole_blocks
from tests.vllm.engine import Ask, Engine
from tests.vllm.oracle import Oracle
from tests.vllm.test_kinds import MODELS, write_adapter

from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.blend.adapters import check_adapters
from kvstrata.integration.vllm.tiny_model import write_tiny_llama

pytestmark = pytest.mark.vllm


def test_a_request_without_an_adapter_is_blended_beside_those_that_have_one(
    tmp_path: Path,
) -> None:
    model = MODELS["mqa"]
    path = write_tiny_llama(tmp_path / "model", model)
    adapter = write_adapter(tmp_path / "adapter", model, 1)
    # On a CPU vLLM lets a request without an adapter have what is in the last place for one.
    settings = {"enable_lora": True, "max_loras": 2}
    alone = settings | {"enable_prefix_caching": False}
    with (
        Engine(path, tmp_path / "alone.log", settings=alone) as oracle,
        blending(path, Oracle(oracle), tmp_path, settings) as subject,
    ):
        adapted = [Ask(f"adapted-{i}", subject.text(100), 30, lora=adapter) for i in range(3)]
        right = oracle.run(adapted)
        blended = replace(subject.ask(subject.prompt(2, 0), {"ratio": 1.0}), at_step=3)
        answers = subject.run([*adapted, blended])
        subject.oracle.check([blended], answers)
        assert answers[blended.id].cached_tokens == whole_blocks(blended.prompt)
        for ask in adapted:
            assert answers[ask.id].tokens == right[ask.id].tokens
        subject.exact(adapted[0].prompt)  # which says something else without its adapter
        assert subject.count("requests_total", "blended") == 1


def test_an_engine_whose_adapters_are_not_found_is_refused() -> None:
    model = torch.nn.Module()
    without: Any = SimpleNamespace(lora_config=None)
    check_adapters(model, without)
    adapters: Any = SimpleNamespace(lora_config=object())
    with pytest.raises(ConfigError, match="its LoRA adapters where KVStrata does not find them"):
        check_adapters(model, adapters)
