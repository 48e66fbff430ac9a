"""The cases, the table and the bound of bench/descriptors.py."""

import dataclasses

import pytest
from bench import descriptors
from bench.descriptors import CASES, WAYS, Case, Sample, costs, failures, markdown, measure, parse

CASE = Case("a cache", 2, 64, 32)


def sample(page_ns: float) -> Sample:
    seconds = dict.fromkeys(WAYS, page_ns * CASE.pages / 1e9)
    return Sample(CASE, 3, seconds, 5 * CASE.pages / 1e9)


@pytest.mark.parametrize(("page_ns", "met"), [(49.9, True), (50.1, False)])
def test_a_case_whose_lists_are_above_the_bound_is_told(page_ns: float, met: bool) -> None:
    found = failures([[sample(page_ns)]])
    assert len(found) == (0 if met else 1)
    assert all("a cache" in line and "at most 50" in line for line in found)


@pytest.mark.parametrize(("page_ns", "status"), [(49.9, 0), (50.1, 1)])
def test_the_program_fails_where_the_bound_is_not_met(
    monkeypatch: pytest.MonkeyPatch, page_ns: float, status: int
) -> None:
    monkeypatch.setattr("sys.argv", ["descriptors.py"])
    monkeypatch.setattr(descriptors, "measure", lambda case, repetitions: [sample(page_ns)])
    assert descriptors.main() == status


def test_what_a_time_costs_is_told_apart_from_what_a_page_costs() -> None:
    """25 µs for 64 pages in a slot and 85 for 256: 60 for 192 more."""
    few, many = Case("few", 4, 64, 16), Case("many", 4, 64, 64)
    found = [
        [Sample(case, 1, dict.fromkeys(WAYS, seconds), 1.0)]
        for case, seconds in ((few, 25e-6), (many, 85e-6))
    ]
    (line,) = costs(found)
    assert line.startswith("few, a time and a page more: lists 5 µs and 312.5 ns, a job 5 µs")


def test_table_shows_spans_and_all_times() -> None:
    row = markdown([[sample(10.0), sample(20.0), sample(30.0)]]).splitlines()[-1]
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        *("a cache", "64", "3", "20.0", "20.0", "20.0", "20.0", "5.0")
    ]


@pytest.mark.parametrize("outermost", [False, True])
def test_what_is_timed_has_a_span_for_each_page_or_block(outermost: bool) -> None:
    case = dataclasses.replace(CASE, blocks_outermost=outermost)
    (measured,) = measure(case, 1)
    assert measured.spans <= case.blocks if outermost else measured.spans == case.pages
    assert {*measured.seconds} == {*WAYS}
    assert min(measured.seconds.values()) > 0


def test_every_cache_is_measured_in_both_orders_and_a_slot_at_a_time() -> None:
    assert {case.blocks_outermost for case in CASES} == {False, True}
    assert {case.blocks for case in CASES} == {16, 1024}


def test_options() -> None:
    assert parse(["--quick"]).repetitions == 5
