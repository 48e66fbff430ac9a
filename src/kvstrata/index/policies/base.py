"""What every eviction policy promises, and the search for victims that they share."""

from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.keys import BlockIds

MayLeave = Callable[[BlockIds], NDArray[np.bool_]]
"""Which of some blocks may leave, each when those before it that may have left."""

SEARCH_LIMIT: Final = 1 << 16  # refusals, after which a search gives up for now
_BATCH: Final = 64  # blocks asked for together after a first refusal, then four times as many
_MAX_BATCH: Final = 8192


class EvictionPolicy(Protocol):
    """The order in which the blocks of one tier are given up. Not thread-safe.

    Of blocks that were used together the last of the prompt is given up first, so that what
    stays is a prefix: each call takes them in prompt order. Time is proportional to the blocks
    of a call, and to the victims found and the blocks that refused to leave.
    """

    def __len__(self) -> int: ...

    def admit(self, ids: BlockIds) -> None:
        """*ids* have entered the tier, in prompt order.

        Blocks that continue from others are best told after these were touched: what is met
        before its children cannot leave, and is moved on.
        """
        ...

    def touch(self, ids: BlockIds) -> None:
        """*ids* were used together, in prompt order; those not in this tier are passed over."""
        ...

    def remove(self, ids: BlockIds) -> None:
        """*ids* have left the tier; those not in it are passed over.

        To be called while the ids still are those of the same blocks.
        """
        ...

    def victims(self, count: int, may_leave: MayLeave) -> BlockIds:
        """Up to *count* blocks to give up next, in that order; they stay until ``remove``.

        A block that may not leave when it is met is treated as if just used: no search pays for
        it twice. There are fewer than *count* if every block of the tier was met without finding
        more, or after ``SEARCH_LIMIT`` refusals; another call then goes on with the next.
        """
        ...

    def check(self) -> None:
        """Raises ``InvariantViolated`` if what the policy knows contradicts itself."""
        ...


def search(
    tier_blocks: int,
    count: int,
    may_leave: MayLeave,
    following: Callable[[int], BlockIds],
    refuse: Callable[[BlockIds], None],
) -> BlockIds:
    """``EvictionPolicy.victims`` of a tier with so many blocks.

    *following* gives the next blocks in the order of the policy, at most so many; those of them
    that may not leave are given to *refuse*, and may be met again.
    """
    chosen = np.empty(0, np.int32)
    in_a_row = refused = 0
    size = count
    while len(chosen) < count and refused < SEARCH_LIMIT:
        unmet = tier_blocks - len(chosen) - in_a_row  # since the last that was chosen
        batch = following(min(size, unmet)) if unmet > 0 else chosen[:0]
        if not len(batch):
            break
        missing = count - len(chosen)
        together = np.concatenate((chosen, batch)) if len(chosen) else batch
        allowed = may_leave(together)[len(chosen) :]
        places = np.flatnonzero(allowed)[:missing]
        if len(places) == missing:
            batch, allowed = batch[: places[-1] + 1], allowed[: places[-1] + 1]
        if len(places):
            chosen = np.concatenate((chosen, batch[allowed]))
            in_a_row = -1 - int(places[-1])
        in_a_row += len(batch)
        size = count - len(chosen)
        if len(places) < len(batch):
            refuse(batch[~allowed])
            refused += len(batch) - len(places)
            size = min(max(_BATCH, 4 * len(batch)), _MAX_BATCH)
    return chosen
