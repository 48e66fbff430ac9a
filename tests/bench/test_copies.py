"""The cases, ratios and the table of bench/copies.py, and that its copies are right."""

from contextlib import closing

import pytest
from bench.copies import CACHES, Bed, Case, Sample, cases, failures, markdown, parse, ratio, to_json

CASE = Case("layers outermost", 64, "save", "whole", "in order")


def samples(*pairs: tuple[float, float], case: Case = CASE) -> list[Sample]:
    return [Sample(case, i, mine, memcpy) for i, (mine, memcpy) in enumerate(pairs)]


def test_every_cache_page_direction_part_and_order_is_a_case() -> None:
    assert len(set(cases())) == len(CACHES) * 2 * 2 * 2 * 2


def test_ratio_is_of_pairs_and_survives_a_machine_that_slows_down() -> None:
    assert ratio(samples((0.2, 0.1), (2.0, 1.0), (20.0, 10.0))) == 0.5


@pytest.mark.parametrize(("seconds", "met"), [(1.25, True), (1.26, False)])
def test_a_case_below_its_bound_is_told(seconds: float, met: bool) -> None:
    found = failures(samples((seconds, 1.0)))
    assert (found == []) is met
    assert all("layers outermost" in line and "least 0.80" in line for line in found)


def test_table_shows_speeds_and_ratio() -> None:
    row = markdown(samples((0.5, 0.25)), 1 << 30).splitlines()[-1]
    assert [cell.strip() for cell in row.split("|")[6:-1]] == ["2.0", "4.0", "0.50", "0.80"]


@pytest.mark.parametrize("cache", CACHES)
def test_copies_that_are_timed_are_right(cache: str) -> None:
    with closing(Bed(cache, 16, 4 << 20)) as bed:
        for case in cases():
            if (case.cache, case.page_kib) == (cache, 16):
                bed.check(case)
                bed.memcpy(case)()


def test_options_and_json() -> None:
    options = parse(["--quick"])
    assert (options.repetitions, options.mib) == (5, 128)
    assert '"memcpy_seconds": 2.0' in to_json(options, samples((1.0, 2.0)))
    with pytest.raises(SystemExit):
        parse(["--mib", "6"])
