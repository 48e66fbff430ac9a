"""What one job copies of a load or a save."""

from typing import Final, NamedTuple

from kvstrata.core.errors import InvariantViolated
from kvstrata.integration.vllm.metadata import NULL_BLOCK, Load, Save
from kvstrata.transfer.guarded import Run, split_runs

__all__ = ["Piece", "Pieces"]

_SAVE_PIECE_BYTES: Final = 16 << 20  # a load waits for one piece of a save at most


class Piece(NamedTuple):
    """What one job copies."""

    runs: list[Run]
    blocks: int


class Pieces:
    """Splits what a plan says, for one rank."""

    def __init__(
        self, per_slot: tuple[int, ...], rank_bytes: int, *, has_states: bool = False
    ) -> None:
        """*per_slot*: device blocks of each KV cache group in a slot; *rank_bytes* in it.

        *has_states*: some groups are recurrent, so that no slot has device blocks of all.
        """
        self.per_slot: Final = per_slot
        self._rank_bytes = rank_bytes
        self._has_states = has_states

    def of_load(self, load: Load) -> list[Piece]:
        return [self._piece(load, 0, len(load.slots))]

    def of_save(self, save: Save) -> list[Piece]:
        """Several, so that a load need not wait for all of a large save."""
        if NULL_BLOCK in save.device_blocks and not self._has_states:
            raise InvariantViolated(f"save of a device block that is none: {save.device_blocks}")
        step = max(1, _SAVE_PIECE_BYTES // self._rank_bytes)
        return [self._piece(save, i, i + step) for i in range(0, max(1, len(save.slots)), step)]

    def _piece(self, task: Load | Save, first: int, end: int) -> Piece:
        """Slots *first* to *end* of *task*."""
        slots = list(zip(task.slots, task.generations, strict=False))[first:end]
        per_slot = sum(self.per_slot)
        last = end * per_slot if end < len(task.slots) else None  # too many are noticed
        blocks = task.device_blocks[first * per_slot : last]
        runs = split_runs(blocks, slots, per_slot=self.per_slot, absent=NULL_BLOCK)
        return Piece(runs, len(slots))
