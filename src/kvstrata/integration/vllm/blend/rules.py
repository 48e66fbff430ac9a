"""The rule that the configuration names, for a model with so many layers."""

from kvstrata.blend.rules import (
    BoundaryRule,
    FullRule,
    HkvdRule,
    QueryRule,
    RandomRule,
    TwoRoundQueryRule,
)
from kvstrata.blend.selection import Rule
from kvstrata.core.config import Config

__all__ = ["rule_of", "scored_layers"]

_SEED = 0  # the same on all ranks, and in every run


def scored_layers(layers: int) -> tuple[int, ...]:
    """The layers whose attention is scored: two, early enough that the rest is spared."""
    return tuple(sorted({layers // 4, layers // 2}))


def rule_of(config: Config, ratio: float, layers: int) -> Rule:
    scored_share = (scored_layers(layers)[-1] + 1) / layers
    match config.blend_rule:
        case "boundary":
            tokens = config.recompute_boundary
            return BoundaryRule(first_tokens=tokens, last_tokens=tokens)
        case "full":
            return FullRule()
        case "random":
            return RandomRule(ratio, seed=_SEED)
        case "hkvd":
            return HkvdRule(ratio, layer=scored_layers(layers)[0], layers=layers)
        case "query":
            return QueryRule(ratio, scored_share=scored_share)
        case "two_round_query":
            return TwoRoundQueryRule(ratio, scored_share=scored_share)
