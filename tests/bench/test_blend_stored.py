"""What bench/blend_stored.py says of what its engines have kept."""

from bench.blend_stored import Kept, bounds, table


def test_bounds_that_are_missed_are_told() -> None:
    assert [*bounds(Kept(True, 1.0, 1.3, 0.93, 20))] == []
    assert [*bounds(Kept(True, 1.0, 1.31, 0.929, 20))] == [
        "coverage of 0.929 is less than 0.93",
        "1.31 of the documents' tokens are stored, more than 1.3",
    ]


def test_each_engine_has_a_row() -> None:
    shown = [*table([Kept(False, 0.78, 0.88, 0.7331, 19), Kept(True, 1.09, 1.14, 0.9946, 20)])]
    titles, _, *rows = [line.strip("| ").split(" | ") for line in shown]
    assert rows == [
        ["as it comes", "0.78", "0.88", "0.733", "19"],
        ["`blend_again`", "1.09", "1.14", "0.995", "20"],
    ]
    assert len(titles) == 4  # the first column has none
