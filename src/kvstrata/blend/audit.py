"""Blended answers beside exact ones, on a sample of the requests: is the model still itself?"""

import random
from collections import deque
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import ConfigError

__all__ = ["Audit", "Auditor", "compare"]

_WINDOW: Final = 32  # audits that count
_LEAST: Final = 8  # before anything is judged by them
_FARTHEST: Final = 100.0


class Audit(NamedTuple):
    """How far the distribution of the first token is from that of a whole prefill."""

    divergence: float  # Kullback-Leibler, of the exact from the blended one: 0 to 100 nats
    agrees: bool  # on the most likely token


def compare(exact: NDArray[np.floating], blended: NDArray[np.floating]) -> Audit:
    """Compare logits ``(vocabulary,)`` of one token. What is no number is as far as can be."""
    p, q = _log_softmax(exact), _log_softmax(blended)
    seen = np.isfinite(p)  # the others have no probability
    divergence = np.nan_to_num((np.exp(p[seen]) * (p[seen] - q[seen])).sum(), nan=_FARTHEST)
    agrees = bool(np.argmax(p) == np.argmax(q))
    return Audit(float(np.clip(divergence, 0.0, _FARTHEST)), agrees)


class Auditor:
    """Chooses whom to audit, and judges."""

    def __init__(self, share: float, most_divergence: float, *, seed: int | None = None) -> None:
        """
        Args:
            share: Of the blended requests that is audited.
            most_divergence: Mean over the last 32 audits, of 8 at least, above which blending has
                to stop.
            seed: Of the choice; by default another one every time.
        """
        if not 0 <= share <= 1 or not most_divergence > 0:
            raise ConfigError(
                f"a share of {share:g} cannot be audited for a divergence of {most_divergence:g}",
                hint="give a share between 0 and 1, and a divergence above 0",
            )
        self._share = share
        self._most = most_divergence
        self._random = random.Random(seed)
        self._last: deque[float] = deque(maxlen=_WINDOW)
        self.has_failed = False

    def wants_next(self) -> bool:
        """Whether the next blended request is to be audited."""
        return self._random.random() < self._share

    def add(self, audit: Audit) -> None:
        self._last.append(audit.divergence)
        enough = len(self._last) >= _LEAST
        self.has_failed = self.has_failed or (enough and self.mean_divergence > self._most)

    @property
    def mean_divergence(self) -> float:
        """Over the last audits."""
        return sum(self._last) / len(self._last) if self._last else 0.0

    def begin_again(self) -> None:
        """What was found so far is of a cache that nobody uses any more."""
        self._last.clear()
        self.has_failed = False


def _log_softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - np.max(logits)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return found
