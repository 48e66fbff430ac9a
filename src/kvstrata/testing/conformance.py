"""The conformance suite: every rule that a store must keep to be a tier."""

from kvstrata.testing.life_rules import LifeRules
from kvstrata.testing.value_rules import ValueRules


class StoreConformance(ValueRules, LifeRules):
    """Inherit it in a class whose name begins with ``Test`` and give it ``open_store``.

    Override ``damage`` and ``outage`` too if the store can be damaged or cut off: their rules
    are skipped otherwise. Every test is a rule, in words in its docstring.
    """
