"""How soon threads hand the interpreter over."""

import sys

import pytest

from kvstrata.core.interpreter import SWITCH_SECONDS, hand_over_sooner


@pytest.mark.parametrize(("before", "after"), [(0.005, SWITCH_SECONDS), (0.0001, 0.0001)])
def test_an_interval_is_made_shorter_and_never_longer(before: float, after: float) -> None:
    usual = sys.getswitchinterval()
    try:
        sys.setswitchinterval(before)
        hand_over_sooner()
        assert sys.getswitchinterval() == pytest.approx(after, rel=0.02)
    finally:
        sys.setswitchinterval(usual)
