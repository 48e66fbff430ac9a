"""Tokens whose KV goes from host slots to other places of the cache: the same in all layers."""

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from kvstrata.blend.position import PositionCorrector, Rotation

__all__ = ["TokenMoves"]


class TokenMoves:
    """Where each of some tokens comes from, and goes to.

    On the device of the cache: ``rows``, int64 (tokens,), places in the pages that are read, and
    ``slots``, in the cache. What layers have in common is made once.
    """

    def __init__(
        self,
        rows: NDArray[np.int64],
        slots: torch.Tensor,
        sources: NDArray[np.int64],
        targets: NDArray[np.int64],
        device: torch.device,
    ) -> None:
        """*sources* and *targets* are positions: where the tokens stood, and where they will."""
        self.rows = torch.from_numpy(rows).to(device)
        self.slots = slots.to(device)
        self._sources = sources
        self._targets = targets
        self._rotations: dict[PositionCorrector, Rotation] = {}
        self._checked: set[PositionCorrector] = set()

    def rotation(self, corrector: PositionCorrector) -> Rotation:
        """Of the keys; raises ``InvariantViolated`` for a position that its table has not."""
        if corrector not in self._rotations:
            self._rotations[corrector] = corrector.rotation(self._sources, self._targets)
        return self._rotations[corrector]

    def positions(self, corrector: PositionCorrector) -> tuple[torch.Tensor, torch.Tensor]:
        """The sources and the targets, on the device; raises as ``rotation`` does."""
        if corrector not in self._checked:
            corrector.check(self._sources, self._targets)
            self._checked.add(corrector)
        return self._on_device

    @cached_property
    def _on_device(self) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.rows.device
        return (
            torch.from_numpy(self._sources).to(device),
            torch.from_numpy(self._targets).to(device),
        )
