"""Loads layer by layer: what they copy, and how the engine learns of each layer.

One job loads all layers of a step, in the order in which a forward needs them. It opens a gate for
each: the engine's thread waits until the gate is open, which on a device that copies by itself
means that the copies have been asked for, and the engine's stream waits until they have arrived.
Whether all bytes are what they should be is known when the job has ended, and not before.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvstrata.transfer.driver import Event
from kvstrata.transfer.guarded import Copied, RankSlots, Run
from kvstrata.transfer.lanes import Handle, Job

__all__ = ["LayerGates", "Part", "copy_part"]


@dataclass(slots=True, eq=False)
class Part:
    """What one task copies of each layer; once *doubt* says why not, its bytes are not believed."""

    slots: RankSlots
    runs: Sequence[Run]
    doubt: object | None = None
    places: Any = None  # of the runs, once a device has looked them up for all layers


class LayerGates:
    """Gates of the layers of one step, opened in order by the job that loads them. Thread-safe."""

    def __init__(self, layers: int) -> None:
        self.layers: Final = layers
        self._events: list[Event | None] = []  # of the gates that are open
        self._is_over = False
        self._changed = threading.Condition()  # guards both

    def open(self, event: Event | None = None) -> None:
        """The next layer may be used once *event* is over; None: from now on."""
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def close(self) -> None:
        """The job has ended; gates that it has not opened stay shut, and nobody waits at them."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait(self, layer: int, timeout_seconds: float) -> bool:
        """Block until the gate of *layer* is open or never will be; False if the time ran out."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._is_over or layer < len(self._events), timeout_seconds
            )

    def event(self, layer: int) -> Event | None:
        """What has to be over before *layer* is used; None if nothing has, or its gate is shut."""
        with self._changed:
            return self._events[layer] if layer < len(self._events) else None


def copy_part(job: Job[Copied], part: Part, handle: Handle[Copied]) -> None:
    """Do *job*, which copies one layer of *part*, unless that is in doubt; note what it leaves.

    It makes way for nobody: what comes behind it is another layer.
    """
    if part.doubt is not None:
        return
    try:
        while (copied := job(handle)) is None:
            pass
    except Exception as e:  # noqa: BLE001 - thread top: that of one task of several
        part.doubt = e
    else:
        if copied is not Copied.WHOLE:
            part.doubt = copied.value
