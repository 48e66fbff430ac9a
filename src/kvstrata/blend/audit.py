"""Blended answers beside exact ones, on a sample of the requests: is the model still itself?"""

import random
from collections import OrderedDict, deque
from statistics import fmean, median
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import ConfigError

__all__ = ["Audit", "Auditor", "Failure", "compare"]

_WINDOW: Final = 32  # audits that count
_LEAST: Final = 8  # before anything is judged by them
_MOST_SALTS: Final = 1024  # beyond which the audits of one are forgotten
_FARTHEST: Final = 100.0


class Audit(NamedTuple):
    """How far the distribution of the first token is from that of a whole prefill."""

    divergence: float  # Kullback-Leibler, of the exact from the blended one: 0 to 100 nats
    agrees: bool  # on the most likely token


class Failure(NamedTuple):
    """Why blending has to stop from now on."""

    divergence: float  # that is too much
    is_common: bool  # of the salts of few audits together, not of one


def compare(exact: NDArray[np.floating], blended: NDArray[np.floating]) -> Audit:
    """Compare logits ``(vocabulary,)`` of one token. What is no number is as far as can be."""
    p, q = _log_softmax(exact), _log_softmax(blended)
    seen = np.isfinite(p)  # the others have no probability
    divergence = np.nan_to_num((np.exp(p[seen]) * (p[seen] - q[seen])).sum(), nan=_FARTHEST)
    agrees = bool(np.argmax(p) == np.argmax(q))
    return Audit(float(np.clip(divergence, 0.0, _FARTHEST)), agrees)


class Auditor:
    """Chooses whom to audit, and judges each salt by the audits of its own requests.

    A salt of which too little is known is judged with all others of that kind, so that many that
    ask seldom are judged, too, and one among them does not decide for the rest.
    """

    def __init__(self, share: float, most_divergence: float, *, seed: int | None = None) -> None:
        """
        Args:
            share: Of the blended requests that is audited.
            most_divergence: Above which blending has to stop: for a salt its mean over the last 32
                audits, of 8 at least; for those with fewer, 8 at least, the median of their means.
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
        self._audits: OrderedDict[str, deque[float]] = OrderedDict()  # the latest audited last
        self._failed: set[str] = set()
        self._others_failed = False

    def wants_next(self) -> bool:
        """Whether the next blended request is to be audited."""
        return self._random.random() < self._share

    def add(self, salt: str, audit: Audit) -> Failure | None:
        """Note *audit* of a request with *salt*; who has failed by it, if somebody has."""
        audits = self._audits.setdefault(salt, deque(maxlen=_WINDOW))
        self._audits.move_to_end(salt)
        audits.append(audit.divergence)
        failure = self._judge(salt) if len(audits) >= _LEAST else self._judge_others()
        if len(self._audits) > _MOST_SALTS:
            kept = self._failed | {salt}
            oldest = next(iter(self._audits))
            forgotten = next((each for each in self._audits if each not in kept), oldest)
            del self._audits[forgotten]
            self._failed.discard(forgotten)
        return failure

    def _judge(self, salt: str) -> Failure | None:
        mean = self.mean_divergence(salt)
        if mean <= self._most or salt in self._failed:
            return None
        self._failed.add(salt)
        return Failure(mean, is_common=False)

    def _judge_others(self) -> Failure | None:
        means = [fmean(each) for each in self._audits.values() if len(each) < _LEAST]
        if len(means) < _LEAST or self._others_failed or median(means) <= self._most:
            return None
        self._others_failed = True
        return Failure(median(means), is_common=True)

    def has_failed(self, salt: str) -> bool:
        """Whether requests with *salt* are not to be blended any more."""
        if len(self._audits.get(salt, ())) >= _LEAST:
            return salt in self._failed
        return self._others_failed

    @property
    def failed_salts(self) -> int:
        """How many are known for which blending has to stop."""
        return sum(map(self.has_failed, self._audits))

    def mean_divergence(self, salt: str) -> float:
        """Over its last audits."""
        return fmean(self._audits[salt]) if salt in self._audits else 0.0

    def begin_again(self) -> None:
        """What was found so far is of a cache that nobody uses any more."""
        self._audits.clear()
        self._failed.clear()
        self._others_failed = False


def _log_softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - np.max(logits)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return found
