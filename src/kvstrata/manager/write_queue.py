"""Blocks of host memory that a tier below has not got yet, oldest first."""

from collections import deque
from typing import Final

import numpy as np

from kvstrata.core.keys import BlockIds

_NONE: Final = np.empty(0, np.int32)


class WriteQueue:
    """First in, first out; a block is in it once. Not thread-safe.

    A block that is taken out early leaves its record behind, to be passed over later, so memory
    is bounded by compacting: four bytes a record, at most twice as many records as blocks.
    """

    def __init__(self, ids: int) -> None:
        """For block ids ``0 .. ids-1``."""
        self._is_in = np.zeros(ids, np.bool_)
        self._records: deque[BlockIds] = deque()
        self._recorded = 0
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def __contains__(self, block: int) -> bool:
        return bool(self._is_in[block])

    def add(self, ids: BlockIds) -> bool:
        """*ids* are new at the end; those that wait already keep their place. Whether any is new."""
        new = ids[~self._is_in[ids]]
        if not len(new):
            return False
        self._is_in[new] = True
        self._waiting += len(new)
        self._records.append(new)
        self._recorded += len(new)
        if self._recorded > 2 * self._waiting + 1024:
            self._compact()
        return True

    def discard(self, ids: BlockIds) -> None:
        """*ids* wait no longer."""
        self._waiting -= int(np.count_nonzero(self._is_in[ids]))
        self._is_in[ids] = False

    def pop(self, count: int) -> BlockIds:
        """At most *count* blocks, the oldest, which wait no longer."""
        taken: list[BlockIds] = []
        wanted = count
        while wanted and self._records:
            record = self._records.popleft()
            self._recorded -= len(record)
            live = self._live(record)
            if len(live) > wanted:
                self._records.appendleft(live[wanted:])
                self._recorded += len(live) - wanted
                live = live[:wanted]
            self._is_in[live] = False
            wanted -= len(live)
            taken.append(live)
        self._waiting -= count - wanted
        return np.concatenate(taken) if taken else _NONE

    def _live(self, record: BlockIds) -> BlockIds:
        """Those of *record* that still wait, each once."""
        live = record[self._is_in[record]]
        if len(live) > 1:
            _, first = np.unique(live, return_index=True)
            live = live[np.sort(first)]
        return live

    def _compact(self) -> None:
        live = self._live(np.concatenate(self._records))
        self._records = deque([live])
        self._recorded = len(live)
