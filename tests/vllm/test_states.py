"""Models with recurrent state, on vLLM's own schedulers: every state that a step goes on from is checked."""

import random
from pathlib import Path
from typing import Any

import pytest
from tests.caches import eventually
from tests.vllm.any_traffic import serve_any_traffic
from tests.vllm.bench import Bench, prompt
from tests.vllm.driven import Engine
from tests.vllm.fake_runner import TOKENS, continuation
from tests.vllm.plans import copiers, full, group, plan, recurrent, tensors, vllm_config
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm import recurrent as subject
from kvstrata.integration.vllm.geometry import geometry_from_config, pages_from_tensors

small: dict[str, Any] = {"block_size": TOKENS}
ATTENTION = group(full(**small))
STATES = [group(recurrent(**small), first=4), group(recurrent(**small), first=8)]
ORDERS: dict[str, list[KVCacheGroupSpec]] = {
    "one": [ATTENTION, STATES[0]],
    "behind": [ATTENTION, *STATES],
    "around": [STATES[0], ATTENTION, STATES[1]],
}
ANY_ORDER = pytest.mark.parametrize("order", ORDERS)
ANY_SCHEDULER = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
DENSE = None  # vLLM keeps every state that it has at the end of a block, and not the last alone


def engine_of(bench: Bench, order: str = "behind", **settings: Any) -> Engine:
    return bench.engine(groups=ORDERS[order], **settings)


def forget(engine: Engine) -> None:
    """The device has nothing of what it had."""
    engine.forget_device()
    engine.runner.soil()


def loaded(engine: Engine, name: str, tokens: list[int]) -> int:
    """How many of *tokens* were loaded, which are rightly answered."""
    return engine.serve(name, tokens, 3)


def ends(engine: Engine, bench: Bench, name: str) -> list[int]:
    """After how many blocks of that request there is a state in host memory, with the right bytes."""
    return sorted(end for owner, end in bench.check_saved_states(engine) if owner == name)


@ANY_ORDER
@ANY_SCHEDULER
def test_state_at_the_last_block_of_a_prompt_is_saved_and_found_again(
    bench: Bench, order: str, asynchronous: bool
) -> None:
    engine = engine_of(bench, order, asynchronous=asynchronous)
    tokens = prompt(1, 101)
    engine.serve("a", tokens, 3)
    assert ends(engine, bench, "a") == [12]
    assert bench.check_saved_bytes(engine) == 12
    for length, there in ((101, 96), (100, 96), (97, 96), (96, 0), (90, 88), (80, 0)):
        forget(engine)
        assert loaded(engine, f"again-{length}", tokens[:length]) == there


@ANY_ORDER
def test_states_at_the_ends_of_steps_are_saved_where_vllm_keeps_them(
    bench: Bench, order: str
) -> None:
    """Steps of 32 tokens, one that ends with the prompt's last block, and one of the answer."""
    engine = engine_of(bench, order, retention=DENSE)
    tokens = prompt(1, 110)
    engine.serve("a", tokens, 3)
    assert ends(engine, bench, "a") == [4, 8, 12, 13, 14]
    for length, there in ((110, 104), (100, 96), (96, 64), (64, 32), (32, 0)):
        forget(engine)
        assert loaded(engine, f"again-{length}", tokens[:length]) == there


@ANY_SCHEDULER
def test_states_of_an_answer_are_saved_where_vllm_keeps_them(
    bench: Bench, asynchronous: bool
) -> None:
    engine = engine_of(bench, retention=DENSE, asynchronous=asynchronous)
    tokens = prompt(1, 20)
    engine.serve("a", tokens, 30)
    assert ends(engine, bench, "a") == [2, 3, 4, 5, 6]
    forget(engine)
    assert loaded(engine, "b", [*tokens, *continuation(tokens, 25)]) == 40


def test_load_continues_what_the_device_has(bench: Bench) -> None:
    engine = engine_of(bench, retention=DENSE)
    tokens = prompt(1, 150)
    engine.serve("a", tokens, 3)
    forget(engine)
    engine.serve("short", tokens[:65], 3)
    assert loaded(engine, "long", tokens) == 144 - 64


def test_prompt_that_the_device_has_is_not_loaded(bench: Bench) -> None:
    engine = engine_of(bench)
    tokens = prompt(1, 101)
    engine.serve("a", tokens, 3)
    assert loaded(engine, "b", tokens) == 0
    assert bench.counters()["kvstrata_lookups_total"] == 1


