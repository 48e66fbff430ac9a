"""Audits: what is compared, who is chosen, and when blending has to stop."""

import numpy as np
import pytest

from kvstrata.blend.audit import Audit, Auditor, compare
from kvstrata.core.errors import ConfigError


def test_equal_distributions_do_not_diverge() -> None:
    logits = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    audit = compare(logits, logits + 3)
    assert audit.agrees
    assert audit.divergence == pytest.approx(0.0, abs=1e-6)


def test_divergence_is_that_of_kullback_and_leibler() -> None:
    exact, blended = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.5, 0.25])
    expected = 0.5 * np.log(2) + 0.25 * np.log(0.5)
    audit = compare(exact, blended)
    assert not audit.agrees
    assert audit.divergence == pytest.approx(expected)


@pytest.mark.parametrize("broken", [np.nan, -np.inf])
def test_what_cannot_be_compared_is_as_far_as_can_be(broken: float) -> None:
    exact = np.zeros(4, np.float32)
    blended = np.array([broken, 0, 0, 0], np.float32)
    assert compare(exact, blended).divergence == 100.0


def test_a_token_that_is_impossible_both_ways_is_no_difference() -> None:
    logits = np.array([-np.inf, 1, 2], np.float32)
    assert compare(logits, logits) == Audit(0.0, agrees=True)


def test_the_share_of_requests_is_audited() -> None:
    auditor = Auditor(0.25, 1.0, seed=7)
    assert 2200 < sum(auditor.wants_next() for _ in range(10_000)) < 2800
    assert not any(Auditor(0.0, 1.0).wants_next() for _ in range(1000))
    assert all(Auditor(1.0, 1.0).wants_next() for _ in range(1000))


def test_eight_audits_that_diverge_too_far_are_enough_and_seven_are_not() -> None:
    auditor = Auditor(1.0, 0.5)
    for _ in range(7):
        auditor.add(Audit(2.0, agrees=False))
        assert not auditor.has_failed
    auditor.add(Audit(2.0, agrees=False))
    assert auditor.has_failed


def test_one_bad_audit_among_many_good_ones_is_none() -> None:
    auditor = Auditor(1.0, 0.5)
    for i in range(200):
        auditor.add(Audit(10.0 if i % 32 == 31 else 0.1, agrees=True))
    assert not auditor.has_failed
    assert auditor.mean_divergence == pytest.approx((10 + 31 * 0.1) / 32)


def test_what_has_failed_stays_so_until_it_begins_again() -> None:
    auditor = Auditor(1.0, 0.5)
    for divergence in [2.0] * 8 + [0.0] * 100:
        auditor.add(Audit(divergence, agrees=True))
    assert auditor.has_failed
    auditor.begin_again()
    assert (auditor.has_failed, auditor.mean_divergence) == (False, 0.0)


@pytest.mark.parametrize(("share", "most"), [(1.5, 1.0), (-0.1, 1.0), (0.1, 0.0)])
def test_settings_that_mean_nothing_are_refused(share: float, most: float) -> None:
    with pytest.raises(ConfigError, match="cannot be audited"):
        Auditor(share, most)
