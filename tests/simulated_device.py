"""A device that runs its streams in whatever order is worst, and fails when it is told to.

Its memory is plain memory, its work is done when somebody waits: an adversary says which stream
goes on next, so that everything nobody waits for comes as late or as early as may be.
"""

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from kvstrata.storage.mapping import HostMapping
from kvstrata.transfer.descriptors import Spans
from kvstrata.transfer.driver import DeviceFault, Event

__all__ = ["SimulatedDevice", "SimulatedEvent", "SimulatedPins", "SimulatedStream"]

Work = Callable[[], None]
Adversary = Callable[[Sequence[str]], str]
"""Of the streams that have work, the one that goes on."""


class SimulatedDevice:
    """A ``Driver``, and its engine's stream ``engine``. Thread-safe."""

    def __init__(self, adversary: Adversary) -> None:
        self._adversary = adversary
        self._lock = threading.RLock()
        self.engine = SimulatedStream(self, "engine")
        self.loads = SimulatedStream(self, "loads")
        self.saves = SimulatedStream(self, "saves")
        self.is_lost = False
        self.fails_at: int | None = None  # copies of spans until one fails while it runs
        self.refuses_after: int | None = (
            None  # spans of the next call, of which the rest is refused
        )
        self.records_left: int | None = None  # points of streams for copies until one is refused
        self.during_copy: Work = lambda: None
        self.fault: str | None = None  # that something has failed, told by who waits next
        self.refuses_to_follow = False
        self.entered: set[int] = set()  # threads

    def enter(self) -> None:
        self.entered.add(threading.get_ident())

    def fence(self) -> "SimulatedEvent":
        self.check()
        return self.engine.record()

    def follow(self, event: Event) -> None:
        if self.refuses_to_follow:
            raise DeviceFault("the engine's stream cannot wait")
        event.hold(self.engine)

    def bring(self, rows: NDArray[np.uint8], chosen: NDArray[np.int64]) -> torch.Tensor:
        self.check()
        return torch.from_numpy(rows[chosen])

    def launch(self, work: Work) -> None:
        """The engine's own kernels."""
        self.engine.push(work)

    def lose(self) -> None:
        """As after a reset: nothing that was asked for happens, and nothing works any more."""
        with self._lock:
            self.is_lost = True
            for stream in self._streams():
                stream.queue.clear()

    def run_all(self) -> None:
        while self.step():
            pass

    def step(self) -> bool:
        """Let one stream go on by one piece of work; False if none has any."""
        with self._lock:
            busy = [stream for stream in self._streams() if stream.queue]
            if not busy:
                return False
            able = {stream.name: stream for stream in busy if not stream.is_held}
            assert able, f"streams that wait for each other: {[stream.name for stream in busy]}"
            stream = able[self._adversary(sorted(able))]
            work = stream.queue.popleft()
            if not isinstance(work, SimulatedEvent):
                work()
            stream.done += 1
            return True

    def copy_one(self, target: int, source: int, length: int) -> None:
        if self.fails_at is not None:
            self.fails_at -= 1
            if self.fails_at < 0:
                ctypes.memmove(target, source, length // 2)
                self.fails_at, self.fault = None, "a copy has failed"
                return
        self.during_copy()
        ctypes.memmove(target, source, length)

    def check(self) -> None:
        if self.is_lost:
            raise DeviceFault("the device is lost")
        if self.fault is not None:
            raise DeviceFault(self.fault)

    def _streams(self) -> "list[SimulatedStream]":
        return [self.engine, self.loads, self.saves]


class SimulatedStream:
    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self._device = device
        self.name = name
        self.queue: deque[Work | SimulatedEvent] = deque()  # an event: to be waited for
        self.pushed = 0
        self.done = 0

    @property
    def is_held(self) -> bool:
        """Whether what comes next is an event that is not over."""
        first = self.queue[0]
        return isinstance(first, SimulatedEvent) and not first.is_over

    def push(self, work: "Work | SimulatedEvent") -> None:
        with self._device._lock:
            self.queue.append(work)
            self.pushed += 1

    def copy(self, spans: Spans) -> None:
        device = self._device
        assert device.is_lost or threading.get_ident() in device.entered
        device.check()
        refused, device.refuses_after = device.refuses_after, None
        for number, (at, host, length) in enumerate(
            zip(*(column.tolist() for column in spans), strict=True)
        ):
            if refused is not None and number >= refused:
                raise DeviceFault("out of resources")
            target, source = (at, host) if self.name == "loads" else (host, at)
            self.push(partial(device.copy_one, target, source, length))

    def record(self) -> "SimulatedEvent":
        device = self._device
        if self is not device.engine and device.records_left is not None:
            device.records_left -= 1
            if device.records_left < 0:
                device.records_left = None
                raise DeviceFault("an event cannot be had")
        return SimulatedEvent(device, self, self.pushed)

    def wait_idle(self) -> None:
        SimulatedEvent(self._device, self, self.pushed).wait()

    def follow(self, event: Event) -> None:
        event.hold(self)


class SimulatedEvent:
    def __init__(self, device: SimulatedDevice, stream: SimulatedStream, position: int) -> None:
        self._device = device
        self._stream = stream
        self._position = position

    @property
    def is_over(self) -> bool:
        return self._stream.done >= self._position

    def _may_come(self) -> bool:
        return not (self.is_over or self._device.is_lost)

    def hold(self, stream: SimulatedStream) -> None:
        self._device.check()
        stream.push(self)

    def wait(self) -> None:
        """What has failed is told here, once the stream has come so far."""
        while self._may_come():
            assert self._device.step() or not self._may_come(), "an event that never comes"
        self._device.check()


class SimulatedPins:
    """Pins nothing."""

    def pin(self, mapping: HostMapping, is_over: Callable[[], bool]) -> bool:
        return False

    def used(self) -> AbstractContextManager[None]:
        return nullcontext()

    def let_go(self) -> None:
        return
