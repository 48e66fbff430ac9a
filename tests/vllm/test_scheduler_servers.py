"""The scheduler half before servers that are slow, or gone."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.caches import PATIENCE_SECONDS, eventually
from tests.vllm.bench import Bench, all_are_settled, prompt, serve, start
from tests.vllm.driven import Engine
from tests.vllm.fake_runner import continuation
from tests.vllm.plans import copiers
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvstrata.manager.manager import KVManager
from kvstrata.manager.tasks import TaskState


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Call it and lookups are not answered before the end of the test."""
    go = threading.Event()
    real = KVManager.get_match

    def begin() -> None:
        def waiting(*args: Any, **kwargs: Any) -> Any:
            assert go.wait(PATIENCE_SECONDS)
            return real(*args, **kwargs)

        monkeypatch.setattr(KVManager, "get_match", waiting)

    yield begin
    go.set()


def answers_of(engine: Engine) -> list[tuple[int | None, bool]]:
    """To vLLM's questions from now on."""
    answers: list[tuple[int | None, bool]] = []
    match = engine.connector.get_num_new_matched_tokens

    def spy(request: Request, computed: int) -> Any:
        answers.append(match(request, computed))
        return answers[-1]

    engine.connector.get_num_new_matched_tokens = spy
    return answers


def test_silent_server_is_waited_for_until_the_timeout_and_no_longer(
    bench: Bench, silence: Callable[[], None]
) -> None:
    engine = bench.engine(lookup_wait_seconds=0.001, lookup_timeout_seconds=0.2)
    engine.serve("a", prompt(1, 60), 2)
    engine.forget_device()
    silence()
    answers = answers_of(engine)
    assert engine.serve("b", prompt(1, 60), 2) == 0
    assert answers[0] == (None, False)
    assert answers[-1] == (0, False)
    assert set(answers[:-1]) == {(None, False)}
    assert not engine.half._link.ready
    assert engine.serve("c", prompt(2, 60), 2) == 0


@pytest.mark.parametrize("is_alone", [True, False])
def test_an_answer_is_waited_for_longer_where_the_step_would_run_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    engine = bench.engine(lookup_wait_seconds=0.2, lookup_timeout_seconds=PATIENCE_SECONDS)
    engine.serve("a", prompt(1, 60), 2)
    engine.forget_device()
    if not is_alone:
        engine.add("other", prompt(2, 8), 40)
        engine.step()
    real = KVManager.get_match

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.4)
        return real(*args, **kwargs)

    monkeypatch.setattr(KVManager, "get_match", slow)
    answers = answers_of(engine)
    engine.add("b", prompt(1, 60), 2)
    engine.run()
    assert (answers[0][0] is not None) is is_alone
    assert answers[-1][0] == 56


def test_an_answer_is_waited_for_no_longer_than_the_timeout(bench: Bench) -> None:
    engine = bench.engine(lookup_wait_seconds=0.2, lookup_timeout_seconds=0.5)
    engine.add("alone", prompt(1, 8), 2)
    assert engine.half._lookup_wait_seconds == 0.5
    engine.add("other", prompt(2, 8), 2)
    assert engine.half._lookup_wait_seconds == 0.2
    engine.run()


