"""What `kvstrata inspect --explain` says of decisions."""

import re

import pytest
from msgspec.structs import replace

from kvstrata.cli.explain import table_lines, why_no_more
from kvstrata.manager.decisions import Decision
from kvstrata.manager.planner import Reason


def get(asked: int, taken: int, reason: Reason) -> Decision:
    return Decision(0.0, "get", "r", "6162", 1, asked, taken_blocks=taken, reason=reason.value)


def put(asked: int, known: int, taken: int, reason: str) -> Decision:
    return Decision(
        0.0, "put", "r", "6162", 1, asked, host_blocks=known, taken_blocks=taken, reason=reason
    )


@pytest.mark.parametrize(
    ("decision", "said"),
    [
        (get(15, 0, Reason.ALL), "nothing was found"),
        (get(15, 12, Reason.ALL), "all that was found"),
        (get(15, 15, Reason.ALL), "all of it"),
        (get(15, 12, Reason.PROBE), "all that was found, to measure a slow tier again"),
        (get(15, 15, Reason.PROBE), "all of it, to measure a slow tier again"),
        (get(15, 12, Reason.RECOMPUTE), "the rest is computed sooner than read"),
        (get(15, 0, Reason.TOO_LATE), "the rest would come after the load timeout"),
        (
            get(15, 1, Reason.UNANSWERED),
            "the tier that nodes share said too late what it has of the rest",
        ),
        (get(15, 1, Reason.OFF), "the rest begins in a tier that is switched off"),
        (
            get(15, 1, Reason.NO_ROOM),
            "no room for the rest in host memory, or in the model's quota",
        ),
        (put(15, 3, 12, "all"), "all of it"),
        (put(15, 15, 0, "all"), "all of it"),
        (put(15, 3, 1, "no_room"), "no room for the rest in host memory, or in the model's quota"),
    ],
)
def test_reason_why_no_more_is_taken(decision: Decision, said: str) -> None:
    assert why_no_more(decision) == said


LONGEST = "  why no more: no room for the rest in host memory, or in the model's quota"


def test_table_fits_80_columns_with_the_reason_on_a_line_of_its_own() -> None:
    decision = Decision(
        1e9, "get", "r", "6162", 1, 8192, 4096, 2048, 100, 6244, "no_room", 1.25, 12.5
    )
    heading, row, reason, next_row, next_reason = table_lines([decision, put(15, 3, 12, "all")])
    assert heading == (
        "time          what  asked   host   disk  remote  taken  load ms  compute ms"
    )
    assert row[12:] == ("  load  8,192  4,096  2,048     100  6,244  1,250.0    12,500.0")
    assert next_row[12:].split() == ["save", "15", "3", "0", "0", "12", "-", "-"]
    assert (reason, next_reason) == (LONGEST, "  why no more: all of it")
    assert max(map(len, [heading, row, reason, next_row, next_reason])) <= 80


def figures(decision: Decision) -> list[str]:
    """Load and compute ms."""
    _, row, _ = table_lines([decision])
    return re.split(" {2,}", row)[-2:]


def test_time_to_load_is_told_where_something_has_to_be_read() -> None:
    found = Decision(0.0, "get", "r", "6162", 1, 4, 1, 2, 1, 4, "all", 0.25, 0.5)
    assert figures(found) == ["250.0", "500.0"]
    assert figures(replace(found, load_seconds=0.0)) == ["not measured", "500.0"]
    in_memory = replace(found, host_blocks=4, disk_blocks=0, remote_blocks=0)
    assert figures(replace(in_memory, load_seconds=0.0)) == ["-", "500.0"]
    assert figures(replace(in_memory, recompute_seconds=None)) == ["-", "-"]
    assert figures(get(4, 0, Reason.ALL)) == ["-", "-"]
    assert figures(replace(get(4, 0, Reason.TOO_LATE), recompute_seconds=0.0)) == ["-", "-"]
    assert figures(put(4, 1, 3, "all")) == ["-", "-"]
