import os
import threading
from collections.abc import Callable, Iterator

import pytest

from kvstrata.transfer.lanes import Handle, Lane, Lanes, Outcome

PATIENCE_SECONDS = 10.0  # only a broken executor takes that long


class Gate:
    """A job that reports that it runs and goes on when told."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()

    def __call__(self, handle: Handle[str]) -> str:
        self.entered.set()
        assert self.go.wait(PATIENCE_SECONDS)
        return "stopping" if handle.stopping else "done"


@pytest.fixture
def lanes() -> Iterator[Lanes[str]]:
    made = Lanes[str](limit=3)
    yield made
    assert made.close(PATIENCE_SECONDS)


def says(text: str, log: list[str]) -> Callable[[Handle[str]], str]:
    def job(_: Handle[str]) -> str:
        log.append(text)
        return text

    return job


def poll(lanes: Lanes[str], count: int) -> list[Handle[str]]:
    ended: list[Handle[str]] = []
    while len(ended) < count:
        assert lanes.wait(PATIENCE_SECONDS)
        ended += lanes.poll()
    assert len(ended) == count
    return ended


@pytest.mark.parametrize("is_there", [True, False])
def test_threads_run_on_the_processors_that_they_were_given_if_there_are_such(
    is_there: bool,
) -> None:
    ours = frozenset(os.sched_getaffinity(0))
    wanted = frozenset([min(ours) if is_there else 1 << 14])
    lanes = Lanes[frozenset[int]](cpus=wanted)
    handle = lanes.submit(lambda _: frozenset(os.sched_getaffinity(0)), Lane.SAVE)
    assert lanes.wait_for(handle, PATIENCE_SECONDS)
    assert handle.result == (wanted if is_there else ours)
    assert frozenset(os.sched_getaffinity(0)) == ours
    assert lanes.close(PATIENCE_SECONDS)


def test_loads_overtake_saves_and_each_lane_keeps_its_order(lanes: Lanes[str]) -> None:
    gate, log = Gate(), list[str]()
    lanes.submit(gate, Lane.SAVE)
    assert gate.entered.wait(PATIENCE_SECONDS)
    for text, lane in [("s1", Lane.SAVE), ("l1", Lane.LOAD), ("s2", Lane.SAVE), ("l2", Lane.LOAD)]:
        lanes.submit(says(text, log), lane)
    gate.go.set()
    ended = poll(lanes, 5)
    assert log == ["l1", "l2", "s1", "s2"]
    assert [h.result for h in ended] == ["done", "l1", "l2", "s1", "s2"]
    assert {h.outcome for h in ended} == {Outcome.DONE}


def test_exception_ends_its_job_and_no_other(lanes: Lanes[str]) -> None:
    def broken(_: Handle[str]) -> str:
        raise ZeroDivisionError("no")

    first = lanes.submit(broken, Lane.LOAD)
    second = lanes.submit(says("fine", []), Lane.LOAD)
    assert poll(lanes, 2) == [first, second]
    assert first.outcome is Outcome.FAILED
    assert isinstance(first.error, ZeroDivisionError)
    assert second.result == "fine"


def test_every_job_is_polled_once(lanes: Lanes[str]) -> None:
    handle = lanes.submit(says("x", []), Lane.SAVE)
    assert poll(lanes, 1) == [handle]
    assert lanes.poll() == []
    assert not lanes.wait(0.0)


def test_full_lane_refuses_until_ended_jobs_are_polled(lanes: Lanes[str]) -> None:
    gate = Gate()
    lanes.submit(gate, Lane.SAVE)
    lanes.submit(gate, Lane.SAVE)
    lanes.submit(gate, Lane.SAVE)
    log = list[str]()
    refused = lanes.submit(says("never", log), Lane.SAVE)
    assert refused.outcome is Outcome.REFUSED
    assert lanes.submit(gate, Lane.LOAD).outcome is not Outcome.REFUSED
    gate.go.set()
    assert refused not in poll(lanes, 4)
    assert log == []
    assert lanes.submit(says("again", log), Lane.SAVE).outcome is not Outcome.REFUSED
    poll(lanes, 1)
    assert log == ["again"]


def test_cancelled_in_the_queue_never_runs(lanes: Lanes[str]) -> None:
    gate, log = Gate(), list[str]()
    running = lanes.submit(gate, Lane.LOAD)
    assert gate.entered.wait(PATIENCE_SECONDS)
    queued = lanes.submit(says("never", log), Lane.LOAD)
    lanes.cancel(queued)
    lanes.cancel(queued)
    assert lanes.poll() == [queued]
    assert queued.outcome is Outcome.CANCELLED
    gate.go.set()
    assert poll(lanes, 1) == [running]
    assert log == []


def test_cancelled_while_running_is_over_only_when_it_has_stopped(lanes: Lanes[str]) -> None:
    gate = Gate()
    running = lanes.submit(gate, Lane.LOAD)
    assert gate.entered.wait(PATIENCE_SECONDS)
    lanes.cancel(running)
    assert running.outcome is None
    assert lanes.poll() == []
    gate.go.set()
    assert poll(lanes, 1) == [running]
    assert running.result == "stopping"
    lanes.cancel(running)
    assert lanes.poll() == []


def test_waiting_for_one_job_is_over_when_that_has_ended(lanes: Lanes[str]) -> None:
    gate, log = Gate(), list[str]()
    first = lanes.submit(gate, Lane.LOAD)
    second = lanes.submit(says("second", log), Lane.LOAD)
    assert gate.entered.wait(PATIENCE_SECONDS)
    assert not lanes.wait_for(first, 0.0)
    gate.go.set()
    assert lanes.wait_for(second)
    assert (first.outcome, log) == (Outcome.DONE, ["second"])
    assert lanes.wait_for(first, 0.0)
    poll(lanes, 2)


def test_close_cancels_the_queue_stops_the_runner_and_refuses_more() -> None:
    lanes, gate = Lanes[str](), Gate()
    running = lanes.submit(gate, Lane.SAVE)
    assert gate.entered.wait(PATIENCE_SECONDS)
    queued = lanes.submit(says("never", []), Lane.LOAD)
    assert not lanes.close(0.0)
    assert queued.outcome is Outcome.CANCELLED
    assert lanes.submit(gate, Lane.LOAD).outcome is Outcome.REFUSED
    gate.go.set()
    assert lanes.close(PATIENCE_SECONDS)
    assert lanes.poll() == [queued, running]
    assert running.result == "stopping"


def test_no_job_is_lost_with_many_threads_on_both_sides() -> None:
    lanes, submitted, ended = Lanes[str](threads=3, limit=50), list[Handle[str]](), []
    lock = threading.Lock()

    def submit_many() -> None:
        for i in range(200):
            handle = lanes.submit(says("x", []), Lane(i % 2))
            if i % 7 == 0:
                lanes.cancel(handle)
            with lock:
                submitted.append(handle)

    threads = [threading.Thread(target=submit_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(t.is_alive() for t in threads):
        lanes.wait(0.001)
        ended += lanes.poll()
    assert lanes.close(PATIENCE_SECONDS)
    ended += lanes.poll()
    accepted = [h for h in submitted if h.outcome is not Outcome.REFUSED]
    assert len(submitted) == 800
    assert len(ended) == len(accepted)
    assert set(ended) == set(accepted)
    assert all(h.outcome in {Outcome.DONE, Outcome.CANCELLED} for h in ended)


def test_a_save_takes_one_thread_of_several_and_loads_take_all() -> None:
    """A save may wait for the engine, which may take as long as a forward."""
    lanes = Lanes[str](threads=3, saves=1)
    go = threading.Event()
    running: list[str] = []
    changed = threading.Condition()

    def job(name: str) -> Callable[[Handle[str]], str]:
        def run(handle: Handle[str]) -> str:
            with changed:
                running.append(name)
                changed.notify_all()
            assert go.wait(PATIENCE_SECONDS)
            return name

        return run

    saves = [lanes.submit(job(name), Lane.SAVE) for name in ("s1", "s2")]
    with changed:
        assert changed.wait_for(lambda: running == ["s1"], PATIENCE_SECONDS)
    loads = [lanes.submit(job(name), Lane.LOAD) for name in ("l1", "l2", "l3")]
    with changed:
        assert changed.wait_for(lambda: sorted(running) == ["l1", "l2", "s1"], PATIENCE_SECONDS)
    go.set()
    for handle in (*saves, *loads):
        assert lanes.wait_for(handle, PATIENCE_SECONDS)
    assert sorted(running) == ["l1", "l2", "l3", "s1", "s2"]
    assert lanes.close(PATIENCE_SECONDS)


class Long:
    """A job of several turns, which makes way wherever it may."""

    def __init__(self, name: str, turns: int, log: list[str]) -> None:
        self.name, self.left, self.log = name, turns, log
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, handle: Handle[str]) -> str | None:
        self.begun.set()
        assert self.go.wait(PATIENCE_SECONDS)
        while self.left and not handle.stopping:
            self.log.append(self.name)
            self.left -= 1
            if self.left and handle.others:
                return None
        return "stopped" if self.left else "whole"


def test_a_short_job_waits_for_one_turn_of_a_long_one_which_then_has_the_next(
    lanes: Lanes[str],
) -> None:
    log = list[str]()
    long = Long("long", 4, log)
    first = lanes.submit(long, Lane.LOAD)
    assert long.begun.wait(PATIENCE_SECONDS)
    second, third = (lanes.submit(says(text, log), Lane.LOAD) for text in ("a", "b"))
    long.go.set()
    assert poll(lanes, 3) == [second, third, first]
    assert log == ["long", "a", "b", "long", "long", "long"]
    assert (first.outcome, first.result) == (Outcome.DONE, "whole")


def test_a_long_job_goes_on_before_those_that_have_come_since_it_made_way(
    lanes: Lanes[str],
) -> None:
    log = list[str]()
    long = Long("long", 3, log)
    lanes.submit(long, Lane.LOAD)
    assert long.begun.wait(PATIENCE_SECONDS)

    def brings_another(_: Handle[str]) -> str:
        lanes.submit(says("c", log), Lane.LOAD)
        return "b"

    lanes.submit(brings_another, Lane.LOAD)
    long.go.set()
    poll(lanes, 3)
    assert log == ["long", "long", "c", "long"]


def test_of_long_jobs_that_have_had_a_turn_the_oldest_ends_first(lanes: Lanes[str]) -> None:
    """All would end at the end of a burst, and be late together, if each had every other turn."""
    log = list[str]()
    first, second = Long("1", 3, log), Long("2", 3, log)
    second.go.set()
    jobs = [lanes.submit(first, Lane.LOAD)]
    assert first.begun.wait(PATIENCE_SECONDS)
    jobs += [lanes.submit(job, Lane.LOAD) for job in (second, says("short", log))]
    first.go.set()
    assert poll(lanes, 3) == [jobs[2], jobs[0], jobs[1]]
    assert log == ["1", "2", "short", "1", "1", "2", "2"]


def test_a_long_job_that_makes_way_can_be_cancelled_until_its_next_turn(
    lanes: Lanes[str],
) -> None:
    log, gate = list[str](), Gate()
    long = Long("long", 4, log)
    first = lanes.submit(long, Lane.LOAD)
    assert long.begun.wait(PATIENCE_SECONDS)
    second = lanes.submit(gate, Lane.LOAD)
    long.go.set()
    assert gate.entered.wait(PATIENCE_SECONDS)
    lanes.cancel(first)
    assert lanes.poll() == [first]
    assert (first.outcome, first.result) == (Outcome.CANCELLED, None)
    gate.go.set()
    assert poll(lanes, 1) == [second]
    assert log == ["long"]


def test_what_is_stopped_as_it_makes_way_has_no_further_turn(lanes: Lanes[str]) -> None:
    gate = Gate()

    def makes_way(handle: Handle[str]) -> None:
        gate(handle)

    handle = lanes.submit(makes_way, Lane.LOAD)
    assert gate.entered.wait(PATIENCE_SECONDS)
    lanes.cancel(handle)
    assert handle.outcome is None
    gate.go.set()
    assert poll(lanes, 1) == [handle]
    assert handle.outcome is Outcome.CANCELLED


def test_what_is_done_here_makes_way_for_nobody(lanes: Lanes[str]) -> None:
    gate, log = Gate(), list[str]()
    lanes.submit(gate, Lane.LOAD)
    assert gate.entered.wait(PATIENCE_SECONDS)
    lanes.submit(says("waits", log), Lane.LOAD)
    long = Long("here", 3, log)
    long.go.set()
    assert lanes.run(long, Lane.LOAD).result == "whole"
    assert log == ["here", "here", "here"]
    gate.go.set()
    poll(lanes, 3)
