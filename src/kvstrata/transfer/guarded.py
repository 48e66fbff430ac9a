"""Copies between device blocks and host slots that notice when a slot changes hands.

The server bumps a slot's generation before the slot gets a new owner, so a copy is what it was
meant to be if and only if the generation was the expected one before and after it. Checking costs
nothing against copying: it is done around every slot.
"""

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvstrata.core.errors import InvariantViolated
from kvstrata.storage.mapping import HostMapping
from kvstrata.transfer.device import Bytes, DeviceCopier
from kvstrata.transfer.lanes import Handle, Job

__all__ = ["TURN_BYTES", "Copied", "RankSlots", "Run", "load_job", "save_job", "split_runs"]

TURN_BYTES: Final = 32 << 20
"""What a job copies before it makes way for those that wait in its lane; a run is copied whole."""


class Copied(enum.Enum):
    """How a copy job ended that did not raise. Only ``WHOLE`` bytes may be believed."""

    WHOLE = "whole"
    STALE = "a slot has a new owner"
    STOPPED = "it was stopped"


@dataclass(frozen=True, slots=True)
class Run:
    """Device blocks of one group that lie one after another in one slot."""

    slot: int
    generation: int  # the slot's, while it holds or awaits these bytes
    offset: int  # of the first device block among the group's in the slot, in device blocks
    device_blocks: Sequence[int]
    group: int = 0


@dataclass(frozen=True, slots=True)
class RankSlots:
    """One rank's region of every slot of one mapping: the device blocks of its groups in turn.

    Groups that share no slot may lie in the same place.
    """

    mapping: HostMapping
    start_bytes: int  # of the region, within a slot
    group_bytes: tuple[int, ...]  # of each group's part of the region
    group_starts: tuple[int, ...]  # within the region

    def rows(self, run: Run, row_bytes: int) -> Bytes:
        """The host side of *run*, (device blocks, row_bytes)."""
        start = self.start_bytes + self.group_starts[run.group]
        region = self.mapping.data[run.slot, start : start + self.group_bytes[run.group]]
        return region.reshape(-1, row_bytes)[run.offset : run.offset + len(run.device_blocks)]

    def is_current(self, run: Run) -> bool:
        return int(self.mapping.generations[run.slot]) == run.generation


def split_runs(
    device_blocks: Sequence[int],
    slots: Sequence[tuple[int, int]],
    *,
    per_slot: Sequence[int],
    absent: int,
) -> list[Run]:
    """Lay device blocks out over *slots*, pairs of slot and generation.

    A slot takes *per_slot* of each group, one group after the other. *absent* stands for a device
    block that is not copied. Raises ``InvariantViolated`` unless the numbers agree.

    >>> [(r.slot, r.group, r.offset, r.device_blocks)
    ...  for r in split_runs([-1, 7, 8, 9, 5, -1], [(4, 0), (5, 0)], per_slot=(2, 1), absent=-1)]
    [(4, 0, 1, [7]), (4, 1, 0, [8]), (5, 0, 0, [9, 5])]
    """
    if not slots or len(device_blocks) != len(slots) * sum(per_slot):
        raise InvariantViolated(
            f"{len(device_blocks)} device blocks for {len(slots)} slots of {sum(per_slot)}"
        )
    if min(slot for slot, _ in slots) < 0:
        raise InvariantViolated(f"negative slot in {slots}")
    runs: list[Run] = []
    start = 0
    for slot, generation in slots:
        for group, count in enumerate(per_slot):
            part = device_blocks[start : start + count]
            start += count
            for offset, blocks in _present(part, absent):
                runs.append(Run(slot, generation, offset, blocks, group))
    return runs


def _present(part: Sequence[int], absent: int) -> list[tuple[int, Sequence[int]]]:
    """The stretches of *part* without *absent*, and where they begin."""
    if absent not in part:
        return [(0, part)]
    found = []
    start = 0
    for end in (*(i for i, block in enumerate(part) if block == absent), len(part)):
        if end > start:
            found.append((start, part[start:end]))
        start = end + 1
    return found


def load_job(
    copiers: Sequence[DeviceCopier],
    slots: RankSlots,
    runs: Sequence[Run],
    layer: int | None = None,
) -> Job[Copied]:
    """A job that copies *runs* to the device and ends at the first doubt; a copier a group.

    *layer*: copy the pages of that layer of each group alone.
    """
    copies = [_of_layer(copier.copy_to_device, layer) for copier in copiers]
    left = deque(runs)
    return lambda handle: _copy(handle, copiers, slots, left, copies)


def save_job(
    copiers: Sequence[DeviceCopier],
    slots: RankSlots,
    runs: Sequence[Run],
    layer: int | None = None,
) -> Job[Copied]:
    """A job that copies *runs* to the host and ends at the first doubt; the rest as above."""
    copies = [_of_layer(copier.copy_to_host, layer) for copier in copiers]
    left = deque(runs)
    return lambda handle: _copy(handle, copiers, slots, left, copies)


def _of_layer(copy: Callable[..., None], layer: int | None) -> Callable[..., None]:
    return copy if layer is None else partial(copy, layer=layer)


def _copy(
    handle: Handle[Copied],
    copiers: Sequence[DeviceCopier],
    slots: RankSlots,
    left: deque[Run],
    copies: Sequence[Callable[..., None]],
) -> Copied | None:
    """A turn, of which all that it has copied is certain; *left*: what no turn has begun."""
    turn_bytes = 0
    while left:
        if handle.stopping:
            return Copied.STOPPED
        if turn_bytes >= TURN_BYTES and handle.others:
            return None
        run = left.popleft()
        if not slots.is_current(run):
            return Copied.STALE
        rows = slots.rows(run, copiers[run.group].device_block_bytes)
        copies[run.group](run.device_blocks, rows)
        if not slots.is_current(run):
            return Copied.STALE
        turn_bytes += rows.nbytes
    return Copied.WHOLE
