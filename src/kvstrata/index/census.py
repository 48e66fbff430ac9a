"""How many blocks each namespace has in each tier, kept up to date by every change."""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import InvariantViolated
from kvstrata.index.places import DISK, HELD, HOST, LOCAL

_COUNTED: Final = (LOCAL, HOST, DISK, HELD)
_ANY: Final = LOCAL | HELD


class NamespaceCounts(NamedTuple):
    blocks: int  # in host memory or on disk
    host: int
    disk: int
    host_slots: int  # of those in host memory, arriving there or being written


class Census:
    """Counts by a namespace's number."""

    def __init__(self) -> None:
        self._counts = np.zeros((len(_COUNTED), 8), np.int64)

    def of(self, number: int) -> NamespaceCounts:
        if number >= self._counts.shape[1]:
            return NamespaceCounts(0, 0, 0, 0)
        return NamespaceCounts(*self._counts[:, number].tolist())

    def count(
        self,
        numbers: NDArray[np.int32],
        before: NDArray[np.uint8],
        after: NDArray[np.uint8],
        places: int,
    ) -> None:
        """Blocks of these namespaces have come to *places* or left them."""
        if not len(numbers) or not places & _ANY:
            return
        first = int(numbers[0])
        alone = bool((numbers == first).all())
        highest = first if alone else int(numbers.max())
        while highest >= self._counts.shape[1]:
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)), axis=1)
        for row, bits in zip(self._counts, _COUNTED, strict=True):
            if not places & bits:
                continue
            inside, was_inside = after & np.uint8(bits), before & np.uint8(bits)
            if alone:
                row[first] += np.count_nonzero(inside) - np.count_nonzero(was_inside)
            else:
                np.add.at(row, numbers[inside != 0], 1)
                np.subtract.at(row, numbers[was_inside != 0], 1)

    def check(self, numbers: NDArray[np.int32], where: NDArray[np.uint8]) -> None:
        """Raises ``InvariantViolated`` unless the counts are those of all blocks."""
        for row, bits in zip(self._counts, _COUNTED, strict=True):
            inside = (where & np.uint8(bits)) != 0
            if (np.bincount(numbers[inside], minlength=len(row)) != row).any():
                raise InvariantViolated("the blocks of a namespace are counted wrongly")
