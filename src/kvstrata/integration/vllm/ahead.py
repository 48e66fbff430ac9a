"""How much requests may ask for that are not the next to run.

What the server finds is leased until the request runs. With all of host memory leased to those in
line, nothing could come up from disk for the one whose turn it is.
"""

from collections import deque
from typing import Final

from kvstrata.integration.vllm.link import CacheLink
from kvstrata.manager.tasks import TaskState
from kvstrata.server.client import Pending

__all__ = ["AT_ITS_TURN", "Ahead"]

# Of the host tier. It leaves room for loads and saves, and for the line of another engine or two.
_IN_LINE: Final = 0.25
AT_ITS_TURN: Final = 0.5  # loads included: several are promoted side by side, one more has room


class Ahead:
    """The blocks that lookups keep in host memory, as far as is known.

    One that is not answered counts with all that it asks for, one that is with what it found.
    """

    def __init__(self, link: CacheLink) -> None:
        self._link = link
        self._connection = link.number
        self._blocks: dict[Pending, int] = {}  # of lookups of that connection
        self._total = 0  # of them
        self._unanswered: deque[Pending] = deque()  # in the order of asking; some are given back

    def fits(self, blocks: int, share: float = _IN_LINE) -> bool:
        """Whether *blocks* more are no more than *share* of the host tier; one by itself may ask."""
        self._take_answers()
        return not self._total or self._total + blocks <= self._link.host_slots * share

    def take(self, pending: Pending, blocks: int) -> None:
        """*pending*, just sent, asks for *blocks*."""
        self._take_answers()
        self._blocks[pending] = blocks
        self._total += blocks
        self._unanswered.append(pending)

    def give_back(self, pending: Pending) -> None:
        """The lookup is over: nothing is kept for it, or what is is being loaded."""
        self._total -= self._blocks.pop(pending, 0)

    def _take_answers(self) -> None:
        if self._connection != self._link.number:  # the leases of the one before are void
            self._connection = self._link.number
            self._blocks.clear()
            self._total = 0
            self._unanswered.clear()
        while self._unanswered and self._is_known(self._unanswered[0]):
            pending = self._unanswered.popleft()
            if pending in self._blocks:
                found = pending.status.matched_blocks if pending.status is not None else 0
                self._total -= self._blocks[pending] - found
                self._blocks[pending] = found

    def _is_known(self, pending: Pending) -> bool:
        """Whether *pending* keeps no more than it does now."""
        if pending not in self._blocks:
            return True
        status = pending.status
        return pending.reply is not None and (
            status is None or status.state is not TaskState.SEARCHING
        )
