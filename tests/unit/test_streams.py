"""Copies on streams: little of them at a time, saves behind loads."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from tests.simulated_device import SimulatedDevice

from kvstrata.transfer.descriptors import Spans
from kvstrata.transfer.driver import DeviceFault, Event
from kvstrata.transfer.pace import Pace
from kvstrata.transfer.streams import ONE_BY_ONE, CopyLimits, CopyQueue, Flight, Link

PATIENCE_SECONDS = 10.0  # only a broken queue takes that long


class Recorder:
    """A stream that notes what it is asked and whose events come when the test says so."""

    def __init__(self) -> None:
        self.chunks: list[int] = []
        self.waited = 0
        self.refuses = False
        self.is_marked = True
        self.idle_waits = 0

    def copy(self, spans: Spans) -> None:
        self.chunks.append(len(spans.device))
        if self.refuses:
            raise DeviceFault("refused")

    def record(self) -> Event:
        if not self.is_marked:
            raise DeviceFault("no event")
        return self

    def wait_idle(self) -> None:
        self.idle_waits += 1

    def follow(self, event: Event) -> None:
        event.hold(self)

    def wait(self) -> None:
        self.waited += 1

    def hold(self, stream: object) -> None:
        return


class Failing:
    """Events of copies of which one fails."""

    def __init__(self) -> None:
        self.waited: list[str] = []

    def event(self, name: str, *, fails: bool = False) -> Event:
        class Each:
            def wait(_) -> None:
                self.waited.append(name)
                if fails:
                    raise DeviceFault(name)

            def hold(_, stream: object) -> None:
                return

        return Each()


def spans(count: int, length: int = 10) -> Spans:
    numbers = np.arange(count, dtype=np.int64)
    return Spans(numbers, numbers, np.full(count, length, np.int64))


def queue(stream: Recorder, link: Link | None = None, **limits: float) -> CopyQueue:
    chosen = CopyLimits(20, 100, 2, patience_seconds=0.0)._replace(**limits)  # type: ignore[arg-type]  # of each its type
    pace = None if link is None else Pace()
    return CopyQueue(stream, link or Link(), pace=pace, limits=chosen)


def test_a_device_has_two_chunks_of_a_job_at_a_time() -> None:
    stream, flight = Recorder(), Flight()
    queue(stream).submit(spans(7), flight)
    assert stream.chunks == [2, 2, 2, 1]
    assert stream.waited == 2
    flight.wait()
    assert stream.waited == 4


def test_a_job_may_have_more_chunks_ahead_than_usual() -> None:
    stream, flight = Recorder(), Flight()
    queue(stream).submit(spans(11), flight, in_flight=4)
    assert stream.chunks == [2, 2, 2, 2, 2, 1]
    assert stream.waited == 2
    flight.wait()
    assert stream.waited == 6


def test_a_load_beside_which_no_other_runs_has_larger_chunks() -> None:
    stream, flight, link = Recorder(), Flight(), Link()
    loads = CopyQueue(
        stream, link, pace=None, limits=CopyLimits(20, 100, 2, patience_seconds=0.0, lone_chunks=3)
    )
    with loads.turn():
        loads.submit(spans(13), flight)
        assert stream.chunks == [6, 6, 1]
        with loads.turn():
            loads.submit(spans(3), flight)
        assert stream.chunks[3:] == [2, 1]
        loads.submit(spans(3), flight, in_flight=4)  # layer by layer
        assert stream.chunks[5:] == [2, 1]
    saves = CopyQueue(stream, link, pace=Pace(), limits=loads.limits)
    with loads.turn():
        saves.submit(spans(3), flight)
    assert stream.chunks[7:] == [2, 1]


class Counting:
    """A stream that counts the spans that it has been asked for and nobody has waited for."""

    def __init__(self) -> None:
        self.asked = self.done = self.most = 0

    def copy(self, spans: Spans) -> None:
        self.asked += len(spans.host)
        self.most = max(self.most, self.asked - self.done)

    def record(self) -> Event:
        stream, asked = self, self.asked

        class Point:
            def wait(_) -> None:
                stream.done = max(stream.done, asked)

            def hold(_, stream: object) -> None:
                return

        return Point()

    def wait_idle(self) -> None:
        raise AssertionError("there are events")

    def follow(self, event: Event) -> None:
        event.hold(self)


@pytest.mark.parametrize(("limits", "most"), [(ONE_BY_ONE, 512), (CopyLimits(), 2 * 32 * 4096)])
def test_calls_for_single_spans_do_not_fill_the_queue_of_the_driver(
    limits: CopyLimits, most: int
) -> None:
    """Where it is full a call waits, and all of the process with it. A batch is one call."""
    stream, flights = Counting(), [Flight(), Flight()]
    loads = CopyQueue(stream, Link(), pace=None, limits=limits)
    for flight in flights:  # of several jobs, of which one loads layer by layer
        loads.submit(spans(70 * 4096, 1), flight, in_flight=limits.chunks_ahead)
    assert (stream.asked, stream.most) == (2 * 70 * 4096, most)
    for flight in flights:
        flight.wait()
    assert stream.done == stream.asked


def test_what_was_begun_is_waited_for_where_the_rest_is_refused() -> None:
    stream, flight = Recorder(), Flight()
    stream.refuses = True
    with pytest.raises(DeviceFault):
        queue(stream).submit(spans(7), flight)
    flight.wait()
    assert (stream.chunks, stream.waited) == ([2], 1)


@pytest.mark.parametrize("refuses", [False, True])
def test_what_no_event_marks_has_ended_when_that_is_told(refuses: bool) -> None:
    stream, flight = Recorder(), Flight()
    stream.is_marked, stream.refuses = False, refuses
    with pytest.raises(DeviceFault, match="no event"):
        queue(stream).submit(spans(7), flight)
    flight.wait()
    assert (stream.chunks, stream.waited, stream.idle_waits) == ([2], 0, 1)


def test_a_flight_that_fails_has_ended_as_a_whole() -> None:
    failing, flight = Failing(), Flight()
    for name, fails in (("a", False), ("b", True), ("c", True), ("d", False)):
        flight.add(failing.event(name, fails=fails))
    with pytest.raises(DeviceFault, match="b"):
        flight.wait(but=1)
    assert failing.waited == ["a", "b", "c", "d"]
    flight.wait()


def in_thread(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def test_a_save_waits_while_something_loads() -> None:
    stream, link = Recorder(), Link()
    saves = queue(stream, link, patience_seconds=PATIENCE_SECONDS)
    with link.loading():
        saver = in_thread(lambda: saves.submit(spans(1), Flight()))
        saver.join(0.05)  # as long as a wrong one would need by far
        assert not stream.chunks
    saver.join(PATIENCE_SECONDS)
    assert stream.chunks == [1]


def test_a_save_goes_on_behind_loads_that_never_pause() -> None:
    stream, link = Recorder(), Link()
    with link.loading():
        began = time.monotonic()
        queue(stream, link, patience_seconds=0.01).submit(spans(6), Flight())
    assert stream.chunks == [2, 2, 2]
    assert time.monotonic() - began >= 0.03


class Wire:
    """A stream whose copies take their time on a clock that nothing else moves but rests."""

    BYTES_PER_SECOND: float = 1000.0

    def __init__(self) -> None:
        self.now = 100.0
        self.used = 0.0  # seconds
        self.chunks: list[int] = []
        self.in_flight = self.most_in_flight = 0

    def copy(self, spans: Spans) -> None:
        self.chunks.append(spans.total_bytes)
        self.in_flight += spans.total_bytes
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

    def record(self) -> Event:
        wire, own = self, self.chunks[-1]

        class Arrival:
            def wait(_) -> None:
                wire.now += own / wire.BYTES_PER_SECOND
                wire.used += own / wire.BYTES_PER_SECOND
                wire.in_flight -= own

            def hold(_, stream: object) -> None:
                return

        return Arrival()

    def wait_idle(self) -> None:
        raise AssertionError("there are events")

    def follow(self, event: Event) -> None:
        event.hold(self)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def saves(self) -> tuple[CopyQueue, Pace]:
        pace = Pace(lambda: self.now, self.sleep)
        return CopyQueue(self, Link(), pace=pace, limits=CopyLimits(4, 100, 2)), pace


def save(wire: Wire, saves: CopyQueue, count: int) -> None:
    flight = Flight()
    saves.submit(spans(count, 1), flight)
    flight.wait()


def test_saves_leave_half_of_the_link_to_the_steps_that_run() -> None:
    wire = Wire()
    saves, pace = wire.saves()
    began = wire.now
    for _ in range(10):
        pace.step_begins()
        save(wire, saves, 8)  # which takes longer than a step is counted on, in all
    assert wire.most_in_flight == 4  # a chunk
    assert wire.used == pytest.approx(0.08)
    assert wire.now - began == pytest.approx(0.16, abs=0.005)  # the last rest is the next one's


def test_saves_have_the_link_to_themselves_while_no_step_runs() -> None:
    wire = Wire()
    saves, pace = wire.saves()
    began = wire.now
    save(wire, saves, 80)
    assert (wire.most_in_flight, {*wire.chunks}) == (8, {4})
    assert wire.now - began == pytest.approx(wire.used)
    pace.step_begins()
    wire.now += 0.06  # the step takes long, or was the last one
    wire.most_in_flight = 0
    save(wire, saves, 80)
    assert wire.most_in_flight == 8


def test_a_step_that_begins_in_the_middle_of_a_save_has_one_chunk_before_it_from_then_on() -> None:
    wire = Wire()
    saves, pace = wire.saves()
    flight = Flight()
    copy = wire.copy
    before: list[int] = []  # bytes that a step would wait for, with each chunk

    def begin_a_step(spans: Spans) -> None:
        copy(spans)
        before.append(wire.in_flight)
        if len(before) == 3:
            pace.step_begins()

    wire.copy = begin_a_step  # type: ignore[method-assign]  # a step begins meanwhile
    saves.submit(spans(24, 1), flight)
    flight.wait()
    assert before == [4, 8, 8, 4, 4, 4]


def test_a_piece_that_is_larger_than_a_chunk_is_copied_in_several() -> None:
    wire = Wire()
    loads = CopyQueue(wire, Link(), pace=None, limits=CopyLimits(4, 100, 2))
    loads.submit(spans(3, 40), flight := Flight())
    flight.wait()
    assert (wire.chunks, wire.most_in_flight) == ([4] * 30, 8)


def test_what_a_short_save_owes_the_next_one_pays() -> None:
    """Many small saves take no more of the link than one large one."""
    wire = Wire()
    saves, pace = wire.saves()
    began = wire.now
    for _ in range(40):
        pace.step_begins()
        save(wire, saves, 1)
    assert wire.now - began == pytest.approx(2 * wire.used, abs=0.003)


def test_a_copy_that_is_slow_for_its_own_reasons_does_not_stop_the_saves_for_long() -> None:
    wire = Wire()
    saves, pace = wire.saves()
    wire.BYTES_PER_SECOND = 10.0
    pace.step_begins()
    save(wire, saves, 1)
    assert wire.used == pytest.approx(0.1)
    began = wire.now
    pace.step_begins()
    save(wire, saves, 1)
    assert wire.now - began == pytest.approx(0.105)


def test_loads_pay_nothing_to_the_steps() -> None:
    wire = Wire()
    loads = CopyQueue(wire, Link(), pace=None, limits=CopyLimits(4, 100, 2))
    began = wire.now
    flight = Flight()
    loads.submit(spans(80, 1), flight)
    flight.wait()
    assert wire.most_in_flight == 8
    assert wire.now - began == pytest.approx(wire.used)


def test_loads_wait_for_no_loads() -> None:
    stream = Recorder()
    loads = queue(stream, patience_seconds=PATIENCE_SECONDS)
    with loads.turn(), loads.turn():
        loads.submit(spans(1), Flight())
    assert stream.chunks == [1]


def test_a_small_load_passes_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large one two chunks are in front of it, wherever the device is."""
    device = SimulatedDevice(lambda names: names[0])
    device.enter()
    host, cache = np.zeros(1000, np.uint8), np.zeros(1000, np.uint8)
    loads = CopyQueue(device.loads, Link(), pace=None, limits=CopyLimits(20, 100, 2))

    def part(first: int, count: int) -> Spans:
        at = np.arange(first, first + count) * 10
        return Spans(cache.ctypes.data + at, host.ctypes.data + at, np.full(count, 10))

    ahead: list[int] = []
    real = device.loads.copy

    def copy(spans: Spans) -> None:
        ahead.append(len(device.loads.queue))
        real(spans)

    monkeypatch.setattr(device.loads, "copy", copy)
    loads.submit(part(0, 90), large := Flight())
    loads.submit(part(90, 1), small := Flight())
    assert max(ahead) <= 4
    small.wait()
    large.wait()
