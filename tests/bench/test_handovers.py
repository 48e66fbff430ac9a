"""The cases and the table of bench/handovers.py."""

import pytest
from bench import handovers
from bench.handovers import CASES, Case, Sample, markdown, measure


def test_what_the_engines_thread_loses_is_told_for_each_gib() -> None:
    """Half of 0.4 s, while 2 GiB were copied."""
    sample = Sample(alone=100.0, beside=50.0, copied_bytes=2 << 30, seconds=0.4)
    assert sample.lost_ms_a_gib == pytest.approx(100.0)
    row = markdown([(CASES[0], [sample])]).splitlines()[-1]
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        *("saves, blocks outermost", "5.0", "0.50", "100.0 ms")
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_copies_are_made_beside_the_engines_thread(
    monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    monkeypatch.setattr(handovers, "_MEASURED_SECONDS", 0.05)
    samples = measure(case, 1)
    assert len(samples) == 2
    assert all(sample.copied_bytes > 0 and sample.beside > 0 for sample in samples)
