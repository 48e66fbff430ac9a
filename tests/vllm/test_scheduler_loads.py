"""What the scheduler half has loaded, and when it asks for nothing."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.caches import PATIENCE_SECONDS, eventually
from tests.vllm.bench import Bench, all_are_settled, in_all_modes, prompt, start
from tests.vllm.driven import Engine
from tests.vllm.fake_runner import DEVICE_TOKENS, TOKENS, continuation
from vllm.v1.request import Request

from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.metadata import StepPlan
from kvstrata.storage.shared_fs import SharedFsStore


@in_all_modes
def test_loaded_pages_are_what_the_forward_had_written(
    bench: Bench, asynchronous: bool, drafts: int
) -> None:
    engine = bench.engine(asynchronous=asynchronous, drafts=drafts)
    engine.serve("a", prompt(1, 83), 5)
    engine.forget_device()
    engine.runner.soil()
    assert engine.serve("b", prompt(1, 83), 5) == 80
    assert bench.counters()["kvstrata_loaded_blocks_total"] == 10


def test_plan_has_one_load_for_each_request(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bench.engine()
    engine.serve("a", prompt(1, 60), 2)
    engine.serve("b", prompt(2, 40), 2)
    engine.forget_device()
    build, plans = engine.connector.build_connector_meta, list[Any]()

    def noted(output: Any) -> Any:
        plans.append(build(output))
        return plans[-1]

    monkeypatch.setattr(engine.connector, "build_connector_meta", noted)
    engine.add("c", prompt(1, 60), 2)
    engine.add("d", prompt(2, 40), 2)
    engine.run()
    loads = [load for plan in plans for load in plan.loads]
    assert sorted((load.request_id, len(load.slots)) for load in loads) == [("c", 7), ("d", 5)]


def test_every_step_has_a_plan_also_one_with_nothing_to_do(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bench.engine()
    build, plans = engine.connector.build_connector_meta, list[Any]()

    def noted(output: Any) -> Any:
        plans.append(build(output))
        return plans[-1]

    monkeypatch.setattr(engine.connector, "build_connector_meta", noted)
    engine.serve("short", prompt(1, 3), 4)  # too short to be found or saved
    assert len(plans) > 3
    assert all(isinstance(each, StepPlan) for each in plans)
    assert not any(each.loads or each.saves for each in plans)


def test_another_engine_loads_what_the_first_has_saved(bench: Bench) -> None:
    first, second = bench.engine(), bench.engine(asynchronous=True)
    first.serve("a", prompt(1, 60), 30)
    assert second.serve("b", prompt(1, 60) + continuation(prompt(1, 60), 30), 4) == 88


def test_request_that_awaits_its_blocks_loads_them_when_they_come(bench: Bench) -> None:
    """The decode half of a pair: it is asked before the other engine has saved anything."""
    first, second = bench.engine(), bench.engine()
    second.add("b", prompt(1, 64), 4, {"kvstrata_wait_seconds": PATIENCE_SECONDS})
    for _ in range(20):
        second.step()
    assert second.requests["b"].num_computed_tokens == 0
    first.serve("a", prompt(1, 64), 1)
    second.run()
    assert second.runner.loaded_tokens["b"] == 64
    assert list(second.requests["b"].output_token_ids) == continuation(prompt(1, 64), 4)


@pytest.mark.parametrize("seconds", [0, 0.05, -1, 1e9, "2", True, None, float("nan")])
def test_request_whose_blocks_do_not_come_is_computed(bench: Bench, seconds: object) -> None:
    engine = bench.engine()
    request = engine.add("a", prompt(1, 64), 4, {"kvstrata_wait_seconds": seconds})
    engine.run()
    assert list(request.output_token_ids) == continuation(prompt(1, 64), 4)
    assert not engine.half._loads._awaits._until


def test_load_begins_within_a_block_where_the_device_has_its_beginning(bench: Bench) -> None:
    """The device holds 12 tokens, a block and a half: the other half and the rest are loaded."""
    engine = bench.engine()
    tokens = prompt(1, 60)
    engine.serve("a", tokens, 1)
    engine.forget_device()
    engine.runner.soil()
    half = engine.half._loads
    config = half._config
    half._config = config.model_copy(update={"lookup_timeout_seconds": 1e-9})
    engine.half._link._welcomed = False  # no cache: the 13 tokens are computed
    engine.serve("b", tokens[:13], 1)
    half._config = config
    engine.half._link._welcomed = True
    assert engine.serve("c", tokens, 3) == 56 - 12


def test_prompt_that_is_cached_to_its_last_token_is_answered(bench: Bench) -> None:
    engine = bench.engine()
    engine.serve("a", prompt(1, 64), 9)
    engine.forget_device()
    assert engine.serve("b", prompt(1, 64), 9) == 64


@pytest.mark.parametrize("taken", [8, 40, 52])
def test_of_a_match_no_more_is_loaded_than_vllm_takes(bench: Bench, taken: int) -> None:
    engine = bench.engine()
    engine.serve("a", prompt(1, 60), 2)
    engine.forget_device()
    match = engine.connector.get_num_new_matched_tokens

    def match_less(request: Request, computed: int) -> tuple[int | None, bool]:
        found, is_asynchronous = match(request, computed)
        return found and min(found, taken), is_asynchronous

    engine.connector.get_num_new_matched_tokens = match_less
    assert engine.serve("b", prompt(1, 60), 2) == taken
    eventually(lambda: engine.holds_nothing(bench.manager), "a lease is kept")


def test_hooks_called_again_and_again_change_nothing(bench: Bench) -> None:
    engine = bench.engine()
    engine.serve("a", prompt(1, 60), 2)
    engine.forget_device()
    connector = engine.connector
    match, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
    arrived, answers = connector.on_new_request, []

    def arrived_twice(request: Request) -> None:
        arrived(request)
        arrived(request)

    def match_often(request: Request, computed: int) -> Any:
        answers.append([match(request, computed) for _ in range(5)])
        return answers[-1][-1]

    def allocated_twice(request: Request, blocks: Any, tokens: int) -> None:
        allocated(request, blocks, tokens)
        allocated(request, blocks, tokens)

    connector.on_new_request = arrived_twice
    connector.get_num_new_matched_tokens = match_often
    connector.update_state_after_alloc = allocated_twice
    assert engine.serve("b", prompt(1, 60), 2) == 56
    assert [set(answer) for answer in answers] == [{(56, True)}]
    assert bench.counters()["kvstrata_loaded_blocks_total"] == 7


def test_reset_makes_nothing_found(bench: Bench) -> None:
    engine = bench.engine()
    engine.serve("a", prompt(1, 60), 2)
    assert len(bench.saved_keys()) == 7
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    eventually(lambda: not bench.saved_keys(), "the server keeps the old blocks")
    assert engine.serve("b", prompt(1, 60), 2) == 0
    engine.forget_device()
    assert engine.serve("c", prompt(1, 60), 2) == 56


def test_what_was_found_before_a_reset_is_not_loaded_after_it(bench: Bench) -> None:
    """The server is asked when a request arrives, and has answered by the time of the reset."""
    engine = bench.engine()
    engine.serve("a", prompt(1, 60), 2)
    engine.forget_device()
    engine.add("b", prompt(1, 60), 2)
    lookup = engine.half._loads._lookups["b"]

    def is_answered() -> bool:
        engine.half._link.poll(0.0)
        return lookup.status is not None

    eventually(is_answered, "no answer")
    engine.connector.reset_cache()
    engine.run()
    assert "b" not in engine.runner.loaded_tokens


def test_reset_while_requests_run_leaves_nothing_of_before(bench: Bench) -> None:
    engine = bench.engine(asynchronous=True)
    for i in range(3):
        engine.add(f"r{i}", prompt(i, 70), 20)
    for _ in range(8):
        engine.step()
    old = engine.half._namespace
    engine.connector.reset_cache()
    engine.run()
    assert engine.half._namespace != old
    eventually(
        lambda: not any(key.startswith(old) for key in bench.saved_keys()), "old blocks stay"
    )
    for i in range(3):
        engine.forget_device()
        assert engine.serve(f"s{i}", prompt(i, 70), 1) == 0


@in_all_modes
def test_what_one_node_has_computed_is_loaded_on_another(
    folder: Path, asynchronous: bool, drafts: int
) -> None:
    """Two servers, one after the other, that have nothing in common but a directory."""
    tokens = prompt(1, 64)
    for expected in (0, 64):
        with start(folder, 20, shared=folder / "shared") as bench:
            engine = bench.engine(
                asynchronous=asynchronous, drafts=drafts, remote_lookup_seconds=20
            )
            assert engine.serve("a", tokens, 2) == expected
            assert bench.check_saved_bytes(engine) == 8
            assert bench.manager._lower["remote"].drain(PATIENCE_SECONDS)


@contextmanager
def crowded(folder: Path, ends: Sequence[int]) -> Iterator[tuple[Bench, Engine, list[int]]]:
    """Host memory takes four of five prompts of 10 blocks from the tier below, and has not the first one.

    Others lease the blocks of prompts 1 to 4 up to *ends*; their tasks.
    """
    with start(folder, 40, shared=folder / "shared", recompute="never") as bench:
        engine = bench.engine(remote_lookup_seconds=20)
        for seed in range(5):
            engine.serve(f"a{seed}", prompt(seed, 83), 1)
            assert bench.manager._lower["remote"].drain(PATIENCE_SECONDS)
        engine.forget_device()
        math, namespace = engine.half._math, engine.half._namespace
        others = [
            bench.manager.get_match(namespace, math.keys(engine.requests[f"a{seed}"], 0, end))
            for seed, end in enumerate(ends, 1)
        ]
        yield bench, engine, [other.task_id for other in others]


def test_what_had_no_room_when_a_request_came_is_loaded_once_it_has_its_turn(folder: Path) -> None:
    """Others have all of host memory."""
    with crowded(folder, [10] * 4) as (bench, engine, others):
        manager = bench.manager
        found = manager.wait(others, PATIENCE_SECONDS)
        assert [len(found[task_id].slots) for task_id in others] == [10] * 4
        engine.add("b", prompt(0, 83), 1)
        eventually(lambda: all_are_settled(engine), "the tier below does not answer")
        lookup = engine.half._loads._lookups["b"]
        assert lookup.status is not None
        assert not lookup.status.slots
        assert lookup.status.declined_blocks == 10
        time.sleep(0.2)  # in vLLM's queue
        manager.cancel(others)
        engine.run()
        assert engine.runner.loaded_tokens["b"] == 80


def test_what_had_room_is_loaded_though_the_server_is_too_slow_to_be_asked_for_more(
    folder: Path,
) -> None:
    """Others have all but 5 blocks of host memory."""
    with crowded(folder, [5, 10, 10, 10]) as (bench, engine, others):
        manager = bench.manager
        manager.wait(others, PATIENCE_SECONDS)
        engine.add("b", prompt(0, 83), 1)
        eventually(lambda: all_are_settled(engine), "the tier below does not answer")
        lookup = engine.half._loads._lookups["b"]
        eventually(lambda: lookup.may_find_more, "all of it has room")
        engine.half._link.too_slow()  # as a lookup or a save of another request finds
        engine.step()
        manager.cancel(others)
        engine.run()
        assert engine.runner.loaded_tokens["b"] == 40


def test_requests_in_line_leave_room_for_one_whose_turn_has_come(folder: Path) -> None:
    """Host memory takes four of five prompts from the tier below, and four wait in line."""
    with start(folder, 40, shared=folder / "shared", recompute="never") as bench:
        engine, other = (bench.engine(remote_lookup_seconds=20) for _ in range(2))
        for seed in range(5):
            engine.serve(f"a{seed}", prompt(seed, 83), 1)
            assert bench.manager._lower["remote"].drain(PATIENCE_SECONDS)
        engine.forget_device()
        in_line = [f"b{seed}" for seed in range(4)]
        for seed, name in enumerate(in_line):
            engine.add(name, prompt(seed, 83), 1)
        eventually(lambda: all_are_settled(engine), "the tier below does not answer")
        assert other.serve("c", prompt(4, 83), 1) == 80

        def one_is_looked_up() -> bool:
            return other.is_at_rest() and bench.manager.stats().leased_blocks == 10

        eventually(one_is_looked_up, "a load is not over, or others have been looked up")
        engine.run()
        assert [engine.runner.loaded_tokens[name] for name in in_line] == [80] * 4


def test_those_whose_turn_has_come_keep_half_of_host_memory_behind_the_first_that_waits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks for each in line while the first ones wait for their answers; an idle one, in each millisecond."""
    with start(folder, 40) as bench:
        engine = bench.engine()
        for seed in range(4):
            engine.serve(f"a{seed}", prompt(seed, 83), 1)
        engine.forget_device()
        loads = engine.half._loads
        monkeypatch.setattr(loads, "_settled", lambda lookup: False)
        for seed in range(4):
            engine.add(f"b{seed}", prompt(seed, 83), 1)
        asked = [len(loads._lookups)]
        for _ in range(4):
            engine.step()
            asked.append(len(loads._lookups))
        assert asked == [1, 2, 2, 2, 2]
        monkeypatch.undo()
        engine.run()
        assert [engine.runner.loaded_tokens[f"b{seed}"] for seed in range(4)] == [80] * 4


