"""Which of the numbers below a bound are free, in arrays."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import InvariantViolated

_FREE: Final = 0
_USED: Final = 1
_MARK_BITS: Final = 7
_MARKS: Final = np.uint8((1 << _MARK_BITS) - 1)


class FreeIds:
    """Hands out the numbers ``0 .. capacity-1``, many at once; O(1) a number.

    Never-used numbers are handed out in ascending order, so that memory behind them is first
    touched from the start. Released ones are used again last-in first-out, the last batch
    ascending, so that neighbours stay neighbours.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.fresh = 0  # numbers from here on were never used
        self._released = np.zeros(capacity, np.int32)
        self._top = 0  # of the stack in ``_released``
        self._state = np.zeros(capacity, np.uint8)  # _FREE or _USED

    @property
    def nbytes(self) -> int:
        return self._released.nbytes + self._state.nbytes

    @property
    def free(self) -> int:
        """How many are free."""
        return self.capacity - self.fresh + self._top

    @property
    def used(self) -> int:
        return self.fresh - self._top

    def is_used(self, ids: NDArray[np.integer]) -> NDArray[np.bool_]:
        used: NDArray[np.bool_] = self._state[ids] != _FREE
        return used

    def take(self, count: int) -> NDArray[np.int32]:
        """*count* free numbers, fewer if there are not as many."""
        again = min(count, self._top)
        new = min(count - again, self.capacity - self.fresh)
        ids = np.empty(again + new, np.int32)
        ids[:again] = self._released[self._top - again : self._top][::-1]
        ids[again:] = np.arange(self.fresh, self.fresh + new, dtype=np.int32)
        self._top -= again
        self.fresh += new
        self._state[ids] = _USED
        return ids

    def release(self, ids: NDArray[np.int32]) -> None:
        """Give *ids* back, all different.

        Raises ``InvariantViolated``, and changes nothing, if one is free already or there twice.
        """
        if not len(ids):
            return
        if ids.min() < 0 or ids.max() >= self.capacity or not self._state[ids].all():
            raise InvariantViolated("a number is released that was not taken")
        if self._repeat(ids):
            self._state[ids] = _USED
            raise InvariantViolated("a number is released twice")
        self._state[ids] = _FREE
        if ids[0] < ids[-1]:
            ids = ids[::-1]
        self._released[self._top : self._top + len(ids)] = ids
        self._top += len(ids)

    def check(self) -> None:
        """Raises ``InvariantViolated`` unless free + used = capacity and no number is both."""
        used = int(np.count_nonzero(self._state == _USED))
        if used != self.used or used + self.free != self.capacity:
            raise InvariantViolated(f"{used} used + {self.free} free != {self.capacity}")
        if np.count_nonzero(self._state) != used:
            raise InvariantViolated("a number is neither free nor used")
        released = self._released[: self._top]
        if self._state[released].any():
            raise InvariantViolated("a number is both free and used")
        if len(np.unique(released)) != len(released):
            raise InvariantViolated("a number is free twice")

    def _repeat(self, ids: NDArray[np.int32]) -> bool:
        """Whether an id is there twice; spoils the states of *ids*.

        Of two marks written for one id only the later is found there again. A state has room for
        some bits of a position, so they are written one part after another.
        """
        positions = np.arange(len(ids))
        for shift in range(0, (len(ids) - 1).bit_length(), _MARK_BITS):
            marks = (positions >> shift).astype(np.uint8) & _MARKS | ~_MARKS
            self._state[ids] = marks
            if (self._state[ids] != marks).any():
                return True
        return False
