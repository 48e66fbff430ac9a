"""What a tier's `write` may be."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvstrata.core.errors import ConfigError
from kvstrata.core.tiers import DiskTier, SharedTier
from kvstrata.core.write_rule import WriteRule, WriteWhen, parse_write_rule


@pytest.mark.parametrize("when", get_args(WriteWhen))
def test_each_moment_has_its_name(when: WriteWhen) -> None:
    assert parse_write_rule(when) == WriteRule(when)


@given(st.integers(1, 100))
def test_reuses_are_counted_behind_a_colon(reuses: int) -> None:
    assert parse_write_rule(f"reused:{reuses}") == WriteRule("reused", reuses)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "'' does not say when blocks are written"),
        ("Saved", "'Saved' does not say"),
        ("saved:2", "'saved:2' does not say"),
        ("reused:", "'reused:' does not say"),
        ("reused:-1", "'reused:-1' does not say"),
        ("reused: 2", "'reused: 2' does not say"),
        ("reused:0", "'reused:0': 0 is not between 1 and 100"),
        ("reused:101", "'reused:101': 101 is not between 1 and 100"),
    ],
)
def test_anything_else_is_an_error_with_a_remedy(text: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault) as e:
        parse_write_rule(text)
    assert e.value.hint


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "disk", "paths": "/a", "capacity": 1 << 20},
        {"kind": "shared", "path": "/a", "capacity": 1 << 20},
    ],
)
def test_a_tier_takes_it_and_nothing_else(settings: dict[str, object]) -> None:
    model = DiskTier if settings["kind"] == "disk" else SharedTier
    assert model.model_validate({**settings, "write": "reused:3"}).write == "reused:3"
    with pytest.raises(ValidationError, match="'never' does not say when blocks are written"):
        model.model_validate({**settings, "write": "never"})