def test_prompts_part_at_a_state_or_before_it(bench: Bench) -> None:
    """The second ends in the first's beginning; vLLM computes to where they part, and keeps that."""
    engine = engine_of(bench)
    common = prompt(1, 70)
    engine.serve("a", [*common, *prompt(2, 30)], 3)
    engine.serve("b", [*common, *prompt(3, 30)], 3)
    assert 8 in ends(engine, bench, "b")
    forget(engine)
    assert loaded(engine, "c", [*common, *prompt(4, 30)]) == 64


def test_state_within_a_block_is_vllms_own(bench: Bench) -> None:
    """With hashes of half a block vLLM also goes on from the state after 100 tokens, of which it makes a copy."""
    engine = engine_of(bench, hash_tokens=4)
    copied: list[Any] = []
    execute = engine.runner.execute

    def noted(output: Any) -> Any:
        copied.extend(output.kv_cache_block_copies or ())
        return execute(output)

    engine.runner.execute = noted  # type: ignore[method-assign]  # a spy
    tokens, more = prompt(1, 103), prompt(3, 40)
    engine.serve("a", tokens, 3)
    assert loaded(engine, "b", [*tokens, *more]) == 0
    assert copied
    assert ends(engine, bench, "b") == [12, 17]
    forget(engine)
    assert loaded(engine, "c", [*tokens, *more]) == 136
    forget(engine)
    assert loaded(engine, "d", tokens) == 96


def test_states_are_not_saved_anew(bench: Bench) -> None:
    engine = engine_of(bench)
    tokens = prompt(1, 101)
    engine.serve("a", tokens, 3)
    saved = bench.counters()["kvstrata_saved_blocks_total"]
    assert saved == 12 + 2
    forget(engine)
    engine.serve("b", tokens, 3)
    forget(engine)
    engine.serve("c", tokens, 3)
    assert bench.counters()["kvstrata_saved_blocks_total"] == saved


def test_state_that_has_left_the_cache_is_saved_again(bench: Bench) -> None:
    engine = engine_of(bench)
    tokens = prompt(1, 101)
    engine.serve("a", tokens, 3)
    bench.hears()
    bench.manager.reset(engine.half._namespace)
    forget(engine)
    assert loaded(engine, "b", tokens) == 0
    forget(engine)
    assert loaded(engine, "c", tokens) == 96


