"""Device blocks of a device that copies by itself: whole jobs become few calls of its driver.

A job waits, on its own thread, for what the engine had launched when the job was made, then asks
for its copies and waits until they have arrived. So a save reads nothing that is unfinished, a load
overwrites nothing that is still read, and what is reported has happened.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Final, Protocol

import numpy as np

from kvstrata.core.errors import InvariantViolated
from kvstrata.storage.mapping import HostMapping
from kvstrata.transfer.descriptors import HostRows, Numbers, PagePlaces
from kvstrata.transfer.driver import CopyStream, DeviceFault, Driver, Event
from kvstrata.transfer.guarded import Copied, RankSlots, Run
from kvstrata.transfer.lanes import Handle
from kvstrata.transfer.streams import CopyLimits, CopyQueue, Flight, Link

__all__ = ["Pins", "StreamedDevice"]

_log = logging.getLogger(__name__)

_BATCH_BYTES: Final = 16 << 20  # after which a job looks whether it is to stop


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


class StreamedDevice:
    """A ``PagedDevice`` that copies on streams of its own."""

    copy_threads: Final = 4  # a small load need not wait for the three largest ones
    copies_at_once: Final = False

    def __init__(
        self,
        driver: Driver,
        groups: Sequence[PagePlaces],
        streams: tuple[CopyStream, CopyStream],
        pins: Pins,
        limits: CopyLimits = CopyLimits(),  # noqa: B008 - immutable
    ) -> None:
        """*groups*: the pages of each KV cache group; *streams*: for loads, and for saves."""
        self._driver = driver
        self._groups = tuple(groups)
        link = Link()
        self._loads = CopyQueue(streams[0], link, is_load=True, limits=limits)
        self._saves = CopyQueue(streams[1], link, is_load=False, limits=limits)
        self._pins = pins

    def fence(self) -> Event:
        """As in ``PagedDevice``; what the device has to complain of, the job that waits will say."""
        try:
            return self._driver.fence()
        except DeviceFault as e:
            return _Failed(e)

    def load_job(
        self, slots: RankSlots, runs: Sequence[Run], after: Event, layer: int | None = None
    ) -> Callable[[Handle[Copied]], Copied]:
        return lambda handle: self._run(self._loads, handle, slots, runs, after, layer)

    def save_job(
        self, slots: RankSlots, runs: Sequence[Run], after: Event, layer: int | None = None
    ) -> Callable[[Handle[Copied]], Copied]:
        return lambda handle: self._run(self._saves, handle, slots, runs, after, layer)

    def _run(
        self,
        queue: CopyQueue,
        handle: Handle[Copied],
        slots: RankSlots,
        runs: Sequence[Run],
        after: Event,
        layer: int | None,
    ) -> Copied:
        self._driver.enter()
        after.wait()
        flight = Flight()
        with queue.turn(), self._pins.used():
            try:
                for batch in self._batches(runs):
                    if handle.stopping:
                        return Copied.STOPPED
                    if not _are_current(slots, batch):
                        return Copied.STALE
                    self._begin(queue, flight, slots, batch, layer)
            finally:  # whatever has happened: what was begun has ended when the job has
                flight.wait()
        return Copied.WHOLE if _are_current(slots, runs) else Copied.STALE

    def _begin(
        self,
        queue: CopyQueue,
        flight: Flight,
        slots: RankSlots,
        runs: Sequence[Run],
        layer: int | None,
    ) -> None:
        for number, places in enumerate(self._groups):
            if own := [run for run in runs if run.group == number]:
                blocks, rows = _rows(slots, own, number, places.device_block_bytes)
                spans = places.spans(blocks, rows, layer, most_bytes=queue.limits.chunk_bytes)
                queue.submit(spans, flight)

    def _batches(self, runs: Sequence[Run]) -> Iterator[Sequence[Run]]:
        first, batch_bytes = 0, 0
        for number, run in enumerate(runs):
            batch_bytes += len(run.device_blocks) * self._groups[run.group].device_block_bytes
            if batch_bytes >= _BATCH_BYTES:
                yield runs[first : number + 1]
                first, batch_bytes = number + 1, 0
        if first < len(runs):
            yield runs[first:]

    def pin(self, mapping: HostMapping, is_over: Callable[[], bool]) -> None:
        try:
            self._driver.enter()
        except DeviceFault as e:
            _log.warning("the host tier is not pinned: %s", e)
        else:
            self._pins.pin(mapping, is_over)

    def let_go(self) -> None:
        self._pins.let_go()


class _Failed:
    """What nobody will see the end of."""

    def __init__(self, fault: DeviceFault) -> None:
        self._fault = fault

    def wait(self) -> None:
        raise self._fault


def _are_current(slots: RankSlots, runs: Sequence[Run]) -> bool:
    """Whether all slots still have the owners that *runs* mean."""
    numbers = np.fromiter((run.slot for run in runs), np.int64, len(runs))
    expected = np.fromiter((run.generation for run in runs), np.uint64, len(runs))
    return bool((slots.mapping.generations[numbers] == expected).all())


def _rows(
    slots: RankSlots, runs: Sequence[Run], group: int, row_bytes: int
) -> tuple[Numbers, HostRows]:
    """The device blocks of *runs*, all of one group, and their places in host memory."""
    count = len(runs)
    blocks = np.fromiter(chain.from_iterable(run.device_blocks for run in runs), np.int64)
    counts = np.fromiter((len(run.device_blocks) for run in runs), np.int64, count)
    offsets = np.fromiter((run.offset for run in runs), np.int64, count)
    if ((offsets + counts) * row_bytes > slots.group_bytes[group]).any():
        raise InvariantViolated(f"device blocks beyond the region of group {group} of a slot")
    numbers = np.fromiter((run.slot for run in runs), np.int64, count)
    region = slots.mapping.data.ctypes.data + slots.start_bytes + sum(slots.group_bytes[:group])
    starts = region + numbers * slots.mapping.slot_bytes + offsets * row_bytes
    within = np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts, counts)
    addresses = np.repeat(starts, counts) + within * row_bytes
    return blocks, HostRows(addresses, within == 0)
