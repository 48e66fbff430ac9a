"""Attention hooks in real engines: what they see, what they change, and what their failure costs."""

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.vllm.engine import Ask, CacheServer, Engine
from tests.vllm.oracle import Oracle, random_prompt
from tests.vllm.plans import full, group, model_folder, plan, vllm_config
from vllm.config import (
    CompilationMode,
    CUDAGraphMode,
    KVTransferConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.model_executor.layers.attention import Attention

from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError
from kvstrata.core.load import load_config
from kvstrata.integration.vllm.connector import KVStrataConnector
from kvstrata.integration.vllm.direct import DirectConnector, _refuse_other_layers
from kvstrata.integration.vllm.hooks import AttentionHook, HookedLayers, load_hook
from kvstrata.integration.vllm.metadata import WorkerReport
from kvstrata.server.sockets import runtime_directory

HOOKS = "tests.vllm.attention_hooks"
TOKENS_PER_BLOCK = 64
LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(4)]

MakeEngine = Callable[[str], Engine]


@pytest.fixture
def hooked(tiny_llama: Path, tmp_path: Path) -> Iterator[MakeEngine]:
    """Makes engines with a hook, all at one server, which has nothing yet."""
    socket = runtime_directory() / f"hooks-{os.getpid()}-{random.randrange(1 << 30)}"

    def engine(hook: str) -> Engine:
        transfer = {
            "kv_connector": "DirectConnector",
            "kv_connector_module_path": "kvstrata.integration.vllm.direct",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "server": "attached",
                "socket": str(socket),
                "tokens_per_block": TOKENS_PER_BLOCK,
                "lookup_timeout_seconds": 30,
                **({"attention_hook": f"{HOOKS}:{hook}"} if hook else {}),
            },
        }
        return Engine(tiny_llama, tmp_path / f"{hook or 'none'}.log", transfer)

    with CacheServer(load_config({"tiers": "host:128MiB"}), socket, tmp_path / "server.log"):
        yield engine
    socket.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    rng = random.Random(6)
    return [random_prompt(rng, tokens) for tokens in (65, 200, 700)]


def _run(
    engine: Engine, oracle: Oracle | None, prompts: list[tuple[int, ...]]
) -> tuple[list[list[int]], list[int]]:
    """Tokens and reused tokens of *prompts*, with nothing in vLLM's own cache before."""
    engine.reset_prefix_cache()
    asks = [Ask(f"{i}-{random.randrange(1 << 30)}", p, 8) for i, p in enumerate(prompts)]
    answers = engine.run(asks)
    if oracle is not None:
        oracle.check(asks, answers)
    engine.reset_prefix_cache()  # waits for saves
    return [answers[a.id].tokens for a in asks], [answers[a.id].cached_tokens for a in asks]


def _whole_blocks(prompts: list[tuple[int, ...]]) -> list[int]:
    return [len(p) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK for p in prompts]


