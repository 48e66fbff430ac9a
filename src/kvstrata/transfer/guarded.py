"""Copies between device blocks and host slots that notice when a slot changes hands.

The server bumps a slot's generation before the slot gets a new owner, so a copy is what it was
meant to be if and only if the generation was the expected one before and after it. Checking costs
nothing against copying: it is done around every slot.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstrata.core.errors import InvariantViolated
from kvstrata.storage.mapping import HostMapping
from kvstrata.transfer.device import Bytes, DeviceCopier
from kvstrata.transfer.lanes import Handle

__all__ = ["Copied", "RankSlots", "Run", "load_job", "save_job", "split_runs"]


class Copied(enum.Enum):
    """How a copy job ended that did not raise. Only ``WHOLE`` bytes may be believed."""

    WHOLE = "whole"
    STALE = "a slot has a new owner"
    STOPPED = "it was stopped"


@dataclass(frozen=True, slots=True)
class Run:
    """Device blocks that lie one after another in one slot."""

    slot: int
    generation: int  # the slot's, while it holds or awaits these bytes
    offset: int  # of the first device block in the slot, in device blocks
    device_blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class RankSlots:
    """One rank's region of every slot of one mapping."""

    mapping: HostMapping
    start_bytes: int  # of the region, within a slot
    rank_bytes: int

    def rows(self, run: Run, row_bytes: int) -> Bytes:
        """The host side of *run*, (device blocks, row_bytes)."""
        region = self.mapping.data[run.slot, self.start_bytes : self.start_bytes + self.rank_bytes]
        return region.reshape(-1, row_bytes)[run.offset : run.offset + len(run.device_blocks)]

    def is_current(self, run: Run) -> bool:
        return int(self.mapping.generations[run.slot]) == run.generation


def split_runs(
    device_blocks: Sequence[int],
    slots: Sequence[tuple[int, int]],
    *,
    first_offset: int,
    per_slot: int,
) -> list[Run]:
    """Lay consecutive device blocks out over *slots*, pairs of slot and generation.

    Raises ``InvariantViolated`` unless they fill every slot but the first and last and reach both.

    >>> [(r.slot, r.offset, r.device_blocks)
    ...  for r in split_runs([7, 8, 9], [(4, 0), (5, 0)], first_offset=3, per_slot=4)]
    [(4, 3, [7]), (5, 0, [8, 9])]
    """
    needed = -(-(first_offset + len(device_blocks)) // per_slot)
    if not (device_blocks and 0 <= first_offset < per_slot and len(slots) == needed):
        raise InvariantViolated(
            f"{len(device_blocks)} device blocks from offset {first_offset} "
            f"do not lie in {len(slots)} slots of {per_slot}"
        )
    if min(slot for slot, _ in slots) < 0:
        raise InvariantViolated(f"negative slot in {slots}")
    runs, offset, start = [], first_offset, 0
    for slot, generation in slots:
        end = start + per_slot - offset
        runs.append(Run(slot, generation, offset, device_blocks[start:end]))
        offset, start = 0, end
    return runs


def load_job(
    copier: DeviceCopier, slots: RankSlots, runs: Sequence[Run]
) -> Callable[[Handle[Copied]], Copied]:
    """A job that copies *runs* to the device and ends at the first doubt."""
    return lambda handle: _copy(handle, copier, slots, runs, copier.copy_to_device)


def save_job(
    copier: DeviceCopier, slots: RankSlots, runs: Sequence[Run]
) -> Callable[[Handle[Copied]], Copied]:
    """A job that copies *runs* to the host and ends at the first doubt."""
    return lambda handle: _copy(handle, copier, slots, runs, copier.copy_to_host)


def _copy(
    handle: Handle[Copied],
    copier: DeviceCopier,
    slots: RankSlots,
    runs: Sequence[Run],
    copy: Callable[[Sequence[int], Bytes], None],
) -> Copied:
    for run in runs:
        if handle.stopping:
            return Copied.STOPPED
        if not slots.is_current(run):
            return Copied.STALE
        copy(run.device_blocks, slots.rows(run, copier.device_block_bytes))
        if not slots.is_current(run):
            return Copied.STALE
    return Copied.WHOLE
