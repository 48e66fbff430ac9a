"""Whether blending is sooner than a whole prefill, by what both have taken on this machine."""

import statistics
from collections import Counter, deque
from typing import Final

__all__ = ["Payoff"]

_LAST: Final = 5  # measurements of a size; the first ones may hold what is compiled once
_TRIAL: Final = 32  # of so many prompts that are refused one is blended, and measured


class Payoff:
    """By the size of what is to be computed, in powers of two: the longer, the more is spared."""

    def __init__(self) -> None:
        self._ratios: dict[int, deque[float]] = {}
        self._refused: Counter[int] = Counter()

    def took(self, prefill_tokens: int, blend_seconds: float, prefill_seconds: float) -> None:
        """A prompt took *blend_seconds*, of which as much would be computed in *prefill_seconds*."""
        size = prefill_tokens.bit_length()
        self._ratios.setdefault(size, deque(maxlen=_LAST)).append(blend_seconds / prefill_seconds)

    def ratio(self, prefill_tokens: int) -> float | None:
        """Of the time of a whole prefill, the median of the last ones; None if these are too few."""
        ratios = self._ratios.get(prefill_tokens.bit_length(), ())
        return statistics.median(ratios) if len(ratios) == _LAST else None

    def refuses(self, prefill_tokens: int) -> bool:
        """Whether a prompt is to be computed whole; now and then it is not, to measure again."""
        ratio = self.ratio(prefill_tokens)
        if ratio is None or ratio <= 1:
            return False
        size = prefill_tokens.bit_length()
        self._refused[size] += 1
        return self._refused[size] % _TRIAL > 0
