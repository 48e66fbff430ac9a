"""Device blocks of a device that copies by itself: whole jobs become few calls of its driver.

A job waits, on its own thread, for what the engine had launched when the job was made, then asks
for its copies and waits until they have arrived. So a save reads nothing that is unfinished, a load
overwrites nothing that is still read, and what is reported has happened. A long job makes way for
those that wait for a thread, every 32 MiB.

Loads layer by layer wait for the engine, and the engine for them, on the streams: threads wait
until the copies of a layer have been asked for, which is up to 32 chunks before they arrive.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import InvariantViolated
from kvstrata.storage.mapping import HostMapping
from kvstrata.transfer.descriptors import HostRows, Numbers, PagePlaces
from kvstrata.transfer.driver import CopyStream, DeviceFault, Driver, Event
from kvstrata.transfer.guarded import TURN_BYTES, Copied, RankSlots, Run
from kvstrata.transfer.lanes import Handle, Job
from kvstrata.transfer.layered import LayerGates, Part
from kvstrata.transfer.pace import Pace
from kvstrata.transfer.streams import CopyLimits, CopyQueue, Flight, Link

__all__ = ["Pins", "StreamedDevice", "rows_of"]

_log = logging.getLogger(__name__)


class Pins(Protocol):
    """Which host memory the device reaches by itself."""

    def pin(self, mapping: HostMapping, is_over: Callable[[], bool]) -> bool:
        """Make it reach *mapping*, which takes seconds, unless *is_over*; whether it does now."""
        ...

    def used(self) -> AbstractContextManager[None]:
        """Around copies: what is reached when they begin is reached until they have ended."""
        ...

    def let_go(self) -> None:
        """The mapping is of no use any more."""
        ...


class _Places(NamedTuple):
    """Device blocks of one group, and their rows in host memory."""

    pages: PagePlaces
    blocks: Numbers
    rows: HostRows


class _Batch(NamedTuple):
    """Some runs of a part, which are looked up once for all layers."""

    part: Part
    runs: Sequence[Run]
    places: Sequence[_Places]


class StreamedDevice:
    """A ``PagedDevice`` that copies on streams of its own."""

    copy_threads: Final = 4  # small loads need not wait for turns of large ones, if those are few
    copies_at_once: Final = False
    copy_cpus: Final = None

    def __init__(
        self,
        driver: Driver,
        groups: Sequence[PagePlaces],
        streams: tuple[CopyStream, CopyStream],
        pins: Pins,
        limits: CopyLimits = CopyLimits(),  # noqa: B008 - immutable
        *,
        numa_node: int | None = None,
    ) -> None:
        """*groups*: the pages of each KV cache group; *streams*: for loads, and for saves.

        *numa_node*: the one that the device is attached to, if that is known.
        """
        self.numa_node = numa_node
        self._driver = driver
        self._groups = tuple(groups)
        link, self._pace = Link(), Pace()
        self._loads = CopyQueue(streams[0], link, pace=None, limits=limits)
        self._saves = CopyQueue(streams[1], link, pace=self._pace, limits=limits)
        self._pins = pins

    def fence(self) -> Event:
        """As in ``PagedDevice``; what the device has to complain of, the job that waits will say."""
        try:
            return self._driver.fence()
        except DeviceFault as e:
            return _Failed(e)

    def step_begins(self) -> None:
        self._pace.step_begins()

    def follow(self, event: Event) -> None:
        self._driver.follow(event)

    def load_layers_job(
        self, parts: Sequence[Part], after: Event, gates: LayerGates
    ) -> Callable[[Handle[Copied]], Copied]:
        return partial(self._run_layers, parts, after, gates)

    def load_job(self, slots: RankSlots, runs: Sequence[Run], after: Event) -> Job[Copied]:
        return partial(self._run, self._loads, Part(slots, runs), deque(runs), after)

    def save_job(self, slots: RankSlots, runs: Sequence[Run], after: Event) -> Job[Copied]:
        return partial(self._run, self._saves, Part(slots, runs), deque(runs), after)

    def save_layer_job(self, part: Part, after: Event, layer: int) -> Job[Copied]:
        return partial(self._save_layer, part, after, layer)

    def _run(
        self, queue: CopyQueue, part: Part, left: deque[Run], after: Event, handle: Handle[Copied]
    ) -> Copied | None:
        """A turn of a job; *left*: what no turn has begun."""
        self._driver.enter()
        after.wait()
        slots, row_bytes = part.slots, [pages.device_block_bytes for pages in self._groups]
        with self._copying(queue) as flight:
            while left:
                if handle.stopping:
                    return Copied.STOPPED
                if not _are_current(slots, runs := _take(left, row_bytes)):
                    return Copied.STALE
                self._begin(queue, flight, self._places(slots, runs), None)
                if left and handle.others:
                    return None
        return Copied.WHOLE if _are_current(slots, part.runs) else Copied.STALE

    def _save_layer(
        self, part: Part, after: Event, layer: int, handle: Handle[Copied]
    ) -> Copied | None:
        self._driver.enter()
        after.wait()
        if handle.stopping:
            return Copied.STOPPED
        if not _are_current(part.slots, part.runs):
            return Copied.STALE
        with self._copying(self._saves) as flight:
            if part.places is None:
                part.places = self._places(part.slots, part.runs)
            self._begin(self._saves, flight, part.places, layer)
        return Copied.WHOLE if _are_current(part.slots, part.runs) else Copied.STALE

    def _run_layers(
        self, parts: Sequence[Part], after: Event, gates: LayerGates, handle: Handle[Copied]
    ) -> Copied:
        """The parts are copied in turn, so a fault of the device is one of all of them."""
        self._driver.enter()
        queue, widest = self._loads, [max(pages.page_bytes) for pages in self._groups]
        with self._copying(queue) as flight:
            queue.follow(after)
            batches = [
                _Batch(part, runs, self._places(part.slots, runs))
                for part in parts
                for runs in _batches(part.runs, widest)
            ]
            for layer in range(gates.layers):
                if not self._begin_layer(flight, batches, layer, handle):
                    return Copied.STOPPED
                gates.open(queue.mark())
        for part in parts:
            _look_at(part, part.runs)
        return Copied.WHOLE

    @contextmanager
    def _copying(self, queue: CopyQueue) -> Iterator[Flight]:
        """Around copies: whatever happens, what was begun has ended behind it."""
        flight = Flight()
        with queue.turn(), self._pins.used():
            try:
                yield flight
            finally:
                flight.wait()

    def _begin_layer(
        self, flight: Flight, batches: Sequence[_Batch], layer: int, handle: Handle[Copied]
    ) -> bool:
        """Ask for one layer of those parts that are in no doubt; False if it is to be stopped."""
        ahead = self._loads.limits.chunks_ahead
        for part, runs, places in batches:
            if handle.stopping:
                return False
            _look_at(part, runs)
            if part.doubt is None:
                self._begin(self._loads, flight, places, layer, ahead)
        return True

    def _begin(
        self,
        queue: CopyQueue,
        flight: Flight,
        places: Sequence[_Places],
        layer: int | None,
        in_flight: int | None = None,
    ) -> None:
        for pages, blocks, rows in places:
            queue.submit(pages.spans(blocks, rows, layer), flight, in_flight)

    def _places(self, slots: RankSlots, runs: Sequence[Run]) -> list[_Places]:
        """Where the bytes of *runs* are, of one group after the other."""
        return [
            _Places(pages, *rows_of(slots, own, group, pages.device_block_bytes))
            for group, pages in enumerate(self._groups)
            if (own := [run for run in runs if run.group == group])
        ]

    def pin(self, mapping: HostMapping, is_over: Callable[[], bool]) -> None:
        try:
            self._driver.enter()
        except DeviceFault as e:
            _log.warning("the host tier is not pinned: %s", e)
        else:
            self._pins.pin(mapping, is_over)

    def let_go(self) -> None:
        self._pins.let_go()

    def bring(self, rows: NDArray[np.uint8], chosen: NDArray[np.int64]) -> Any:
        """As in ``PagedDevice``; raises ``DeviceFault``. For the engine's thread."""
        with self._pins.used():
            return self._driver.bring(rows, chosen)


