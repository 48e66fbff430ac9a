"""What of host memory goes to which tier below, and when. Not thread-safe."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.keys import BlockIds
from kvstrata.core.write_rule import WriteRule, WriteWhen
from kvstrata.index.places import DISK, REMOTE
from kvstrata.index.tree import PrefixIndex
from kvstrata.manager.write_queue import WriteQueue

LowerTier = Literal["disk", "remote"]

BIT: Final[Mapping[LowerTier, int]] = {"disk": DISK, "remote": REMOTE}
"""Of ``PrefixIndex.where``, for a block that the tier has."""

_MOST_REUSES: Final = np.uint8(0xFF)


def _never() -> bool:
    return False


@dataclass(slots=True)
class _Writes:
    """To one tier."""

    rule: WriteRule
    queue: WriteQueue
    is_stopped: Callable[[], bool] = _never


class Writes:
    """The blocks that wait for a tier below, by the rule of each tier."""

    def __init__(
        self,
        index: PrefixIndex,
        rules: Mapping[LowerTier, WriteRule],
        wake: Callable[[LowerTier], None],
    ) -> None:
        """*wake* is called when a tier has something to write."""
        self._index = index
        self._wake = wake
        self._tiers = {
            tier: _Writes(rule, WriteQueue(index.capacity)) for tier, rule in rules.items()
        }
        self._reuses = np.zeros(index.capacity, np.uint8)  # since they came to host memory
        self._refused = np.zeros(index.capacity, np.uint8)  # likewise, by tiers of these bits
        self.any_reused = any(rule.when == "reused" for rule in rules.values())
        self.any_evicted = any(rule.when == "evicted" for rule in rules.values())

    def __bool__(self) -> bool:
        """Whether there is a tier below."""
        return bool(self._tiers)

    def waiting(self, tier: LowerTier) -> int:
        return len(self._tiers[tier].queue)

    def stopped_if(self, tier: LowerTier, is_stopped: Callable[[], bool]) -> None:
        """*is_stopped* says whether *tier* takes nothing for now: blocks then leave unwritten."""
        self._tiers[tier].is_stopped = is_stopped

    def is_last_moment(self, tier: LowerTier) -> bool:
        """Whether *tier* gets blocks before they are evicted only."""
        return self._tiers[tier].rule.when == "evicted"

    def saved(self, ids: BlockIds) -> None:
        """*ids* have come to host memory."""
        self._reuses[ids] = 0
        self._refused[ids] = 0
        self._queue(ids, "saved")

    def found(self, ids: BlockIds) -> None:
        """*ids*, of host memory, were asked for."""
        reuses = self._reuses[ids]
        reuses += reuses != _MOST_REUSES
        self._reuses[ids] = reuses
        for tier, writes in self._tiers.items():
            if writes.rule.when == "reused":
                self.add(tier, ids[reuses == writes.rule.reuses])

    def leaving(self, ids: BlockIds) -> None:
        """*ids* are about to leave host memory."""
        self._queue(ids, "evicted")

    def refused(self, tier: LowerTier, ids: BlockIds) -> None:
        """*tier* was offered *ids* and did not keep them: they need not wait for it."""
        self._refused[ids] |= np.uint8(BIT[tier])

    def have_to_be_written(self, ids: BlockIds) -> NDArray[np.bool_]:
        """Which of *ids* may not leave host memory before a tier below has got them.

        A tier that is stopped is not waited for, nor is one that has refused the block.
        """
        lacking = np.zeros(len(ids), np.bool_)
        done = self._index.where.take(ids) | self._refused.take(ids)
        for tier, writes in self._tiers.items():
            if writes.rule.when == "evicted" and not writes.is_stopped():
                lacking |= (done & np.uint8(BIT[tier])) == 0
        return lacking

    def add(self, tier: LowerTier, ids: BlockIds) -> None:
        """What *tier* lacks of *ids* waits for it."""
        if self._tiers[tier].queue.add(ids[self._lack(tier, ids)]):
            self._wake(tier)

    def take(self, tier: LowerTier, count: int) -> BlockIds:
        """At most *count* blocks that wait for *tier*, oldest first; they wait no longer.

        Those that a reset has taken from the index are passed over: the tier has forgotten them.
        """
        while len(ids := self._tiers[tier].queue.pop(count)):
            found = ids[~self._index.is_retired(ids)]
            if len(found):
                return found
        return ids

    def put_back(self, tier: LowerTier, ids: BlockIds) -> None:
        """*ids* of ``take`` wait again, and *tier* is not woken for them."""
        self._tiers[tier].queue.add(ids)

    def lost(self, ids: BlockIds) -> int:
        """How many of *ids*, which leave host memory, no tier has that was to get them."""
        lower = self._index.where.take(ids) & np.uint8(DISK | REMOTE)
        gone = ids[lower == 0]
        wanted = np.zeros(len(gone), np.bool_)
        for writes in self._tiers.values():
            least = writes.rule.reuses if writes.rule.when == "reused" else 0
            wanted |= self._reuses[gone] >= least
        return int(np.count_nonzero(wanted))

    def discard(self, ids: BlockIds) -> None:
        """*ids* wait for no tier any longer."""
        for writes in self._tiers.values():
            writes.queue.discard(ids)

    def _queue(self, ids: BlockIds, when: WriteWhen) -> None:
        for tier, writes in self._tiers.items():
            if writes.rule.when == when:
                self.add(tier, ids)

    def _lack(self, tier: LowerTier, ids: BlockIds) -> NDArray[np.bool_]:
        lacking: NDArray[np.bool_] = (self._index.where.take(ids) & np.uint8(BIT[tier])) == 0
        return lacking
