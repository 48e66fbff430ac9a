"""The rules by which the tokens to recompute can be chosen."""

from collections.abc import Generator
from typing import Final

import numpy as np

from kvstrata.blend.plan import BlendPlan, Positions
from kvstrata.blend.selection import (
    Offer,
    Rule,
    ScoreAttention,
    ScoreDeviation,
    Scores,
    Step,
    highest,
    union,
)
from kvstrata.core.blend_fields import RECOMPUTE_RATIOS, SINK_TOKENS
from kvstrata.core.errors import ConfigError, InvariantViolated

__all__ = [
    "BoundaryRule",
    "FullRule",
    "HkvdRule",
    "QueryRule",
    "RandomRule",
    "TwoRoundQueryRule",
    "scored_layers",
]

PROBE_TOKENS: Final = 64
_NO_POSITION: Final = np.empty(0, np.int64)
_BALANCED: Final = RECOMPUTE_RATIOS["balanced"]


def scored_layers(layers: int) -> tuple[int, ...]:
    """Which of so many layers' attention is looked at, where a model's best are not known.

    Two neighbours, behind the first eighth: on the shipped model of ``bench/blend`` the layers
    behind add nothing to what these see, and a round costs what is run up to the last.
    """
    return tuple(sorted({layers // 8, min(layers // 8 + 1, layers - 1)}))


def _up_to_a_context(scored: tuple[int, ...]) -> tuple[int, ...]:
    """*scored* up to the first above 0: to the model's first layer a token is the same anywhere.

    On the shipped model the layers behind add little, and a second round costs what is run up to the last.
    """
    last = next((layer for layer in scored if layer > 0), scored[-1])
    return tuple(layer for layer in scored if layer <= last)


class BoundaryRule(Rule):
    """The first and the last tokens of each run, whatever is in it.

    Without last tokens this is LegoLink (EPIC, arXiv:2410.15332).
    """

    def __init__(self, *, first_tokens: int = 2, last_tokens: int = 2) -> None:
        super().__init__(0.0, first_tokens=first_tokens, last_tokens=last_tokens)


class FullRule(Rule):
    """Every token that is not exact: what blending is to be compared with."""

    def __init__(self) -> None:
        super().__init__(1.0, first_tokens=0)


class RandomRule(Rule):
    """Tokens by lot: what every other rule has to beat."""

    def __init__(
        self, ratio: float = _BALANCED, *, seed: int, sink_tokens: int = SINK_TOKENS
    ) -> None:
        """The same *seed* and plan give the same tokens."""
        super().__init__(ratio, first_tokens=sink_tokens)
        self._seed = seed

    def _chosen(
        self, plan: BlendPlan, offer: Offer, allocated_tokens: int
    ) -> Generator[Step, Scores, Positions]:
        yield from ()
        lots = np.random.default_rng(self._seed)
        return np.sort(lots.choice(offer.candidates, offer.budget, replace=False))


class HkvdRule(Rule):
    """Tokens whose K and V deviate most in one early layer (CacheBlend, arXiv:2405.16444).

    All tokens run through the layers up to that one, whose K and V are then exact and stay. It
    asks nothing of the prompt's end, so that the choice serves any question.
    """

    def __init__(
        self,
        ratio: float = _BALANCED,
        *,
        layer: int,
        layers: int,
        sink_tokens: int = SINK_TOKENS,
    ) -> None:
        """
        Args:
            layer: Where to compare, from 0. Layer 1 is too early for some models: calibrate it.
            layers: How many the model has.
        """
        if not 0 <= layer < layers:
            raise ConfigError(
                f"layer {layer} of a model with {layers}",
                hint=f"compare K and V in a layer from 0 to {layers - 1}",
            )
        super().__init__(ratio, first_tokens=sink_tokens)
        self._layer = layer
        self._share = (layer + 1) / layers

    def _chosen(
        self, plan: BlendPlan, offer: Offer, allocated_tokens: int
    ) -> Generator[Step, Scores, Positions]:
        everything = union(offer.mandatory, offer.candidates)
        scores = yield ScoreDeviation(everything, self._layer)
        return highest(scores, offer.candidates, offer.budget)

    def _scoring_tokens(self, plan: BlendPlan, offer: Offer) -> float:
        return self._share * (len(offer.mandatory) + len(offer.candidates))


class QueryRule(Rule):
    """Tokens that the end of the prompt attends to most (ProphetKV, arXiv:2602.02579).

    The choice serves that question and no other: such KV must not be taken for exact by a later
    turn of the same conversation.
    """

    def __init__(
        self,
        ratio: float = _BALANCED,
        *,
        scored: tuple[int, ...],
        layers: int,
        sink_tokens: int = SINK_TOKENS,
        probe_tokens: int = PROBE_TOKENS,
    ) -> None:
        """
        Args:
            scored: In which layers attention is looked at, from 0, ascending.
            layers: How many the model has.
            probe_tokens: How many of the last tokens of the prompt ask.
        """
        if probe_tokens < 1 or not scored or not 0 <= scored[0] <= scored[-1] < layers:
            raise ConfigError(
                f"{probe_tokens} tokens cannot ask the layers {list(scored)} of {layers}",
                hint=f"let at least one token ask, and layers from 0 to {layers - 1}",
            )
        super().__init__(ratio, first_tokens=sink_tokens)
        self._probe_tokens = probe_tokens
        self._looked_at = [scored]  # of each round
        self._layers = layers

    def _chosen(
        self, plan: BlendPlan, offer: Offer, allocated_tokens: int
    ) -> Generator[Step, Scores, Positions]:
        if allocated_tokens <= plan.end:
            raise InvariantViolated(
                f"no token to ask with: the plan ends at {plan.end}, the cache at {allocated_tokens}"
            )
        asking = np.arange(plan.asking_from, allocated_tokens)
        run, probes = np.union1d(offer.mandatory, asking), asking[-self._probe_tokens :]
        scores, chosen = np.zeros(allocated_tokens, np.float32), _NO_POSITION
        rounds = len(self._looked_at)
        for number, layers in enumerate(self._looked_at, 1):
            scores = np.maximum(scores, (yield ScoreAttention(run, probes, layers)))
            rest = np.setdiff1d(offer.candidates, chosen, assume_unique=True)
            due = -(-offer.budget * number // rounds) - len(chosen)
            run = probes = highest(scores, rest, due)
            chosen = union(chosen, run)
        return chosen

    def _scoring_tokens(self, plan: BlendPlan, offer: Offer) -> float:
        first, *others = ((layers[-1] + 1) / self._layers for layers in self._looked_at)
        asked_first = len(offer.mandatory) + plan.prompt_tokens - plan.end
        return first * asked_first + sum(others) * offer.budget / len(self._looked_at)


class TwoRoundQueryRule(QueryRule):
    """``QueryRule`` with half of the tokens, and then what they and the prompt's end attend to.

    A token that matters only through another, which was itself computed without it, is seen in the
    second round alone.
    """

    def __init__(
        self,
        ratio: float = _BALANCED,
        *,
        scored: tuple[int, ...],
        layers: int,
        scored_again: tuple[int, ...] | None = None,
        sink_tokens: int = SINK_TOKENS,
        probe_tokens: int = PROBE_TOKENS,
    ) -> None:
        """
        Args:
            scored_again: At which of *scored* the second round looks, by default up to the first
                above 0.
        """
        super().__init__(
            ratio, scored=scored, layers=layers, sink_tokens=sink_tokens, probe_tokens=probe_tokens
        )
        self._looked_at.append(scored_again or _up_to_a_context(scored))
