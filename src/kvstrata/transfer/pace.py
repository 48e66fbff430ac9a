"""How saves share the link of a device with the engine's steps.

A step brings its inputs to the device and its tokens to the host, a few bytes that it waits for. A
copy engine does not put them before what it has been asked for, so they wait for that: saves are
asked for little at a time while steps run, and leave the link alone as long as they have used it.
A step that takes long loses nothing by waiting for more, so it is time that tells, and no
event: engines whose last step began a moment ago are taken to be at work.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["Pace"]

_STEP_SECONDS: Final = 0.05  # of which two chunks of a save take 1 % of a link of PCIe 4
_MOST_REST_SECONDS: Final = 0.005  # a copy that was slow for reasons of its own


class Pace:
    """Half of the time for saves while steps run, all of it otherwise. For one saver at a time."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._steps_until = float("-inf")
        self._rests_until = float("-inf")

    def step_begins(self) -> None:
        """For the engine's thread."""
        self._steps_until = self._clock() + _STEP_SECONDS

    @property
    def is_shared(self) -> bool:
        """Whether steps run."""
        return self._clock() < self._steps_until

    @contextmanager
    def share(self) -> Iterator[None]:
        """Around a copy from asking for it to its arrival: behind what the last one owes."""
        owed = self._rests_until - self._clock()
        if owed > 0:
            self._sleep(owed)  # the engine's time; never more than 5 ms
        began = self._clock()
        try:
            yield
        finally:
            now = self._clock()
            self._rests_until = now + min(now - began, _MOST_REST_SECONDS)
