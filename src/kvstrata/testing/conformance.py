"""The conformance suite: every rule that a store must keep to be a tier."""

from kvstrata.testing.life_rules import LifeRules
from kvstrata.testing.value_rules import ValueRules


class StoreConformance(ValueRules, LifeRules):
    """Inherit it in a class whose name begins with ``Test`` and give it ``open_store``.

    Say in ``traits`` what the store promises, and override ``damage`` and ``outage`` if it can be
    damaged or cut off: that is what brings in the rules for it. Every test is a rule, in words in
    its docstring.
    """
