"""Audits: what is compared, who is chosen, and when blending has to stop."""

import numpy as np
import pytest

from kvstrata.blend import audit
from kvstrata.blend.audit import Audit, Auditor, Failure, compare
from kvstrata.core.errors import ConfigError


def test_equal_distributions_do_not_diverge() -> None:
    logits = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    found = compare(logits, logits + 3)
    assert found.agrees
    assert found.divergence == pytest.approx(0.0, abs=1e-6)


def test_divergence_is_that_of_kullback_and_leibler() -> None:
    exact, blended = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.5, 0.25])
    expected = 0.5 * np.log(2) + 0.25 * np.log(0.5)
    found = compare(exact, blended)
    assert not found.agrees
    assert found.divergence == pytest.approx(expected)


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


GOOD, BAD = Audit(0.1, agrees=True), Audit(2.0, agrees=False)


def test_eight_audits_that_diverge_too_far_are_enough_and_seven_are_not() -> None:
    auditor = Auditor(1.0, 0.5)
    for _ in range(7):
        assert auditor.add("", BAD) is None
        assert not auditor.has_failed("")
    assert auditor.add("", BAD) == Failure(2.0, is_common=False)
    assert auditor.add("", BAD) is None  # is known
    assert auditor.has_failed("")
    assert auditor.failed_salts == 1


def test_one_bad_audit_among_many_good_ones_is_none() -> None:
    auditor = Auditor(1.0, 0.5)
    for i in range(200):
        auditor.add("", Audit(10.0 if i % 32 == 31 else 0.1, agrees=True))
    assert not auditor.has_failed("")
    assert auditor.mean_divergence("") == pytest.approx((10 + 31 * 0.1) / 32)


def test_what_has_failed_stays_so_until_it_begins_again() -> None:
    auditor = Auditor(1.0, 0.5)
    for divergence in [2.0] * 8 + [0.0] * 100:
        auditor.add("", Audit(divergence, agrees=True))
    assert auditor.has_failed("")
    auditor.begin_again()
    assert (auditor.has_failed(""), auditor.mean_divergence("")) == (False, 0.0)


def test_one_salt_that_fails_leaves_the_others_as_they_are() -> None:
    auditor = Auditor(1.0, 0.5)
    for _ in range(8):
        auditor.add("bad", BAD)
        auditor.add("good", GOOD)
    for salt in ("few", "fewer"):
        auditor.add(salt, BAD)
    assert [each for each in ("bad", "good", "few", "new", "") if auditor.has_failed(each)] == [
        "bad"
    ]
    assert auditor.failed_salts == 1


def test_salts_of_few_audits_are_judged_together_by_the_median_of_their_means() -> None:
    auditor = Auditor(1.0, 0.5)
    for _ in range(8):
        auditor.add("known", GOOD)
    for number in range(4):
        auditor.add(f"good {number}", GOOD)
    for number in range(4):
        auditor.add(f"bad {number}", Audit(0.8, agrees=False))
        assert not auditor.has_failed("new")  # of eight the middle lies between 0.1 and 0.8
    assert auditor.add("good 0", BAD) == Failure(0.8, is_common=True)
    assert auditor.has_failed("new")
    assert auditor.has_failed("good 1")
    assert not auditor.has_failed("known")
    assert auditor.failed_salts == 8
    auditor.begin_again()
    assert not auditor.has_failed("new")


def test_one_salt_with_many_bad_audits_does_not_decide_for_those_of_few() -> None:
    auditor = Auditor(1.0, 0.5)
    for number in range(9):
        auditor.add(f"good {number}", GOOD)
        for _ in range(40):
            auditor.add("bad", BAD)
    assert auditor.has_failed("bad")
    assert not auditor.has_failed("good 3")


def test_so_many_salts_are_remembered_and_those_that_have_failed_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audit, "_MOST_SALTS", 20)
    auditor = Auditor(1.0, 0.5)
    for _ in range(8):
        auditor.add("bad", BAD)
        auditor.add("good", GOOD)
    for number in range(30):
        auditor.add(f"other {number}", GOOD)
    assert auditor.has_failed("bad")
    assert auditor.mean_divergence("good") == 0.0
    for number in range(30):
        for _ in range(8):
            auditor.add(f"worse {number}", BAD)
        assert auditor.has_failed(f"worse {number}")
    assert auditor.failed_salts == 20
    assert auditor.mean_divergence("bad") == 0.0


@pytest.mark.parametrize(("share", "most"), [(1.5, 1.0), (-0.1, 1.0), (0.1, 0.0)])
def test_settings_that_mean_nothing_are_refused(share: float, most: float) -> None:
    with pytest.raises(ConfigError, match="cannot be audited"):
        Auditor(share, most)
