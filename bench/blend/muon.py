"""Muon: momentum whose singular values are all made about one before it is applied.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; the scale by which a
step is as large as one of AdamW is that of Liu et al., arXiv:2502.16982. torch has one that computes
in bfloat16, which a CPU without instructions for it does far slower than float32.
"""

from collections.abc import Iterable
from typing import Final

import torch

__all__ = ["Muon"]

COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)  # of the iteration's quintic polynomial
ITERATIONS: Final = 5
ADAM_SCALE: Final = 0.2
MOMENTUM: Final = 0.95


class Muon:
    """For the weights of hidden layers, which are matrices; those of one shape are one batch."""

    def __init__(self, weights: Iterable[torch.Tensor], *, decay: float) -> None:
        """*decay*: of the weights in each step, times its rate."""
        by_shape: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for weight in weights:
            by_shape.setdefault(tuple(weight.shape), []).append(weight)
        self._batches = [
            (batch, torch.zeros(len(batch), *shape)) for shape, batch in by_shape.items()
        ]
        self._decay = decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for weights, momentum in self._batches:
            gradients = torch.stack([weight.grad for weight in weights])
            momentum.mul_(MOMENTUM).add_(gradients)
            moves = even(gradients + MOMENTUM * momentum)
            scale = ADAM_SCALE * max(moves.shape[1:]) ** 0.5
            for weight, move in zip(weights, moves, strict=True):
                weight.mul_(1 - rate * self._decay).sub_(move, alpha=rate * scale)


def even(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices with the same singular vectors and singular values between about 0.7 and 1.2.

    Shape (matrices, rows, columns), by Newton and Schulz.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.mT if tall else matrices
    found = found / (found.norm(dim=(1, 2), keepdim=True) + 1e-7)
    first, third, fifth = COEFFICIENTS
    for _ in range(ITERATIONS):
        square = found @ found.mT
        found = first * found + (third * square + fifth * square @ square) @ found
    return found.mT if tall else found
