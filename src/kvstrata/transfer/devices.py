"""What copies the device blocks of a worker: chosen by the kind of device that they are on.

A module ``<kind>_device`` beside this one is used for that kind of device, and says how with
``open_device``. Any other kind gets the portable copies of ``torch_pages``.
"""

import importlib
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstrata.storage.mapping import HostMapping
from kvstrata.transfer.device import DeviceCopier
from kvstrata.transfer.driver import Event
from kvstrata.transfer.guarded import Copied, RankSlots, Run, load_job, save_job
from kvstrata.transfer.lanes import Handle, Job
from kvstrata.transfer.layered import LayerGates, Part, copy_part

__all__ = ["NOW", "PagedDevice", "PagewiseDevice", "open_device"]

R = TypeVar("R")

Pages = Sequence[Sequence[Any]]
"""By group and layer: uint8 tensors (num_blocks, page_bytes), each page contiguous."""


class PagedDevice(Protocol):
    """The device blocks of one worker, by KV cache group: makes the jobs that copy them.

    A job runs on a thread of ``Lanes``. It raises, or returns ``WHOLE`` if and only if all bytes
    have arrived; either way nothing of it goes on when it has ended, or makes way for others.
    """

    @property
    def copy_threads(self) -> int:
        """How many jobs should run side by side, one save among them at most."""
        ...

    @property
    def copy_cpus(self) -> frozenset[int] | None:
        """Processors for the threads that run its jobs; None for those of whoever starts them."""
        ...

    @property
    def numa_node(self) -> int | None:
        """Where host memory should be for its copies; None if that does not matter, or who knows."""
        ...

    @property
    def copies_at_once(self) -> bool:
        """Whether a job begins at once, whatever the engine has launched before it."""
        ...

    def step_begins(self) -> None:
        """The engine, whose thread calls this, begins a step; never waits."""
        ...

    def fence(self) -> Event:
        """What was launched up to now by the engine, whose thread calls this; never waits."""
        ...

    def follow(self, event: Event) -> None:
        """What the engine, whose thread calls this, launches now runs once *event* is over."""
        ...

    def load_job(self, slots: RankSlots, runs: Sequence[Run], after: Event) -> Job[Copied]:
        """A job that copies *runs* to the device once *after* is over."""
        ...

    def load_layers_job(
        self, parts: Sequence[Part], after: Event, gates: LayerGates
    ) -> Callable[[Handle[Copied]], Copied]:
        """A job that copies *parts* to the device layer by layer, and opens a gate for each.

        Of ``WHOLE`` jobs those parts have arrived that are in no doubt then.
        """
        ...

    def save_job(self, slots: RankSlots, runs: Sequence[Run], after: Event) -> Job[Copied]:
        """A job that copies *runs* to the host; arguments as above."""
        ...

    def save_layer_job(self, part: Part, after: Event, layer: int) -> Job[Copied]:
        """A job that copies one layer of *part* to the host; of all layers in turn, on one thread."""
        ...

    def pin(self, mapping: HostMapping, is_over: Callable[[], bool]) -> None:
        """Make *mapping* fast to copy from and to; may take seconds, ends early if *is_over*."""
        ...

    def let_go(self) -> None:
        """The mapping that was pinned is of no use any more."""
        ...

    def bring(self, rows: NDArray[np.uint8], chosen: NDArray[np.int64]) -> Any:
        """Some of *rows*, (rows, bytes) of a mapping: a torch tensor, uint8, in the device's memory.

        They have arrived when it returns. None where it is as well to read them where they are.
        """
        ...


class _Now:
    """Nothing to wait for."""

    def wait(self) -> None:
        return

    def hold(self, stream: Any) -> None:
        return


NOW: Final = _Now()


class PagewiseDevice:
    """A ``PagedDevice`` whose copiers do the work themselves, a run of blocks at a time."""

    copy_threads: Final = 1
    numa_node: Final = None

    def __init__(
        self,
        copiers: Sequence[DeviceCopier],
        engine: Event = NOW,
        copy_cpus: frozenset[int] | None = None,
    ) -> None:
        """*copiers*: one a group; *engine*: waits for all that is launched when it is asked."""
        self.copy_cpus = copy_cpus
        self.copiers = list(copiers)
        self._engine = engine
        self.copies_at_once = engine is NOW

    def step_begins(self) -> None:
        """Its copies ask for nothing that a step waits for."""

    def fence(self) -> Event:
        return self._engine

    def follow(self, event: Event) -> None:
        event.wait()

    def load_job(self, slots: RankSlots, runs: Sequence[Run], after: Event) -> Job[Copied]:
        return _after(after, load_job(self.copiers, slots, runs))

    def load_layers_job(
        self, parts: Sequence[Part], after: Event, gates: LayerGates
    ) -> Callable[[Handle[Copied]], Copied]:
        def run(handle: Handle[Copied]) -> Copied:
            for layer in range(gates.layers):
                for part in parts:
                    copy_part(load_job(self.copiers, part.slots, part.runs, layer), part, handle)
                gates.open()
            return Copied.WHOLE

        return _after(after, run)

    def save_job(self, slots: RankSlots, runs: Sequence[Run], after: Event) -> Job[Copied]:
        return _after(after, save_job(self.copiers, slots, runs))

    def save_layer_job(self, part: Part, after: Event, layer: int) -> Job[Copied]:
        return _after(after, save_job(self.copiers, part.slots, part.runs, layer))

    def pin(self, mapping: HostMapping, is_over: Callable[[], bool]) -> None:
        """Its copies are not made by a device."""

    def let_go(self) -> None:
        """There is nothing that it holds."""

    def bring(self, rows: NDArray[np.uint8], chosen: NDArray[np.int64]) -> Any:
        return None


def _after(event: Event, job: Callable[[Handle[Copied]], R]) -> Callable[[Handle[Copied]], R]:
    def run(handle: Handle[Copied]) -> R:
        event.wait()
        return job(handle)

    return run


def open_device(pages: Pages) -> PagedDevice:
    """The device that *pages* are on."""
    kind = pages[0][0].device.type
    name = f"{__package__}.{kind}_device"
    if find_spec(name) is None:
        name = f"{__package__}.torch_pages"
    opened: PagedDevice = importlib.import_module(name).open_device(pages)
    return opened
