"""What copies on streams need of a device: streams of their own, and events to wait for.

A stream runs what it is given in order, some time later; it waits for events of other streams
without any thread that does. Whatever goes wrong on a device may be
told by any later call, for work of anybody's: it raises ``DeviceFault``.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import KVStrataError
from kvstrata.transfer.descriptors import Spans

__all__ = ["CopyStream", "DeviceFault", "Driver", "Event"]


class DeviceFault(KVStrataError):
    """The device did not do what it was asked; nothing it was asked to copy may be believed."""

    code = "device"


class Event(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Block the calling thread, and no other, until the stream has come so far."""
        ...

    def hold(self, stream: Any) -> None:
        """Have *stream*, as the driver knows it, run what comes next behind this; never waits."""
        ...


class CopyStream(Protocol):
    """A stream for copies of one direction. For one thread at a time."""

    def copy(self, spans: Spans) -> None:
        """Copy *spans* some time later, in any order; the arrays may go at once."""
        ...

    def record(self) -> Event:
        """The point behind all that was given to this stream so far."""
        ...

    def follow(self, event: Event) -> None:
        """What this stream is given from now on runs once *event* is over."""
        ...

    def wait_idle(self) -> None:
        """Block the calling thread until all that was given to this stream has run."""
        ...


class Driver(Protocol):
    """One device of this process."""

    def enter(self) -> None:
        """Make the calling thread one that may use this device; may be called again."""
        ...

    def fence(self) -> Event:
        """The point behind all that the engine has launched. For the engine's thread; never waits."""
        ...

    def follow(self, event: Event) -> None:
        """What the engine launches from now on runs once *event* is over. As ``fence``."""
        ...

    def bring(self, rows: NDArray[np.uint8], chosen: NDArray[np.int64]) -> Any:
        """Some of *rows*, (rows, bytes), as a tensor of this device, for what the engine launches.

        They have arrived when it returns; nothing that was launched before is waited for.
        """
        ...
