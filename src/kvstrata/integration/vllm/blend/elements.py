"""How a layer's KV cache keeps numbers: as the model has them, or in 8 bits with a scale.

A backend's writer quantises what it is given, on its own terms: on a CPU it cuts the bits that are
too many, and what was read, multiplied with the scale and written again is another number by then.
So a writer is given numbers a quarter of a step beyond those that it is to keep, away from zero:
cut or rounded to the nearest, each is kept as that one.
"""

from functools import cache
from typing import TYPE_CHECKING, Final, Protocol

import torch

from kvstrata.core.errors import ConfigError

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionLayer

__all__ = ["FLOAT8", "Elements", "elements_of", "scales_of"]

FLOAT8: Final = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""By ``kv_cache_dtype``."""

_CODES: Final = 256


class Elements(Protocol):
    is_quantised: bool

    page_type: torch.dtype
    """Of an element in a page, whose numbers up to 2 ** ``digit_bits`` are finite and not negative."""

    digit_bits: int

    number_type: torch.dtype
    """What an element is, but for the scale."""

    def read(self, kept: torch.Tensor, scale: float) -> torch.Tensor:
        """The numbers that *kept* is, of ``page_type``."""
        ...

    def to_write(self, numbers: torch.Tensor, scale: float) -> torch.Tensor:
        """What the backend's writer keeps as those nearest to *numbers*."""
        ...


class _Plain:
    is_quantised = False
    digit_bits = 7  # numbers up to 128 are exact in every floating type of 8 bits of precision

    def __init__(self, page_type: torch.dtype) -> None:
        self.page_type = self.number_type = page_type

    def read(self, kept: torch.Tensor, scale: float) -> torch.Tensor:
        return kept

    def to_write(self, numbers: torch.Tensor, scale: float) -> torch.Tensor:
        return numbers


class _Float8:
    is_quantised = True
    page_type = torch.int8
    digit_bits = 6

    def __init__(self, kept: torch.dtype, written: torch.dtype) -> None:
        self.number_type = kept
        self._written = written

    def read(self, kept: torch.Tensor, scale: float) -> torch.Tensor:
        return kept.view(self.number_type).float() * scale

    def to_write(self, numbers: torch.Tensor, scale: float) -> torch.Tensor:
        most = torch.finfo(self.number_type).max
        nearest = (numbers.float() / scale).clamp(-most, most).to(self.number_type)
        beyond = _beyond(self.number_type, numbers.device)[nearest.view(torch.uint8).long()]
        return (beyond * scale).to(self._written)


def elements_of(attention: "Attention") -> Elements:
    """Raises ``ConfigError`` if the cache of *attention* is of another kind."""
    name = attention.kv_cache_dtype
    if name in FLOAT8:
        return _Float8(FLOAT8[name], attention.dtype)
    if attention.kv_cache.dtype.is_floating_point:
        return _Plain(attention.kv_cache.dtype)
    raise ConfigError(
        f"the KV cache of layer {attention.layer_name} is quantised ({name})",
        hint=f"blending needs a kv_cache_dtype of auto, {', '.join(FLOAT8)}",
    )


def scales_of(attention: "AttentionLayer") -> tuple[float, float]:
    """Of its keys and values."""
    return attention._k_scale_float, attention._v_scale_float


@cache
def _beyond(kept: torch.dtype, device: torch.device) -> torch.Tensor:
    """Of each byte, its number and a quarter of the step to the next beyond it."""
    codes = torch.arange(_CODES // 2, dtype=torch.uint8)
    numbers = codes.view(kept).double()
    steps = numbers.diff(append=numbers[-1:])
    steps = torch.where(steps.isfinite(), steps, steps.roll(1))  # beyond the largest there is none
    beyond = (numbers + steps / 4).float()
    return torch.cat([beyond, -beyond]).to(device)