def test_all_in_line_are_loaded_whole_though_the_tier_below_is_slow(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory takes four of eight prompts. Engines step often while they wait for a promotion."""
    read = SharedFsStore.read_into

    def slow(self: SharedFsStore, *args: Any) -> Any:
        time.sleep(0.02)  # ten steps and more
        return read(self, *args)

    prompts = range(8)
    with start(folder, 40, shared=folder / "shared", recompute="never") as bench:
        engine = bench.engine(remote_lookup_seconds=20)
        for seed in (*prompts, *range(100, 104)):  # the last four are those in host memory
            engine.serve(f"a{seed}", prompt(seed, 83), 1)
            assert bench.manager._lower["remote"].drain(PATIENCE_SECONDS)
        engine.forget_device()
        monkeypatch.setattr(SharedFsStore, "read_into", slow)
        for seed in prompts:
            engine.add(f"b{seed}", prompt(seed, 83), 1)
        engine.run()
        assert [engine.runner.loaded_tokens.get(f"b{seed}", 0) for seed in prompts] == [80] * 8


def test_all_that_await_their_blocks_load_them_whole(tmp_path: Path, folder: Path) -> None:
    """The decode node's host memory takes four of eight prompts, which are asked for again and again."""
    prompts = range(8)
    nodes = [
        tmp_path / name / "model" for name in ("prefill", "decode")
    ]  # sockets' paths are short
    for node in nodes:
        node.mkdir(parents=True)
        (node / "config.json").write_text((folder / "config.json").read_text())
    shared = folder / "shared"
    with (
        start(nodes[0], 400, shared=shared, recompute="never") as prefill,
        start(nodes[1], 40, shared=shared, recompute="never") as decode,
    ):
        first = prefill.engine(remote_lookup_seconds=20)
        second = decode.engine(remote_lookup_seconds=20)
        for seed in prompts:
            second.add(f"b{seed}", prompt(seed, 83), 1, {"kvstrata_wait_seconds": PATIENCE_SECONDS})
        for _ in range(20):
            second.step()
        assert {request.num_computed_tokens for request in second.requests.values()} == {0}
        for seed in prompts:
            first.serve(f"a{seed}", prompt(seed, 83), 1)
        assert prefill.manager._lower["remote"].drain(PATIENCE_SECONDS)
        second.run()
        assert [second.runner.loaded_tokens.get(f"b{seed}", 0) for seed in prompts] == [80] * 8


def test_a_prompt_longer_than_the_bound_is_asked_for_ahead_if_nobody_else_is(folder: Path) -> None:
    with start(folder, 40) as bench:
        engine = bench.engine()
        engine.add("long", prompt(1, 163), 1)
        assert set(engine.half._loads._lookups) == {"long"}
        engine.run()


def test_blocks_that_are_not_whole_device_blocks_are_refused(bench: Bench) -> None:
    message = (
        f"tokens_per_block = {TOKENS + 1} is no multiple of vLLM's block size of {DEVICE_TOKENS}"
    )
    with pytest.raises(ConfigError, match=message):
        bench.engine(tokens_per_block=TOKENS + 1)


def test_lossy_blocks_have_a_namespace_of_their_own(folder: Path) -> None:
    namespaces = set()
    for block_format in ("exact", "int8"):
        with start(folder, 20, block_format=block_format) as bench:
            engine = bench.engine(block_format=block_format)
            engine.serve("a", prompt(1, 64), 2)
            engine.forget_device()
            assert engine.serve("again", prompt(1, 64), 2) == 64
            namespaces.add(engine.half._namespace)
            parts = bench.manager.stats().namespaces[0].parts
            assert parts.get("block_format", "exact").split()[0] == block_format
    assert len(namespaces) == 2
