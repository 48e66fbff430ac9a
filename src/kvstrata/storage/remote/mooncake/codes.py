"""What the error codes of Mooncake Store mean for a block."""

from collections.abc import Iterable
from typing import Final

from kvstrata.core.errors import FaultCause

__all__ = [
    "MASTER_FAULTS",
    "NOT_FOUND",
    "NOT_READY",
    "NO_OBJECT",
    "NO_ROOM",
    "WRONG_LENGTH",
    "fault_of",
    "has_failed",
]

NOT_READY: Final = -703
NO_OBJECT: Final = -704
# No usable replica, one that is just being written, no object, no replica, none any more.
NOT_FOUND: Final = frozenset({-702, NOT_READY, NO_OBJECT, -710, -712})
_TRANSFER_FAILED: Final = -800
WRONG_LENGTH: Final = (-600, _TRANSFER_FAILED)  # where another was asked for; or a node is gone
NO_ROOM: Final = frozenset({-200, -1700})  # of the segments, or of a tenant's quota

_MASTER_GONE: Final = -900
_MASTER_LATE: Final = -901
MASTER_FAULTS: Final = frozenset({_MASTER_GONE, _MASTER_LATE})


def has_failed(code: int) -> bool:
    """Whether *code* says nothing of the block."""
    return code < 0 and code not in NOT_FOUND and code not in NO_ROOM


def fault_of(codes: Iterable[int], *, stalled: bool) -> tuple[FaultCause, str]:
    """Why all blocks of a call have failed. *stalled*: it took as long as a node may be silent."""
    found = set(codes)
    if _MASTER_LATE in found:
        return "timeout", "the master does not answer in time"
    if _MASTER_GONE in found:
        return "unreachable", "the master is gone"
    if _TRANSFER_FAILED in found:
        if stalled:
            return "timeout", "the nodes that hold the blocks do not answer in time"
        return "unreachable", "the nodes that hold the blocks are gone"
    return "refused", f"error {min(found)}"
