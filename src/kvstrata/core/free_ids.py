"""Which of the numbers below a bound are free, in an array."""

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import InvariantViolated


class FreeIds:
    """Hands out the numbers ``0 .. capacity-1``, many at once; O(1) a number.

    Never-used numbers are handed out in ascending order, so that memory behind them is first
    touched from the start. Released ones are used again last-in first-out, each batch ascending,
    so that neighbours stay neighbours, whatever the order in which they leave.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.fresh = 0  # numbers from here on were never used
        self._stack = np.zeros(capacity, np.int32)
        self._height = 0

    @property
    def nbytes(self) -> int:
        """Bytes of address space."""
        return self._stack.nbytes

    @property
    def free(self) -> int:
        """How many are free."""
        return self.capacity - self.fresh + self._height

    @property
    def used(self) -> int:
        return self.fresh - self._height

    @property
    def released(self) -> NDArray[np.int32]:
        """Those that are free and were used before."""
        return self._stack[: self._height]

    def take(self, count: int) -> NDArray[np.int32]:
        """*count* free numbers, fewer if there are not as many."""
        again = min(count, self._height)
        new = min(count - again, self.capacity - self.fresh)
        self._height -= again
        ids = self._stack[self._height : self._height + again][::-1].copy()
        if new:
            ids = np.concatenate((ids, np.arange(self.fresh, self.fresh + new, dtype=np.int32)))
            self.fresh += new
        return ids

    def release(self, ids: NDArray[np.int32]) -> None:
        """Give *ids* back, which are in use and all different: that is for the caller to know."""
        self._push(np.sort(ids))

    def _push(self, ascending: NDArray[np.int32]) -> None:
        self._stack[self._height : self._height + len(ascending)] = ascending[::-1]
        self._height += len(ascending)

    def check(self, used: NDArray[np.bool_]) -> None:
        """Raises ``InvariantViolated`` unless exactly those flagged in *used* are in use."""
        if np.count_nonzero(used) != self.used or used[self.fresh :].any():
            raise InvariantViolated(f"{np.count_nonzero(used)} numbers are used, not {self.used}")
        if used[self.released].any():
            raise InvariantViolated("a number is both free and used")
        if len(np.unique(self.released)) != self._height:
            raise InvariantViolated("a number is free twice")
