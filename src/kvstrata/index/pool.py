"""The fixed slots of a tier: which are free."""

import numpy as np

from kvstrata.core.free_ids import FreeIds


class SlotPool(FreeIds):
    """Hands out slots ``0 .. capacity-1`` as ``FreeIds`` does; five bytes a slot.

    Memory that is prefaulted from its start is used first, and slots that were just released
    are used again while they are warm.
    """

    @property
    def longest_free_run(self) -> int:
        """The most free slots side by side. Looks at every slot that was ever used."""
        taken = np.flatnonzero(self._state[: self.fresh])
        edges = np.concatenate(([-1], taken, [self.capacity]))
        return int(np.diff(edges).max()) - 1
