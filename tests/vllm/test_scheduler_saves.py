"""Which blocks the scheduler half has saved: all that are complete, and no other."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.caches import PATIENCE_SECONDS, eventually
from tests.vllm.bench import Bench, in_all_modes, prompt, start
from tests.vllm.driven import Engine
from tests.vllm.fake_runner import TOKENS
from tests.vllm.plans import copiers
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput

from kvstrata.integration.vllm.metadata import WorkerReport
from kvstrata.server import protocol as p


@in_all_modes
def test_every_complete_block_is_saved_and_no_other(
    bench: Bench, asynchronous: bool, drafts: int
) -> None:
    """41 prompt tokens and 30 sampled: the KV of 70 exist, which are 8 blocks of 8."""
    engine = bench.engine(asynchronous=asynchronous, drafts=drafts)
    engine.watch_frontiers()
    engine.serve("a", prompt(1, 41), 30)
    keys = engine.half._math.keys(engine.requests["a"], 0, 8)
    expected = {engine.half._namespace + key for key in keys}
    assert bench.saved_keys() == expected
    assert bench.check_saved_bytes(engine) == 8
    assert all(f.offered_tokens <= f.known_tokens for f in engine.frontiers)


@in_all_modes
def test_nothing_is_left_to_be_told_behind_a_plan_or_the_end_of_a_request(
    bench: Bench, asynchronous: bool, drafts: int
) -> None:
    """Workers write into slots right behind the plan, and another step may be long in coming."""
    engine = bench.engine(asynchronous=asynchronous, drafts=drafts)
    link, left, told = engine.half._link, [], []

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def look(*arguments: Any) -> Any:
            answer = call(*arguments)
            left.append(link.has_untold)
            return answer

        return look

    tell = link.tell

    def heard(request: p.Request) -> Any:
        told.append(request)
        return tell(request)

    engine.half.plan = watched(engine.half.plan)  # type: ignore[method-assign]  # spies
    engine.half.finished = watched(engine.half.finished)  # type: ignore[method-assign]
    link.tell = heard  # type: ignore[method-assign]
    take_in, reported = engine.half.worker_report, []

    def read(report: WorkerReport) -> None:
        reported.append(len(report.saved))
        take_in(report)

    engine.half.worker_report = read  # type: ignore[method-assign]
    for name in "ab":
        engine.add(name, prompt(ord(name), 41), 30)
    engine.run()
    assert len(left) > 15
    assert not any(left)
    assert len([each for each in told if isinstance(each, p.PutMatch)]) > 4
    ended = [len(each.task_ids) for each in told if isinstance(each, p.Complete)]
    assert ended == [saves for saves in reported if saves]  # all of a step at once
    assert max(ended) > 1


def test_naive_frontier_would_have_named_blocks_that_do_not_exist(bench: Bench) -> None:
    """The sum of computed and scheduled tokens crosses the end of a block before it is known."""
    engine = bench.engine(asynchronous=True, drafts=3)
    engine.watch_frontiers()
    engine.serve("a", prompt(1, 41), 60)
    too_far = [f for f in engine.frontiers if f.naive_tokens // TOKENS > f.known_tokens // TOKENS]
    assert len(too_far) > 3
    assert all(f.offered_tokens <= f.known_tokens for f in too_far)


def tell_placeholders(engine: Engine, *, with_this_step: bool) -> None:
    """*engine* is a vLLM whose output says of each request how many sampled tokens are in flight:

    those of the steps before, or those that this step will sample as well.
    """
    build = engine.connector.build_connector_meta

    def told(output: SchedulerOutput) -> Any:
        counts: dict[str, int] = {}
        for name, tokens in output.num_scheduled_tokens.items():
            request = engine.requests[name]
            counts[name] = request.num_output_placeholders
            if with_this_step and request.num_computed_tokens + tokens >= request.num_tokens:
                counts[name] += 1 + len(output.scheduled_spec_decode_tokens.get(name, ()))
        vars(output)["num_output_placeholders"] = counts
        return build(output)

    engine.connector.build_connector_meta = told


@pytest.mark.parametrize("with_this_step", [False, True])
@pytest.mark.parametrize("drafts", [0, 3])
def test_placeholders_that_vllm_tells_of_are_not_saved(
    bench: Bench, drafts: int, with_this_step: bool
) -> None:
    """Counted with this step's, the last known token waits for the next step or the end."""
    engine = bench.engine(asynchronous=True, drafts=drafts)
    tell_placeholders(engine, with_this_step=with_this_step)
    engine.watch_frontiers()
    engine.serve("a", prompt(1, 41), 30)
    assert len(bench.saved_keys()) == bench.check_saved_bytes(engine) == 8
    late = int(with_this_step)
    known = [f for f in engine.frontiers[:-1] if f.naive_tokens > 41]
    assert len(known) > 2
    assert {f.known_tokens - f.offered_tokens for f in known} == {late}


