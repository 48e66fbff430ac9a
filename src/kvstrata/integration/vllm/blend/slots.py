"""The KV of tokens as it lies in host slots, and whether it still was that when it was read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvstrata.core.errors import InvariantViolated, ServerUnavailable
from kvstrata.storage.mapping import HostMapping

__all__ = ["SlotPages", "StaleSlot", "check_generations", "current"]

Bring = Callable[[NDArray[np.uint8], NDArray[np.int64]], torch.Tensor | None]

_BROUGHT_BYTES: Final = 128 << 20  # of the memory that vLLM leaves of a GPU


class StaleSlot(Exception):
    """A slot has a new owner: what was read of it is not what it was meant to be."""


@dataclass(frozen=True, slots=True)
class SlotPages:
    """One rank's pages in every slot: device blocks one after another, a page of each layer."""

    start_bytes: int  # of the rank's region, within a slot
    page_bytes: tuple[int, ...]  # of each layer
    per_slot: int  # device blocks
    bring: Bring
    """Of the device whose layers are read; see ``PagedDevice``."""

    @property
    def most_slots(self) -> int:
        """How many ``layers`` may be asked for at a time, for what that takes of a GPU's memory."""
        return max(1, _BROUGHT_BYTES // (self.per_slot * sum(self.page_bytes)))

    def layers(self, mapping: HostMapping, slots: NDArray[np.int64]) -> Iterator[torch.Tensor]:
        """A copy of the pages of each layer, in order: uint8 (slots * per_slot, page bytes).

        In the memory of the device, if that brings them, all layers before the first; else here.
        """
        row_bytes = sum(self.page_bytes)
        region = mapping.data[:, self.start_bytes : self.start_bytes + self.per_slot * row_bytes]
        brought = self.bring(region, slots)
        if brought is not None:
            yield from brought.view(-1, row_bytes).split(self.page_bytes, 1)
            return
        rows = np.lib.stride_tricks.as_strided(
            region, (len(region), self.per_slot, row_bytes), (region.strides[0], row_bytes, 1)
        )
        for size, end in zip(self.page_bytes, accumulate(self.page_bytes), strict=True):
            yield torch.from_numpy(rows[slots, :, end - size : end].reshape(-1, size))


def current(mapping: HostMapping | None, server_id: bytes) -> HostMapping:
    """*mapping*, if it is of that server's slots."""
    if mapping is None or mapping.server_id != server_id:
        raise ServerUnavailable("the host tier of the plan is not mapped here")
    return mapping


def check_generations(
    mapping: HostMapping, slots: NDArray[np.int64], generations: NDArray[np.int64]
) -> None:
    """Raises ``StaleSlot`` unless each of *slots* still has its generation."""
    if (slots < 0).any() or (slots >= mapping.slots).any():
        raise InvariantViolated(f"slots that are not there: {slots}")
    if (mapping.generations[slots].astype(np.int64) != generations).any():
        raise StaleSlot("a slot has a new owner")
