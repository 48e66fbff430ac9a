"""The rule that the configuration names, for a model with so many layers."""

from collections.abc import Iterator
from typing import Final

from kvstrata.blend.rules import (
    BoundaryRule,
    FullRule,
    HkvdRule,
    QueryRule,
    RandomRule,
    TwoRoundQueryRule,
    scored_layers,
)
from kvstrata.blend.selection import Rule
from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError

__all__ = ["layers_to_score", "not_followed", "rule_of", "why_not_followed"]

_SEED: Final = 0  # the same on all ranks, and in every run
_FOLLOWED_BY: Final = {
    "recompute_boundary": ("boundary",),
    "recompute_first_tokens": ("two_round_query", "query", "hkvd", "random"),
    "blend_scored_layers": ("two_round_query", "query", "hkvd"),
}
_FIXED: Final = {"boundary": 0.0, "full": 1.0}  # ratios of the rules that choose no share


def layers_to_score(config: Config, layers: int) -> tuple[int, ...]:
    """Those that the configuration names; raises ``ConfigError`` if there are not so many."""
    wanted = config.blend_scored_layers
    if wanted and wanted[-1] >= layers:
        raise ConfigError(
            f"blend_scored_layers is {list(wanted)}, and the model has {layers} attention layers",
            hint=f"name layers from 0 to {layers - 1}",
        )
    return wanted or scored_layers(layers)


def rule_of(config: Config, ratio: float, layers: int, *, reaches_differ: bool = False) -> Rule:
    """The same for all ranks.

    Args:
        reaches_differ: Some layers have a window that others have not. One alone may not see what a
            second round looks for. It changes little of what a rule costs, so who only asks for that
            need not know.
    """
    scored = layers_to_score(config, layers)
    first = config.recompute_first_tokens
    match config.blend_rule:
        case "boundary":
            tokens = config.recompute_boundary
            return BoundaryRule(first_tokens=tokens, last_tokens=tokens)
        case "full":
            return FullRule()
        case "random":
            return RandomRule(ratio, seed=_SEED, sink_tokens=first)
        case "hkvd":
            return HkvdRule(ratio, layer=scored[-1], layers=layers, sink_tokens=first)
        case "query":
            return QueryRule(ratio, scored=scored, layers=layers, sink_tokens=first)
        case "two_round_query":
            again = scored if reaches_differ else None
            return TwoRoundQueryRule(
                ratio, scored=scored, layers=layers, scored_again=again, sink_tokens=first
            )


def why_not_followed(config: Config, ratio: float) -> str | None:
    """Why the rule computes another share than *ratio* says, and the way out; None if it does not."""
    rule = config.blend_rule
    if _FIXED.get(rule, ratio) == ratio:
        return None
    computed = f"{config.recompute_boundary} tokens at both ends of each run"
    return (
        f"blend_rule is {rule}, which always computes {'all' if rule == 'full' else computed}; take "
        "the ratio away, or set blend_rule to two_round_query, query, hkvd or random"
    )


def not_followed(config: Config) -> Iterator[str]:
    """Of each setting in *config* that its rule does not go by, that it changes nothing and why."""
    ratio, rule = config.recompute_ratio, config.blend_rule
    if "recompute_ratio" in config.model_fields_set and (why := why_not_followed(config, ratio)):
        yield f"recompute_ratio is {ratio:g}, which changes nothing: {why}"
    for name, rules in _FOLLOWED_BY.items():
        if name in config.model_fields_set and rule not in rules:
            yield (
                f"{name} is set, which changes nothing: blend_rule is {rule}; take {name} away, or set "
                f"blend_rule to {' or '.join(rules)}"
            )
