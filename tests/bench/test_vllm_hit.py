"""The statistics and the table of bench/vllm_hit.py; no engine."""

import pytest
from bench.vllm_hit import (
    CONFIGURATIONS,
    OPERATIONS,
    PROMPT_TOKENS,
    Sample,
    Samples,
    can_measure,
    failed_hits,
    markdown,
    operations_of_repetition,
    paired_ratio,
    percentile,
    to_json,
    verdicts,
)
from bench.vllm_hit import parse as parse_options

TOKENS = PROMPT_TOKENS[1]


def sample(
    configuration: str, operation: str, milliseconds: float, repetition: int = 1, *, ok: bool = True
) -> Sample:
    return Sample(repetition, TOKENS, operation, configuration, 0, milliseconds / 1e3, 0, ok)


def rows(table: str) -> dict[tuple[str, str], list[str]]:
    """Cells of the table by operation and title."""
    split = [
        [c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines() if "|" in line
    ]
    return {(cells[0], cells[1]): cells[2:] for cells in split}


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([1.0], 90, 1.0), ([3.0, 1.0, 2.0], 50, 2.0), (list(map(float, range(1, 11))), 90, 9.0)],
)
def test_percentile_is_one_of_the_values(
    values: list[float], percent: float, expected: float
) -> None:
    assert percentile(values, percent) == expected


def test_ratio_of_pairs_survives_a_machine_that_slows_down() -> None:
    pairs = [(0.10, 0.20), (1.0, 2.0), (10.0, 20.0)]
    assert paired_ratio(pairs) == 0.5
    assert paired_ratio([]) is None


def test_pairs_are_of_the_same_repetition_and_as_meant() -> None:
    samples = Samples(
        [
            sample("none", "miss", 100, 1),
            sample("none", "miss", 200, 2),
            sample("none", "miss", 400, 3),
            sample("kvstrata", "miss", 110, 1),
            sample("kvstrata", "miss", 9, 2, ok=False),
            sample("kvstrata", "miss", 440, 3),
        ]
    )
    pairs = samples.pairs(TOKENS, ("miss", "kvstrata"), ("miss", "none"))
    assert pairs == [(0.11, 0.1), (0.44, 0.4)]


def test_table_shows_milliseconds_and_ratios() -> None:
    table = rows(
        markdown(
            Samples(
                [
                    sample("none", "miss", 100, 1),
                    sample("none", "miss", 120, 2),
                    sample("kvstrata", "host hit", 20, 1),
                    sample("kvstrata", "host hit", 30, 2),
                    sample("native", "host hit", 5, 1, ok=False),
                ]
            )
        )
    )
    assert table["miss", "no connector"] == ["100.0", "110.0", "120.0", "1.000", "1.000"]
    assert table["host hit", "KVStrata"] == ["20.0", "25.0", "30.0", "", "0.225"]
    assert table["host hit", "vLLM tiering"] == ["no hit", "", "", "", ""]


@pytest.mark.parametrize(("milliseconds", "met"), [(105.0, True), (105.1, False)])
def test_verdict_of_a_miss(milliseconds: float, met: bool) -> None:
    judged = verdicts(
        Samples([sample("none", "miss", 100), sample("kvstrata", "miss", milliseconds)])
    )
    assert [(v.met, v.limit) for v in judged] == [(met, 1.05)]
    assert str(judged[0]).startswith("met " if met else "NOT met")


def test_verdict_of_a_device_hit_is_a_difference() -> None:
    judged = verdicts(
        Samples(
            [
                sample("none", "device hit", 10, 1),
                sample("none", "device hit", 20, 2),
                sample("kvstrata", "device hit", 10.5, 1),
                sample("kvstrata", "device hit", 20.7, 2),
            ]
        )
    )
    assert [v.unit for v in judged] == [" ms"]
    assert judged[0].measured == pytest.approx(0.6)
    assert judged[0].by_minima == pytest.approx(0.5)


def test_every_bound_is_judged_when_all_is_measured() -> None:
    samples = Samples(
        Sample(1, tokens, operation, name, 0, 0.1, 0, as_meant=True)
        for name in CONFIGURATIONS
        for operation in OPERATIONS
        for tokens in PROMPT_TOKENS
        if can_measure(name, operation, tokens)
    )
    # Three prompt lengths: a miss and a device hit with and without disk, a host hit beside
    # vLLM's; one length: a host hit beside cold, a disk hit beside a host hit.
    assert len(verdicts(samples)) == 3 * 5 + 2


def test_a_hit_that_did_not_hit_is_reported() -> None:
    lost = sample("kvstrata", "host hit", 100, ok=False)
    assert failed_hits([sample("none", "miss", 1)]) == []
    assert failed_hits([lost]) == [f"kvstrata: repetition 1: {TOKENS} tokens were no host hit"]


def test_example_connector_is_not_asked_for_what_kills_it() -> None:
    assert can_measure("example", "disk hit", 2050)
    assert not can_measure("example", "disk hit", 6146)
    assert can_measure("example", "device hit", 6146)
    assert operations_of_repetition(["none", "example"]) == (3 + 9) * 2 + 2


def test_options_and_json() -> None:
    options = parse_options(["--quick", "--configurations", "none", "kvstrata"])
    assert options.repetitions == 5
    assert '"milliseconds"' not in to_json(options, [sample("none", "miss", 1)])
    assert '"seconds": 0.001' in to_json(options, [sample("none", "miss", 1)])
