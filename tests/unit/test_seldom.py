"""What happens to many requests is said once in a while, and counted."""

import logging

import pytest

from kvstrata.observe.seldom import SeldomWarning


def test_a_thousand_failures_in_ten_seconds_are_one_line_and_counted_in_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [100.0]
    warn = SeldomWarning(logging.getLogger("kvstrata.test"), clock=lambda: now[0])
    for i in range(1000):
        warn("a load failed: %s", i)
    now[0] = 109.9
    warn("a load failed: %s", "late")
    now[0] = 110.0
    warn("a load failed: %s", "later")
    now[0] = 120.0
    warn("a load failed: %s", "last")
    assert [record.getMessage() for record in caplog.records] == [
        "a load failed: 0",
        "a load failed: later (1000 more since the last such line)",
        "a load failed: last",
    ]
