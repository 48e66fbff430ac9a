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

from kvstrata.storage.mapping import HostMapping
from kvstrata.transfer.descriptors import Spans
from kvstrata.transfer.driver import DeviceFault

__all__ = ["SimulatedDevice", "SimulatedPins", "SimulatedStream"]

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
        self.during_copy: Work = lambda: None
        self.fault: str | None = None  # that something has failed, told by who waits next
        self.entered: set[int] = set()  # threads

    def enter(self) -> None:
        self.entered.add(threading.get_ident())

    def fence(self) -> "SimulatedEvent":
        self.check()
        return self.engine.record()

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
            waiting = {stream.name: stream for stream in self._streams() if stream.queue}
            if not waiting:
                return False
            stream = waiting[self._adversary(sorted(waiting))]
            work = stream.queue.popleft()
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
        self.queue: deque[Work] = deque()
        self.pushed = 0
        self.done = 0

    def push(self, work: Work) -> None:
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
        return SimulatedEvent(self._device, self, self.pushed)


class SimulatedEvent:
    def __init__(self, device: SimulatedDevice, stream: SimulatedStream, position: int) -> None:
        self._device = device
        self._stream = stream
        self._position = position

    def wait(self) -> None:
        self._device.check()
        while self._stream.done < self._position:
            if not self._device.step() and self._stream.done < self._position:
                self._device.check()
                raise AssertionError("an event that never comes")
        self._device.check()


class SimulatedPins:
    """Pins nothing."""

    def pin(self, mapping: HostMapping, is_over: Callable[[], bool]) -> bool:
        return False

    def used(self) -> AbstractContextManager[None]:
        return nullcontext()

    def let_go(self) -> None:
        return
