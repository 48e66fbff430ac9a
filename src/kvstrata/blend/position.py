"""Keys of tokens at one position of a prompt → the keys they have at another.

A rotary embedding turns each pair of a key's elements by an angle that grows with the position
(Su et al., RoFormer, arXiv:2104.09864, equation 15), so a key is moved by turning it on by the
difference of two angles. Values are not turned, and what a layer's other tokens have made of a key
stays in it: a moved key is that of the same tokens behind the same tokens, elsewhere.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvstrata.core.errors import ConfigError, InvariantViolated

__all__ = [
    "GATE_LIMIT",
    "QUANTISED_GATE_LIMIT",
    "PositionCorrector",
    "Rotation",
    "check_rope_settings",
    "gate_shifts",
    "mean_difference",
    "relative_difference",
]

GATE_LIMIT: Final = 0.2
"""``relative_difference`` above which keys are not those of the model.

The same tokens at other positions, through a whole model, differ by 6e-5 in float32 and 3e-2 in
bfloat16; with a rope that is not the model's by about 1.
"""

QUANTISED_GATE_LIMIT: Final = 0.5
"""The same for ``mean_difference``, where the cache keeps 8 bits.

There each key is rounded, and what the layers behind make of that differs, too: by 0.09 with 3 bits of a
fraction and by 0.16 with 2, behind 4 layers. With another rope it is 1 or more in the layers that have it.
"""

_KEY_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_PIECE_TOKENS: Final = 256  # on a CPU: what is computed on the way stays in its cache


@dataclass(frozen=True, slots=True)
class Rotation:
    """The turns of some tokens, the same in every layer that shares a table.

    ``cos`` and ``sin``: float32 (moved tokens, 1, rotary_dim / 2), on the device of the table.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    moved: torch.Tensor | None  # int64, rows of the tokens that move; None: all of them
    tokens: int
    is_neox: bool
    first_dim: int

    def apply(self, keys: torch.Tensor) -> torch.Tensor:
        """Return *keys* turned; they stay as they are, and are returned where no token moves.

        Args:
            keys: As stored, never as returned from here: each rounding adds to the one before.
                Shape (tokens, heads, head_dim) of float32, bfloat16 or float16, on the device of
                the table. The arithmetic is float32.
        """
        last_dim = self.first_dim + 2 * self.cos.shape[-1]
        if keys.ndim != 3 or len(keys) != self.tokens or keys.shape[2] < last_dim:
            raise InvariantViolated(
                f"keys of shape {tuple(keys.shape)} for {self.tokens} tokens with heads of at "
                f"least {last_dim} elements"
            )
        if keys.dtype not in _KEY_DTYPES:
            raise InvariantViolated(f"keys of {keys.dtype} cannot be turned")
        if not len(self.cos):
            return keys
        if self.moved is None:
            return self._turned(keys)
        turned = keys.clone()
        turned[self.moved] = self._turned(keys[self.moved])
        return turned

    def _turned(self, keys: torch.Tensor) -> torch.Tensor:
        turned = keys.clone() if keys.shape[2] > 2 * self.cos.shape[-1] else torch.empty_like(keys)
        step = _PIECE_TOKENS if keys.device.type == "cpu" else len(keys)
        for first in range(0, len(keys), step):
            piece = slice(first, first + step)
            cos, sin = self.cos[piece], self.sin[piece]
            left, right = (part.float() for part in self._pairs(keys[piece]))
            new_left, new_right = self._pairs(turned[piece])
            new_left.copy_((left * cos).addcmul_(right, sin, value=-1))
            new_right.copy_((right * cos).addcmul_(left, sin))
        return turned

    def _pairs(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the two elements of each pair: halves (NeoX), or neighbours (GPT-J)."""
        half = self.cos.shape[-1]
        rotary = keys.narrow(-1, self.first_dim, 2 * half)
        if self.is_neox:
            return rotary[..., :half], rotary[..., half:]
        return rotary[..., ::2], rotary[..., 1::2]


class PositionCorrector:
    """Moves the keys of a layer, by the table that its model turns keys with.

    From the table, and not from a base and a scaling, because it holds what was applied: any
    scaling of the angles, the rounding of its own dtype, and the factor that YaRN multiplies it
    with, which a division by cos² + sin² takes out again.
    """

    def __init__(
        self, table: torch.Tensor, *, rotary_dim: int, is_neox: bool, first_dim: int = 0
    ) -> None:
        """Nothing is copied, so *table* must not change afterwards.

        Args:
            table: The rope's ``cos_sin_cache``: (positions, rotary_dim), cosines then sines.
            rotary_dim: How many elements of a head are turned.
            is_neox: Pairs are an element of the first half and one of the second; else neighbours.
            first_dim: Where in a head these elements begin (MLA: behind the latent).

        Raises:
            ConfigError: the table is not one of ``rotary_dim / 2`` angles for each position.
        """
        shape = tuple(table.shape)
        if len(shape) != 2 or rotary_dim % 2 or shape[1] != rotary_dim or first_dim < 0:
            raise ConfigError(
                f"a rope table of shape {shape} for {rotary_dim} turned elements from "
                f"{first_dim} on",
                hint="run without blending: this rotary embedding is not supported",
            )
        if not table.dtype.is_floating_point:
            raise ConfigError(
                f"a rope table of {table.dtype}",
                hint="run without blending: this rotary embedding is not supported",
            )
        self.table = table
        self.is_neox = is_neox
        self.first_dim = first_dim

    @property
    def positions(self) -> int:
        """How many positions the table has: those below it can be sources and targets."""
        return len(self.table)

    def rotation(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> Rotation:
        """Return the turns from *sources* to *targets*, each (n,): positions, on the host.

        Raises:
            InvariantViolated: a position is not in the table.
        """
        self.check(sources, targets)
        moves = sources != targets
        moved = None if moves.all() else np.flatnonzero(moves)
        if moved is not None:
            sources, targets = sources[moved], targets[moved]
        cos, sin = self._turns(self._on_device(sources), self._on_device(targets))
        return Rotation(
            cos=cos.unsqueeze(1),
            sin=sin.unsqueeze(1),
            moved=None if moved is None else self._on_device(moved),
            tokens=len(moves),
            is_neox=self.is_neox,
            first_dim=self.first_dim,
        )

    def correct(
        self, keys: torch.Tensor, sources: NDArray[np.int64], targets: NDArray[np.int64]
    ) -> torch.Tensor:
        """``rotation(sources, targets).apply(keys)``."""
        return self.rotation(sources, targets).apply(keys)

    def check(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Raises ``InvariantViolated`` unless keys can be turned from *sources* to *targets*."""
        if sources.shape != targets.shape or sources.ndim != 1:
            raise InvariantViolated(f"{sources.shape} sources for {targets.shape} targets")
        for name, positions in (("source", sources), ("target", targets)):
            outside = (positions < 0) | (positions >= self.positions)
            if outside.any():
                raise InvariantViolated(
                    f"{name} position {int(positions[outside][0])} is not in the rope table of "
                    f"{self.positions} positions"
                )

    def _on_device(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        return torch.as_tensor(numbers, dtype=torch.int64, device=self.table.device)

    def _turns(
        self, sources: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of the angle between: the target's complex number over the source's."""
        cos_from, sin_from = self.table[sources].float().chunk(2, -1)
        cos_to, sin_to = self.table[targets].float().chunk(2, -1)
        squared = cos_from * cos_from + sin_from * sin_from
        cos = (cos_to * cos_from + sin_to * sin_from) / squared
        sin = (sin_to * cos_from - cos_to * sin_from) / squared
        return cos, sin


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of two tensors over the largest of *expected*.

    Infinite where either holds what is no number. Waits for their device.
    """
    scale = expected.float().abs().max().item()
    difference = (found.float() - expected.float()).abs().max().item()
    if not np.isfinite(scale) or not np.isfinite(difference):
        return float("inf")
    return difference / scale if scale else float("inf" if difference else 0)


def mean_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root of the mean square of a difference over that of *expected*.

    Infinite where either holds what is no number. Waits for their device.
    """
    scale = expected.float().square().mean().sqrt().item()
    difference = (found.float() - expected.float()).square().mean().sqrt().item()
    if not np.isfinite(scale) or not np.isfinite(difference):
        return float("inf")
    return difference / scale if scale else float("inf" if difference else 0)


def gate_shifts(positions: int, tokens: int) -> tuple[int, ...]:
    """By how much to shift *tokens* tokens that begin at 0, to see whether keys follow a table.

    One, a third of the way and as far as a table of *positions* reaches: a scaling that is wrong
    turns the slow pairs wrongly, which a short shift does not show.
    """
    room = positions - tokens
    if room < 1:
        raise InvariantViolated(f"{tokens} tokens cannot be shifted among {positions} positions")
    return tuple(sorted({1, max(room // 3, 1), room}))


def check_rope_settings(
    *,
    rope_theta: float | None,
    head_dim: int | None,
    model_rope_theta: float | None,
    model_head_dim: int,
) -> None:
    """Raises ``ConfigError`` where a setting, if given, is not what the model has.

    Neither is ever used: keys are moved by the model's own table.

    Args:
        model_rope_theta: None if its rotary embedding has no base.
    """
    for key, given, own in (
        ("rope_theta", rope_theta, model_rope_theta),
        ("head_dim", head_dim, model_head_dim),
    ):
        if given is not None and given != own:
            has = "has none" if own is None else f"has {own:g}"
            raise ConfigError(
                f"{key} is set to {given:g}, and the model {has}",
                hint=f"remove {key}: it is read from the model",
            )