def test_all_schedulers_save_the_same_blocks(folder: Path) -> None:
    found = []
    for asynchronous, drafts in [(False, 0), (True, 0), (False, 3), (True, 3)]:
        with start(folder, 400) as bench:
            engine = bench.engine(asynchronous=asynchronous, drafts=drafts)
            for i in range(4):
                engine.add(f"r{i}", prompt(i % 3, 50 + 7 * i), 21)
            engine.run()
            found.append(bench.saved_keys())
            assert bench.check_saved_bytes(engine) == len(found[-1])
    assert len(found[0]) > 25
    assert found[1:] == [found[0]] * 3


def test_second_request_of_a_prompt_saves_nothing_again(bench: Bench) -> None:
    engine = bench.engine()
    engine.serve("a", prompt(1, 64), 2)
    saved = bench.counters()["kvstrata_saved_blocks_total"]
    engine.serve("b", prompt(1, 64), 2)
    engine.forget_device()
    engine.serve("c", prompt(1, 64), 2)
    assert bench.counters()["kvstrata_saved_blocks_total"] == saved == 8


@in_all_modes
def test_what_the_server_has_evicted_is_saved_again(
    folder: Path, asynchronous: bool, drafts: int
) -> None:
    """12 slots of host memory: two other prompts of 8 blocks drive the first one out."""
    with start(folder, 12) as bench:
        engine = bench.engine(asynchronous=asynchronous, drafts=drafts)
        for name, tokens in [("a", prompt(1, 64)), ("b", prompt(2, 64)), ("c", prompt(3, 64))]:
            engine.serve(name, tokens, 2)
        engine.forget_device()
        assert engine.serve("again", prompt(1, 64), 2) == 0
        engine.forget_device()
        assert engine.serve("and again", prompt(1, 64), 2) == 64


@in_all_modes
def test_blocks_that_vllm_has_back_are_on_their_way_to_the_server(
    bench: Bench, asynchronous: bool, drafts: int
) -> None:
    """No step need follow, so that what another engine asks for next is found."""
    engine = bench.engine(asynchronous=asynchronous, drafts=drafts)
    engine.add("a", prompt(1, 41), 1)

    def has_them_back() -> bool:
        engine.step()
        return bool(engine.pool.get_num_free_blocks() == engine.all_free)

    eventually(has_them_back, "the save does not end")
    eventually(lambda: not bench.manager.stats().running_puts, "the server has not heard of it")
    assert len(bench.saved_keys()) == 5


@contextlib.contextmanager
def copies_last(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No copy out of *engine*'s device blocks ends meanwhile."""
    copier: Any = copiers(engine.runner.half)[0]
    real, go = copier.copy_to_host, threading.Event()

    def held(device_blocks: Any, rows: Any) -> None:
        assert go.wait(PATIENCE_SECONDS)
        real(device_blocks, rows)

    monkeypatch.setattr(copier, "copy_to_host", held)
    try:
        yield
    finally:
        go.set()


def test_saves_of_running_requests_do_not_put_off_a_preemption(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 device blocks for two requests that need 25 each."""
    engine = bench.engine(num_blocks=31)
    with copies_last(engine, monkeypatch):
        requests = [engine.add(f"r{seed}", prompt(seed, 40), 60) for seed in range(2)]
        for _ in range(80):
            engine.step()
        assert engine.half._saves.busy
        assert [request.num_preemptions for request in requests] == [0, 1]
    engine.run()


@pytest.mark.parametrize("is_over", [True, False])
def test_vllm_is_told_to_wait_for_blocks_that_only_saves_hold(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    engine = bench.engine()
    with copies_last(engine, monkeypatch):
        request = engine.add("a", prompt(1, 40), 4 if is_over else 60)
        for _ in range(12):
            engine.step()
        assert request.is_finished() is is_over
        assert engine.half._saves.busy
        assert engine.connector.has_pending_block_frees() is is_over
    engine.run()
    assert not engine.connector.has_pending_block_frees()


@pytest.mark.parametrize("looked_at", [[], ["r0"]], ids=["no server", "no room"])
def test_what_cannot_be_saved_now_costs_no_copy_of_block_tables(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, looked_at: list[str]
) -> None:
    """Only one block at a time may be saved."""
    engine = bench.engine(max_saving_blocks=2)
    copied = list[str]()
    real = KVConnectorBlockState.get_block_ids

    def counted(state: KVConnectorBlockState, request_id: str) -> Any:
        copied.append(request_id)
        return real(state, request_id)

    monkeypatch.setattr(KVConnectorBlockState, "get_block_ids", counted)
    if not looked_at:
        engine.half._link.close()
    with copies_last(engine, monkeypatch):
        for i in range(3):
            engine.add(f"r{i}", prompt(i, 60), 40)
        for _ in range(20):
            engine.step()
        assert copied == looked_at
    engine.run()
    assert (len(copied) > 1) is bool(looked_at)
