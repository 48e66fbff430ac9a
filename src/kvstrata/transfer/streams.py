"""Copies on streams: in chunks, few of them at a time, saves behind loads and the engine's steps.

A device copies in the order in which it is asked and knows no priorities on its link. So it is
asked for little at a time: two chunks of a job, of which one is under way while the next waits, so
that the link is never idle. What comes in between waits for two chunks of each job at most.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from kvstrata.transfer.descriptors import Spans, chunks
from kvstrata.transfer.driver import CopyStream, DeviceFault, Event
from kvstrata.transfer.pace import Pace

__all__ = ["ONE_BY_ONE", "CopyLimits", "CopyQueue", "Flight", "Link"]


class CopyLimits(NamedTuple):
    """How much is asked of a device at a time."""

    chunk_bytes: int = 8 << 20  # 160 to 320 µs of a link of PCIe 5 or 4
    chunk_spans: int = 4096
    chunks_in_flight: int = 2  # of one job
    patience_seconds: float = 0.005  # that a chunk of a save waits for loads: they may never pause
    chunks_ahead: int = 32  # of a job that loads layer by layer: 5 to 10 ms of the link
    spans_in_flight: int | None = None  # of all jobs of a stream; None: their chunks are enough
    lone_chunks: int = 4  # in one, of a load beside which no other runs: see CopyQueue.submit


ONE_BY_ONE: Final = CopyLimits(chunk_spans=256, spans_in_flight=512)
"""Where each span is a call: a driver keeps about a thousand, then the call waits for room."""


class Flight:
    """Copies that a device was asked for, oldest first. For one thread."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()

    def add(self, event: Event) -> None:
        self._events.append(event)

    def wait(self, but: int = 0) -> None:
        """Until all have arrived, or all *but* that many.

        If it raises, none of them may be believed, and none is under way any more.
        """
        fault: Exception | None = None
        while len(self._events) > (0 if fault else but):
            try:
                self._events.popleft().wait()
            except Exception as e:  # noqa: BLE001 - raised below, once the others have ended too
                fault = fault or e
        if fault is not None:
            raise fault


class Link:
    """Whether loads use the link of a device; saves make way for them. Thread-safe."""

    def __init__(self) -> None:
        self._loads = 0
        self._free = threading.Condition()  # guards it

    @contextmanager
    def loading(self) -> Iterator[None]:
        with self._free:
            self._loads += 1
        try:
            yield
        finally:
            with self._free:
                self._loads -= 1
                self._free.notify_all()

    @property
    def has_one_load(self) -> bool:
        return self._loads == 1

    def wait_free(self, timeout_seconds: float) -> bool:
        """Block until no load runs; False if the time ran out first."""
        with self._free:
            return self._free.wait_for(lambda: not self._loads, timeout_seconds)


class CopyQueue:
    """The stream of one direction, which the jobs of several threads share."""

    def __init__(
        self,
        stream: CopyStream,
        link: Link,
        *,
        pace: Pace | None,
        limits: CopyLimits = CopyLimits(),  # noqa: B008 - immutable
    ) -> None:
        """*pace*: of saves, None for loads."""
        self._stream = stream
        self._link = link
        self._pace = pace
        self.limits: Final = limits
        self._lock = threading.Lock()  # held while the stream is given something
        self._asked: deque[tuple[int, Event]] = deque()  # spans of each chunk, oldest first
        self._asked_spans = 0

    def submit(self, spans: Spans, flight: Flight, in_flight: int | None = None) -> None:
        """Ask for *spans*, whose events are added to *flight*; returns before they have arrived.

        *in_flight*: chunks, if not as many as usual. Raises what the device says. Wait for *flight*
        then, too.

        A load beside which no other copies takes more in a chunk: for each it needs the interpreter,
        which a thread that computes hands over late. The little that an engine's steps bring to an
        H200 did not wait for it there, as what they fetch waits for saves (docs/gpu.md).
        """
        most, limits, pace = in_flight or self.limits.chunks_in_flight, self.limits, self._pace
        is_alone = pace is None and in_flight is None and self._link.has_one_load
        chunk_bytes = limits.chunk_bytes * (limits.lone_chunks if is_alone else 1)
        for chunk in chunks(spans, chunk_bytes, limits.chunk_spans):
            if pace is not None:
                self._link.wait_free(limits.patience_seconds)
            flight.wait(but=most - 1)
            if pace is None or not pace.is_shared:
                self._ask(chunk, flight)
                continue
            flight.wait()
            with pace.share():
                self._ask(chunk, flight)
                flight.wait()

    def _ask(self, chunk: Spans, flight: Flight) -> None:
        with self._lock:
            self._wait_for_room(len(chunk.host))
            try:
                self._stream.copy(chunk)
            finally:  # some of it may be under way
                event = self._end()
                flight.add(event)
                self._note(len(chunk.host), event)

    def _wait_for_room(self, spans: int) -> None:
        """Until the stream can be given so many more, at most a chunk of them.

        With the lock: what another job asks for would have to wait, too.
        """
        most = self.limits.spans_in_flight
        while most is not None and self._asked and self._asked_spans + spans > most:
            asked, event = self._asked.popleft()
            self._asked_spans -= asked
            event.wait()

    def _note(self, spans: int, event: Event) -> None:
        if self.limits.spans_in_flight is not None:
            self._asked.append((spans, event))
            self._asked_spans += spans

    def _end(self) -> Event:
        """The point behind all that was asked for; where none can be had, it is waited for here."""
        try:
            return self._stream.record()
        except DeviceFault:
            self._stream.wait_idle()
            raise

    def follow(self, event: Event) -> None:
        """What is asked for from now on, by whatever job, is copied once *event* is over."""
        with self._lock:
            self._stream.follow(event)

    def mark(self) -> Event:
        """The point behind all that was asked for."""
        with self._lock:
            return self._stream.record()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around a job: saves make way for those that load."""
        if self._pace is None:
            with self._link.loading():
                yield
        else:
            yield
