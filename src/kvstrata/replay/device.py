"""The engine's own prefix cache, which stands in front of us."""

from collections import OrderedDict

from kvstrata.replay.hashing import Identities

__all__ = ["DeviceCache"]


class DeviceCache:
    """What vLLM's prefix cache does with whole prompts, one at a time.

    The least recently used block goes first; of a prompt's blocks the last one, since vLLM frees
    them in that order. A block may go before those that continue from it. What vLLM adds for
    tokens that it generates is not in a trace, so a real one holds somewhat fewer prompts.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()  # oldest first

    def request(self, blocks: Identities) -> int:
        """How many leading *blocks* are there; all of them are there afterwards, if they fit."""
        keys = blocks.tolist()
        held = self._blocks
        hits = next((i for i, key in enumerate(keys) if key not in held), len(keys))
        for key in reversed(keys):
            held[key] = None
            held.move_to_end(key)
        while len(held) > self._capacity_blocks:
            held.popitem(last=False)
        return hits
