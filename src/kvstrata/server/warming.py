"""Brings a prompt's blocks up into host memory, and tells how far it is."""

from collections.abc import Callable
from typing import Final, NamedTuple

from kvstrata.core.keys import Keys
from kvstrata.core.types import NamespaceId
from kvstrata.manager.tasks import UNSETTLED
from kvstrata.server.client import ManagerClient

__all__ = ["Warmed", "warm"]

_PIECE_BLOCKS: Final = 1024
_LOOK_SECONDS: Final = 0.1
_PIECE_SECONDS: Final = 120.0  # for blocks that are still on their way then nobody waits


class Warmed(NamedTuple):
    """Leading blocks of a prompt."""

    host_blocks: int  # in host memory now
    local_blocks: int  # there or on disk
    asked_blocks: int


def warm(
    client: ManagerClient, namespace: NamespaceId, keys: Keys, progress: Callable[[Warmed], None]
) -> Warmed:
    """Have the leading *keys* read into host memory as far as they are in a tier and there is room.

    Their order among what leaves next is as if they had been asked for. *progress* hears of every
    change. Ends when no more comes.
    """
    asked = len(keys)

    def located() -> Warmed:
        return Warmed(*client.locate(namespace, keys), asked)

    state = located()
    progress(state)
    while state.host_blocks < asked:
        task = client.prefetch(namespace, keys[: state.host_blocks + _PIECE_BLOCKS])
        pauses = round(_PIECE_SECONDS / _LOOK_SECONDS)
        while task and pauses:
            found = client.wait([task], _LOOK_SECONDS)
            progress(located())
            pauses -= 1
            if task not in found or found[task].state not in UNSETTLED:
                break
        before, state = state, located()
        if state.host_blocks <= before.host_blocks:
            break
    progress(state)
    return state