@pytest.mark.vllm
def test_a_hook_that_looks_changes_nothing_and_shares_blocks(
    hooked: MakeEngine,
    oracle: Oracle,
    prompts: list[tuple[int, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    norms = tmp_path / "norms.jsonl"
    monkeypatch.setenv("ATTENTION_NORMS", str(norms))
    with hooked("OutputNorms") as engine, hooked("") as plain:
        assert _run(engine, oracle, prompts)[1] == [0, 0, 0]
        steps = [json.loads(line) for line in norms.read_text().splitlines()]
        assert len(steps) >= 8
        assert all(list(step) == LAYERS and min(step.values()) > 0 for step in steps)
        assert _run(engine, oracle, prompts)[1] == _whole_blocks(prompts)
        assert _run(plain, oracle, prompts)[1] == _whole_blocks(prompts)
        assert "switched off" not in engine.log_text()


def _rebuilt_model(model: Path, folder: Path) -> Path:
    """The model with weights that do what the hook ``Rebuilt`` does."""
    weights = load_file(model / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight"].zero_()
    weights["model.layers.1.self_attn.v_proj.weight"].mul_(2)
    weights["model.layers.2.self_attn.o_proj.weight"][:, 3 * 32 : 4 * 32] = 0
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    return folder


@pytest.mark.vllm
def test_a_hook_that_changes_attention_does_what_other_weights_would(
    hooked: MakeEngine,
    oracle: Oracle,
    prompts: list[tuple[int, ...]],
    tiny_llama: Path,
    tmp_path: Path,
) -> None:
    model = _rebuilt_model(tiny_llama, tmp_path / "rebuilt")
    settings = {"enable_prefix_caching": False}
    with (
        hooked("Rebuilt") as engine,
        Engine(model, tmp_path / "model.log", None, settings) as right,
    ):
        expected = Oracle(right)
        others = oracle.tokens(Ask(str(i), prompt, 8) for i, prompt in enumerate(prompts))
        # The engine without a hook has saved these prompts at the same server, or does so later.
        first, reused = _run(engine, expected, prompts)
        assert reused == [0, 0, 0]
        assert first != list(others.values())
        assert _run(engine, expected, prompts)[1] == _whole_blocks(prompts)
        with hooked("") as plain:
            assert _run(plain, oracle, prompts)[0] == list(others.values())
        assert "switched off" not in engine.log_text()


@pytest.mark.vllm
@pytest.mark.parametrize("hook", ["Failing", "FailingInTheScheduler"])
def test_a_hook_that_fails_is_switched_off_and_none_of_its_blocks_is_found_again(
    hook: str,
    hooked: MakeEngine,
    oracle: Oracle,
    prompts: list[tuple[int, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail = tmp_path / "fail"
    monkeypatch.setenv("FAIL_WHEN", str(fail))
    before, during, after = prompts
    with hooked(hook) as engine:
        assert _run(engine, None, [before])[1] == [0]
        assert _run(engine, None, [before])[1] == _whole_blocks([before])
        fail.touch()
        assert len(_run(engine, None, [during])[0][0]) == 8
        for reused in ([0, 0, 0], _whole_blocks([before, during, after])):
            assert _run(engine, oracle, [before, during, after])[1] == reused
        assert engine.log_text().count(f"the attention hook {hook} is switched off") == 1


@pytest.mark.vllm
def test_a_hook_that_changes_what_it_only_looks_at_is_switched_off(
    hooked: MakeEngine, oracle: Oracle, prompts: list[tuple[int, ...]]
) -> None:
    with hooked("Liar") as engine:
        _run(engine, oracle, prompts)
        assert _run(engine, oracle, prompts)[1] == _whole_blocks(prompts)
        assert engine.log_text().count("the attention hook Liar is switched off") == 1
        assert "attention_finished of model.layers.0.self_attn.attn" in engine.log_text()


@pytest.mark.parametrize(
    ("connector", "hook", "eager", "message"),
    [
        (DirectConnector, f"{HOOKS}:SilentHead", False, "start vLLM with --enforce-eager"),
        (DirectConnector, f"{HOOKS}:NotAHook", True, "no subclass of AttentionHook"),
        (DirectConnector, f"{HOOKS}:Absent", True, "AttributeError"),
        (DirectConnector, "no_such_module:Hook", True, "ModuleNotFoundError"),
        (DirectConnector, "SilentHead", True, "attention_hook"),
        (KVStrataConnector, f"{HOOKS}:SilentHead", True, "set kv_connector to DirectConnector"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(
    connector: Any, hook: str, eager: bool, message: str, tmp_path: Path
) -> None:
    check_refused(connector, {"attention_hook": hook}, message, tmp_path, eager=eager)


def test_a_hook_is_refused_where_layers_are_copied_before_it_may_fail(tmp_path: Path) -> None:
    settings = {"attention_hook": f"{HOOKS}:SilentHead", "load_mode": "layerwise"}
    check_refused(DirectConnector, settings, "load_mode is 'layerwise'", tmp_path)

    class WithItsOwn(DirectConnector):
        def hook_class(self, config: Config) -> type[AttentionHook]:
            return load_hook(f"{HOOKS}:SilentHead")

    settings = {"load_mode": "layerwise"}
    check_refused(WithItsOwn, settings, "SilentHead is at work", tmp_path)


def check_refused(
    connector: Any, settings: dict[str, str], message: str, folder: Path, *, eager: bool = True
) -> None:
    config = vllm_config(model_folder(folder))
    config.kv_transfer_config = KVTransferConfig(
        kv_connector=connector.__name__, kv_role="kv_both", kv_connector_extra_config=settings
    )
    config.compilation_config.mode = CompilationMode.NONE if eager else CompilationMode.VLLM_COMPILE
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    with pytest.raises(ConfigError, match="hint:") as caught:
        connector(config, KVConnectorRole.SCHEDULER, plan(config, group(full())))
    assert message in str(caught.value)


def test_layers_without_a_plain_query_key_and_value_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mla is no layer with a plain query"):
        _refuse_other_layers({"model.layers.0.mla": torch.empty(0)}, {})


def test_a_hook_that_is_removed_leaves_nothing_in_the_layers(tmp_path: Path) -> None:
    with set_current_vllm_config(vllm_config(model_folder(tmp_path))):
        layer = Attention(8, 32, 1.0, num_kv_heads=4, prefix="layer")
    hooked = HookedLayers(AttentionHook(), {"layer": layer})
    assert (len(layer._forward_pre_hooks), len(layer._forward_hooks)) == (1, 1)
    hooked.remove()
    assert (len(layer._forward_pre_hooks), len(layer._forward_hooks)) == (0, 0)


def test_a_report_of_one_worker_whose_hook_has_failed_is_that_of_all() -> None:
    healthy, failed = WorkerReport(saved={1: 1}), WorkerReport(hook_failed=True)
    assert healthy.aggregate(failed) == WorkerReport(saved={1: 1}, hook_failed=True)
    assert not healthy.aggregate(healthy).hook_failed