@pytest.mark.parametrize("broken", ["attention", "a state"])
def test_failed_load_is_computed_and_nothing_of_it_is_used(
    bench: Bench, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever part fails: the others are in device blocks by then."""
    engine = engine_of(bench)
    tokens = prompt(1, 101)
    engine.serve("a", tokens, 3)
    forget(engine)
    copier: Any = copiers(engine.runner.half)[0 if broken == "attention" else -1]

    def fail(device_blocks: Any, rows: Any) -> None:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(copier, "copy_to_device", fail)
        engine.serve("b", tokens, 3)
    assert bench.counters()["kvstrata_failed_loads_total"] == 1
    forget(engine)
    assert loaded(engine, "c", tokens) == 96


def test_blocks_leave_room_for_a_state(bench: Bench) -> None:
    """A block that waits is offered in the next step; a state is there now or never."""
    engine = engine_of(bench, retention=DENSE)
    engine.half._saves._held._limit = engine.half._math.most_held_at_once
    tokens = prompt(1, 101)
    engine.serve("a", tokens, 3)
    assert ends(engine, bench, "a")


def test_failed_save_of_a_state_is_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(bench)
    tokens = prompt(1, 101)
    copier: Any = copiers(engine.runner.half)[-1]

    def fail(device_blocks: Any, rows: Any) -> None:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(copier, "copy_to_host", fail)
        engine.serve("a", tokens, 3)
    assert bench.check_saved_bytes(engine) == 12
    forget(engine)
    assert loaded(engine, "b", tokens) == 0
    forget(engine)
    assert loaded(engine, "c", tokens) == 96


def test_reset_of_the_cache_forgets_states_and_saves_none_of_running_requests(bench: Bench) -> None:
    engine = engine_of(bench, retention=DENSE)
    tokens = prompt(1, 150)
    engine.add("a", tokens, 20)
    for _ in range(3):
        engine.step()
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.half.reset()
    engine.run()
    assert ends(engine, bench, "a") == []
    forget(engine)
    assert loaded(engine, "b", tokens) == 0


def test_request_that_is_over_before_its_state_is_copied_is_saved_all_the_same(
    bench: Bench,
) -> None:
    engine = engine_of(bench)
    tokens = prompt(1, 101)
    engine.add("a", tokens, 1)
    engine.run()
    eventually(lambda: ends(engine, bench, "a") == [12], "the state is not saved")


@ANY_ORDER
@ANY_SCHEDULER
@pytest.mark.parametrize("retention", [0, DENSE], ids=["sparse", "dense"])
@pytest.mark.parametrize("hash_tokens", [TOKENS, 4], ids=["whole", "fine"])
def test_any_traffic_goes_on_from_right_states(
    bench: Bench,
    order: str,
    asynchronous: bool,
    retention: int | None,
    hash_tokens: int,
) -> None:
    """Preemption, aborts and resets of the device cache among requests that share beginnings.

    With *hash_tokens* less than a block vLLM also keeps states within blocks, for itself.
    """
    rng = random.Random(f"{order} {asynchronous} {retention} {hash_tokens}")
    engine = engine_of(
        bench,
        order,
        asynchronous=asynchronous,
        retention=retention,
        hash_tokens=hash_tokens,
        num_blocks=70,
    )
    serve_any_traffic(bench, engine, rng, asynchronous=asynchronous)
    assert len(bench.check_saved_states(engine)) > 5


# -- what is refused -----------------------------------------------------------------------------


def refusal(config: VllmConfig, *groups: KVCacheGroupSpec) -> str:
    with pytest.raises(ConfigError) as caught:
        geometry_from_config(config, plan(config, *groups))
    return str(caught.value)


def test_other_modes_are_refused_with_the_way_out(tmp_path: Path, folder: Path) -> None:
    for mode in ("none", "all"):
        spec = recurrent(mamba_cache_mode=mode)
        said = refusal(vllm_config(folder), group(full()), group(spec, first=4))
        assert f"mamba_cache_mode is {mode!r}" in said
        assert "--mamba-cache-mode align" in said


def test_model_without_attention_is_refused(folder: Path) -> None:
    assert "no attention" in refusal(vllm_config(folder), group(recurrent()))


def test_several_workers_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = vllm_config(folder)
    monkeypatch.setattr(config.parallel_config, "world_size", 2)
    said = refusal(config, group(full()), group(recurrent(), first=4))
    assert "and 2 workers" in said
    assert "--tensor-parallel-size" in said


def test_drafts_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = vllm_config(folder)
    monkeypatch.setattr(config, "speculative_config", object())
    said = refusal(config, group(full()), group(recurrent(), first=4))
    assert "rejected draft" in said
    assert "--speculative-config" in said


def test_vllm_that_does_not_tell_of_states_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = {"vllm.v1.core.sched.output": {"KVConnectorBlockState": "states_of_long_ago"}}
    monkeypatch.setattr(subject, "RECURRENT", lacking)
    said = refusal(vllm_config(folder), group(full()), group(recurrent(), first=4))
    assert "lacks KVConnectorBlockState.states_of_long_ago" in said


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"tokens_per_block": 16}, "set it to 8"),
        ({"block_format": "int8"}, "leave block_format at exact"),
        ({"load_mode": "layerwise"}, "several KV cache groups"),
    ],
)
def test_settings_that_states_cannot_have_are_refused(
    bench: Bench, setting: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        engine_of(bench, **setting)


# -- where states lie ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_states_have_slots_of_their_own_in_every_layout(folder: Path, layout: str) -> None:
    """The second group has a layer less, and its device blocks a page."""
    config = vllm_config(folder)
    groups = [
        group(full(**small)),
        group(recurrent(**small), first=4),
        group(recurrent(**small), 3, first=8),
    ]
    planned = plan(config, *groups, layout=layout)
    geometry = geometry_from_config(config, planned)
    assert [each.is_recurrent for each in geometry.groups] == [False, True, True]
    assert geometry.rank_bytes(TOKENS) == geometry.groups[0].rank_bytes(TOKENS) == 4096
    assert [each.device_block_bytes for each in geometry.groups] == [4096, 4096, 3072]
    assert geometry.starts(TOKENS) == (0, 0, 0)
    pages = pages_from_tensors(tensors(planned), geometry, planned)
    assert [len(each) for each in pages] == [4, 4, 3]


def test_slot_takes_the_larger_of_a_block_and_a_state(folder: Path) -> None:
    config = vllm_config(folder)
    groups = [group(full(**small), 2), group(recurrent(**small), 4, first=2)]
    geometry = geometry_from_config(config, plan(config, *groups))
    sizes = [each.rank_bytes(TOKENS) for each in geometry.groups]
    assert geometry.rank_bytes(TOKENS) == max(sizes)
    assert sizes == [2048, 4096]