def test_server_that_answers_again_is_used_again(
    bench: Bench, silence: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bench.engine(lookup_wait_seconds=0.001, lookup_timeout_seconds=0.1)
    engine.serve("a", prompt(1, 60), 2)
    engine.forget_device()
    with monkeypatch.context() as patch:
        go = threading.Event()
        real = KVManager.get_match
        patch.setattr(
            KVManager, "get_match", lambda *a, **k: go.wait(PATIENCE_SECONDS) and real(*a, **k)
        )
        engine.serve("b", prompt(1, 60), 2)
        assert not engine.half._link.ready
        go.set()

    def answers() -> bool:
        engine.half._link.tick()
        return engine.half._link.ready

    eventually(answers, "the link is not taken up again")
    eventually(lambda: bench.manager.stats().running_gets == 0, "the late answer keeps its lease")
    engine.forget_device()
    assert engine.serve("c", prompt(1, 60), 2) == 56


def with_answer(bench: Bench) -> Engine:
    """Its request *b*, which asks for what *a* was, has been answered and is not scheduled yet."""
    engine = bench.engine()
    engine.serve("a", prompt(1, 60), 2)
    engine.forget_device()
    engine.add("b", prompt(1, 60), 2)
    eventually(lambda: all_are_settled(engine), "no answer comes")
    return engine


def test_what_a_server_has_answered_is_loaded_though_it_is_slow_now(bench: Bench) -> None:
    engine = with_answer(bench)
    engine.half._link.too_slow()  # as a lookup or a save of another request finds
    assert not engine.half._link.ready
    engine.step()
    engine.run()
    assert engine.runner.loaded_tokens == {"b": 56}
    assert list(engine.requests["b"].output_token_ids) == continuation(prompt(1, 60), 2)


def test_what_a_server_that_is_gone_has_answered_is_not_loaded(bench: Bench) -> None:
    engine = with_answer(bench)
    link = engine.half._link
    assert link._client is not None
    link._client.shutdown()
    link.poll(PATIENCE_SECONDS)
    assert not link.connected
    answers = answers_of(engine)
    engine.step()
    assert answers == [(0, False)]
    engine.run()
    assert list(engine.requests["b"].output_token_ids) == continuation(prompt(1, 60), 2)


def test_server_that_dies_costs_hits_and_the_next_one_is_filled(folder: Path) -> None:
    with start(folder, 100) as first:
        engine = first.engine(asynchronous=True)
        engine.serve("a", prompt(1, 60), 2)
        first.engines.clear()
    try:
        engine.add("b", prompt(2, 60), 20)
        engine.run()
        assert engine.is_at_rest()
        with start(folder, 100) as second:
            engine.ready(second.manager)
            engine.forget_device()
            assert engine.serve("c", prompt(1, 60), 2) == 0
            engine.forget_device()
            assert engine.serve("d", prompt(1, 60), 2) == 56
    finally:
        engine.close()


def test_first_prompt_after_a_restart_of_the_server_is_loaded(folder: Path) -> None:
    """The engine did nothing meanwhile: its two halves have come back by themselves."""
    shared = folder / "shared"
    with start(folder, 100, shared=shared) as first:
        engine = first.engine()
        engine.serve("a", prompt(1, 60), 2)
        engine.forget_device()
        first.hears()
        first.engines.clear()
    try:
        with start(folder, 100, shared=shared) as second:

            def is_whole() -> bool:
                return [each["workers"] for each in second.manager.stats().engines] == [[0]]

            eventually(is_whole, "the idle engine does not come back")
            eventually(lambda: engine.half._link._redial._welcomed is not None, "no welcome")
            assert engine.serve("b", prompt(1, 60), 2) == 56
    finally:
        engine.close()


def test_load_of_the_old_server_never_passes_for_one_of_the_new(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is made anew between vLLM's question and the plan: the slots are still the old's."""
    engine = bench.engine()
    engine.serve("a", prompt(1, 60), 2)
    engine.forget_device()
    link, half = engine.half._link, engine.half
    old, plans = link.server_id, list[Any]()
    allocated, planned = half.allocated, half.plan

    def slow(*args: Any) -> None:
        allocated(*args)
        assert link._client is not None
        link._client.shutdown()
        eventually(lambda: link._redial._welcomed is not None, "the line is not made anew")
        monkeypatch.setattr(bench.manager, "server_id", b"another".ljust(len(old), b"."))
        link._redial._welcomed.client.welcome.reply.server_id = bench.manager.server_id  # type: ignore[union-attr]  # it is there
        link._next_look = 0.0  # the plan looks

    def noted(output: SchedulerOutput) -> Any:
        plans.append(planned(output))
        return plans[-1]

    with monkeypatch.context() as patch:
        patch.setattr(half, "allocated", slow)
        patch.setattr(half, "plan", noted)
        engine.add("b", prompt(1, 60), 2)
        engine.step()
    assert [(len(plan.loads), plan.server_id) for plan in plans] == [(1, old)]
    assert link.server_id != old
    engine.run()
    assert list(engine.requests["b"].output_token_ids) == continuation(prompt(1, 60), 2)


def test_line_that_breaks_while_workers_copy_costs_no_slot(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers stay: the slots that they write to are nobody else's until they have ended."""
    engine = bench.engine()
    copier: Any = copiers(engine.runner.half)[0]
    real, entered, go = copier.copy_to_host, threading.Event(), threading.Event()

    def held(device_blocks: Any, rows: Any) -> None:
        entered.set()
        assert go.wait(PATIENCE_SECONDS)
        real(device_blocks, rows)

    monkeypatch.setattr(copier, "copy_to_host", held)
    engine.add("a", prompt(1, 60), 2)

    def all_are_being_saved() -> bool:
        engine.step()
        puts = [*bench.manager._puts.tasks.values()]
        running = [put for put in puts if put.state is TaskState.RUNNING]
        return entered.is_set() and sum(len(put.slots) for put in running) == 7

    eventually(all_are_being_saved, "no copies begin")
    link, sessions = engine.half._link, bench.manager._sessions
    for number in (2, 3):
        assert link._client is not None
        link._client.shutdown()

        def is_back(number: int = number) -> bool:
            link.tick()
            return link.number == number and link.ready

        eventually(is_back, "the line stays broken")
        eventually(lambda: len(sessions.describe()) == 1, "the old connection stays")
        assert len(sessions.orphaned_slots()) == 7
        bench.manager.check()
    go.set()
    engine.run()
    eventually(lambda: sessions.orphaned_slots() == [], "slots are kept")
    engine.forget_device()
    engine.serve("b", prompt(1, 60), 2)
    assert len(bench.saved_keys()) == bench.check_saved_bytes(engine) == 7


def test_reset_that_the_server_did_not_carry_out_is_asked_of_the_next_connection(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its blocks would be there again for the next life of the engine."""
    engine = bench.engine()
    engine.serve("a", prompt(1, 60), 2)
    real, asked = KVManager.forget, list[bytes]()

    def dying(manager: KVManager, namespace: bytes) -> int:
        asked.append(namespace)
        if len(asked) == 1:
            client = engine.half._link._client
            assert client is not None
            client.shutdown()
            raise OSError("the connection ends here")
        return real(manager, namespace)

    monkeypatch.setattr(KVManager, "forget", dying)
    old = engine.half._namespace
    engine.connector.reset_cache()

    def dropped() -> bool:
        engine.half._link.tick()
        return bench.saved_keys() == set()

    eventually(dropped, "the old blocks stay")
    assert asked == [old, old]
    engine.ready(bench.manager)
    engine.half._link.poll(0.05)
    assert engine.half._link._resets == {}
    assert engine.serve("b", prompt(1, 60), 2) == 0


@pytest.mark.parametrize("missing", [0, 1])
def test_engine_whose_workers_do_not_all_come_says_how_many_have(
    folder: Path, missing: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As where Ray has put some on another machine: nothing else of the engine would show it."""
    with serve(folder, 20, ranks=2) as bench:
        engine = Engine(folder, bench.server.path, ranks=2, start_timeout_seconds=0.5)
        bench.engines.append(engine)
        try:
            for attachment in engine.attachments[2 - missing :]:
                attachment.close()
            link = engine.half._link
            eventually(
                lambda: (
                    [each["workers"] for each in bench.manager.stats().engines]
                    == [[*range(2 - missing)]]
                ),
                "a worker stays",
            )

            def is_counted() -> bool:
                link.tick()
                return link._count_at == math.inf and link._counted is None

            eventually(is_counted, "the workers are not counted")
            engine.serve("a", prompt(1, 60), 2)
            engine.forget_device()
            assert engine.serve("b", prompt(1, 60), 2) == (0 if missing else 56)
            said = [m for m in caplog.messages if "workers have mapped the host tier" in m]
            assert [m.split(":")[0] for m in said] == [
                "1 of 2 workers have mapped the host tier within 0.5 s"
            ][:missing]
        finally:
            engine.close()