class _Failed:
    """What nobody will see the end of."""

    def __init__(self, fault: DeviceFault) -> None:
        self._fault = fault

    def wait(self) -> None:
        raise self._fault

    def hold(self, stream: Any) -> None:
        raise self._fault


def _take(left: deque[Run], row_bytes: Sequence[int]) -> list[Run]:
    """The first of *left*, of about as many bytes as a turn has.

    *row_bytes*: what is copied of a device block of each group.
    """
    taken: list[Run] = []
    taken_bytes = 0
    while left and taken_bytes < TURN_BYTES:
        taken.append(run := left.popleft())
        taken_bytes += len(run.device_blocks) * row_bytes[run.group]
    return taken


def _batches(runs: Sequence[Run], row_bytes: Sequence[int]) -> Iterator[list[Run]]:
    """*runs* in order, as ``_take`` takes them."""
    left = deque(runs)
    while left:
        yield _take(left, row_bytes)


def _look_at(part: Part, runs: Sequence[Run]) -> None:
    """Doubt *part* if one of its *runs* is not what it was."""
    if part.doubt is None and not _are_current(part.slots, runs):
        part.doubt = Copied.STALE.value


def _are_current(slots: RankSlots, runs: Sequence[Run]) -> bool:
    """Whether all slots still have the owners that *runs* mean."""
    numbers = np.fromiter((run.slot for run in runs), np.int64, len(runs))
    expected = np.fromiter((run.generation for run in runs), np.uint64, len(runs))
    return bool((slots.mapping.generations[numbers] == expected).all())


def rows_of(
    slots: RankSlots, runs: Sequence[Run], group: int, row_bytes: int
) -> tuple[Numbers, HostRows]:
    """The device blocks of *runs*, all of one group, and their places in host memory."""
    counts = np.fromiter([len(run.device_blocks) for run in runs], np.int64, len(runs))
    offsets = np.fromiter([run.offset for run in runs], np.int64, len(runs))
    numbers = np.fromiter([run.slot for run in runs], np.int64, len(runs))
    if ((offsets + counts) * row_bytes > slots.group_bytes[group]).any():
        raise InvariantViolated(f"device blocks beyond the region of group {group} of a slot")
    blocks = np.fromiter(chain.from_iterable([run.device_blocks for run in runs]), np.int64)
    first = counts.cumsum() - counts  # of each run
    region = slots.mapping.data.ctypes.data + slots.start_bytes + slots.group_starts[group]
    starts = region + numbers * slots.mapping.slot_bytes + (offsets - first) * row_bytes
    addresses = np.arange(len(blocks)) * row_bytes
    addresses += starts.repeat(counts)
    begins = np.zeros(len(blocks), np.bool_)
    begins[first] = True
    return blocks, HostRows(addresses, begins)
