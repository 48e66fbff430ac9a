"""Copies on streams: little of them at a time, saves behind loads."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from tests.simulated_device import SimulatedDevice

from kvstrata.transfer.descriptors import Spans
from kvstrata.transfer.driver import DeviceFault, Event
from kvstrata.transfer.streams import CopyLimits, CopyQueue, Flight, Link

PATIENCE_SECONDS = 10.0  # only a broken queue takes that long


class Recorder:
    """A stream that notes what it is asked and whose events come when the test says so."""

    def __init__(self) -> None:
        self.chunks: list[int] = []
        self.waited = 0
        self.refuses = False

    def copy(self, spans: Spans) -> None:
        self.chunks.append(len(spans.device))
        if self.refuses:
            raise DeviceFault("refused")

    def record(self) -> Event:
        return self

    def wait(self) -> None:
        self.waited += 1


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

        return Each()


def spans(count: int, length: int = 10) -> Spans:
    numbers = np.arange(count, dtype=np.int64)
    return Spans(numbers, numbers, np.full(count, length, np.int64))


def queue(stream: Recorder, link: Link | None = None, **limits: float) -> CopyQueue:
    chosen = CopyLimits(20, 100, 2, 0.0)._replace(**limits)  # type: ignore[arg-type]  # of each its type
    return CopyQueue(stream, link or Link(), is_load=link is None, limits=chosen)


def test_a_device_has_two_chunks_of_a_job_at_a_time() -> None:
    stream, flight = Recorder(), Flight()
    queue(stream).submit(spans(7), flight)
    assert stream.chunks == [2, 2, 2, 1]
    assert stream.waited == 2
    flight.wait()
    assert stream.waited == 4


def test_what_was_begun_is_waited_for_where_the_rest_is_refused() -> None:
    stream, flight = Recorder(), Flight()
    stream.refuses = True
    with pytest.raises(DeviceFault):
        queue(stream).submit(spans(7), flight)
    flight.wait()
    assert (stream.chunks, stream.waited) == ([2], 1)


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
    loads = CopyQueue(device.loads, Link(), is_load=True, limits=CopyLimits(20, 100, 2, 0.0))

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
