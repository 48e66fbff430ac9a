"""The fixed slots of a tier: which are free."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.free_ids import FreeIds
from kvstrata.core.keys import as_index

_FREE: Final = 0
_USED: Final = 1
_LOOKED_AT: Final = 1 << 16

Slots = NDArray[np.int32]


class SlotPool(FreeIds):
    """Hands out slots ``0 .. capacity-1`` as ``FreeIds`` does; five bytes a slot.

    Memory that is prefaulted from its start is used first, and slots that were just released
    are used again while they are warm.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._state = np.zeros(capacity, np.uint8)  # _FREE or _USED

    @property
    def nbytes(self) -> int:
        """Bytes of address space."""
        return super().nbytes + self._state.nbytes

    @property
    def longest_free_run(self) -> int:
        """The most free slots side by side, of the unused ones and the 65,536 released last."""
        free = np.sort(self.released[-_LOOKED_AT:])
        ends = np.append(np.flatnonzero(np.diff(free) != 1), len(free) - 1)
        runs = np.diff(ends, prepend=-1)
        unused = self.capacity - self.fresh
        if len(free) and free[-1] == self.fresh - 1:
            unused += int(runs[-1])
        return max(unused, int(runs.max()))

    def take(self, count: int) -> Slots:
        """*count* slots that nobody holds, fewer if there are not as many."""
        slots = super().take(count)
        self._state[as_index(slots)] = _USED
        return slots

    def release(self, ids: Slots) -> None:
        """Give slots back.

        Raises ``InvariantViolated``, and changes nothing, if one is not held or there twice.
        """
        if not len(ids):
            return
        ids = np.sort(ids)
        if ids[0] < 0 or ids[-1] >= self.capacity or not self._state.take(ids).all():
            raise InvariantViolated("a slot is released that was not taken")
        if (ids[1:] == ids[:-1]).any():
            raise InvariantViolated("a slot is released twice")
        self._state[as_index(ids)] = _FREE
        self._push(ids)

    def is_used(self, slots: NDArray[np.integer]) -> NDArray[np.bool_]:
        used: NDArray[np.bool_] = self._state[slots] != _FREE
        return used

    def check(self, used: NDArray[np.bool_] | None = None) -> None:
        """Raises ``InvariantViolated`` unless free + used = capacity and no slot is both.

        With *used*, unless exactly those slots are in use as well.
        """
        super().check(self._state == _USED if used is None else used)
        if np.count_nonzero(self._state) != self.used or self.used + self.free != self.capacity:
            raise InvariantViolated(f"{self.used} used + {self.free} free != {self.capacity}")
