"""Which of the numbers below a bound are free, in arrays."""

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import InvariantViolated


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
        self._used = np.zeros(capacity, np.bool_)

    @property
    def nbytes(self) -> int:
        return self._released.nbytes + self._used.nbytes

    @property
    def count(self) -> int:
        """How many are free."""
        return self.capacity - self.fresh + self._top

    @property
    def used(self) -> int:
        return self.fresh - self._top

    def is_used(self, ids: NDArray[np.integer]) -> NDArray[np.bool_]:
        flags: NDArray[np.bool_] = self._used[ids]
        return flags

    def take(self, count: int) -> NDArray[np.int32]:
        """*count* free numbers, fewer if there are not as many."""
        again = min(count, self._top)
        new = min(count - again, self.capacity - self.fresh)
        ids = np.empty(again + new, np.int32)
        ids[:again] = self._released[self._top - again : self._top][::-1]
        ids[again:] = np.arange(self.fresh, self.fresh + new, dtype=np.int32)
        self._top -= again
        self.fresh += new
        self._used[ids] = True
        return ids

    def release(self, ids: NDArray[np.int32]) -> None:
        """Give *ids* back, all different.

        Raises ``InvariantViolated``, and changes nothing, if one of them is free already.
        """
        if not len(ids):
            return
        if ids.min() < 0 or ids.max() >= self.capacity or not self._used[ids].all():
            raise InvariantViolated("a number is released that was not taken")
        self._used[ids] = False
        if ids[0] < ids[-1]:
            ids = ids[::-1]
        self._released[self._top : self._top + len(ids)] = ids
        self._top += len(ids)

    def check(self) -> None:
        """Raises ``InvariantViolated`` unless free + used = capacity and no number is both."""
        used = int(self._used.sum())
        if used != self.used or used + self.count != self.capacity:
            raise InvariantViolated(f"{used} used + {self.count} free != {self.capacity}")
        released = self._released[: self._top]
        if self._used[released].any():
            raise InvariantViolated("a number is both free and used")
        if len(np.unique(released)) != len(released):
            raise InvariantViolated("a number is free twice")
