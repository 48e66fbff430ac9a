import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.bench.figures import Results, percentile
from kvstrata.bench.processes import Role, Usage
from kvstrata.bench.record import Measured, Rates
from kvstrata.bench.traffic import Answer
from kvstrata.bench.workloads.workload import Tier


def answer(
    first: float, cached: int = 0, failure: str | None = None, tokens_hash: int | None = None
) -> Answer:
    return Answer(0, 0, 1000, cached, first, [0.1, 0.3], 3, failure, tokens_hash)


def row(
    contender: str,
    *answers: Answer,
    round: int = 0,
    name: str = "chat",
    tier: Tier | None = None,
    as_meant: bool = True,
    step: int = 0,
) -> Measured:
    used: dict[Role, Usage] = {
        "client": Usage(0.1),
        "engine": Usage(1.0, 100, 10, 20),
        "worker": Usage(0.5),
        "server": Usage(),
    }
    return Measured(
        "single" if tier else "chat",
        round,
        step,
        name,
        contender,
        2.0,
        list(answers),
        used,
        {},
        tier,
        as_meant,
    )


def test_figures_of_a_row() -> None:
    rows = [row("none", answer(1.0, 500), answer(3.0), answer(9.0, failure="no answer"))]
    (figures,) = Results(rows, [], in_time_seconds=1.5).figures("chat", "chat")
    assert (figures.answers, figures.failures, figures.not_as_meant) == (2, 1, 0)
    assert (figures.first_token_median, figures.first_token_most) == (2.0, 3.0)
    assert figures.tokens_per_second == 2006 / 2.0
    assert figures.goodput == 0.5
    assert figures.reused_share == 0.25
    assert figures.gap_p99 == 0.3
    assert figures.cpu_seconds["engine"] == pytest.approx(1 / 3)
    assert figures.disk_bytes == 10.0
    assert figures.memory_bytes == 100


def test_ratios_are_of_one_round() -> None:
    """A round in which the machine is slow is slow for all."""
    rows = [
        row("none", answer(2.0), round=0),
        row("kvstrata", answer(1.0), round=0),
        row("none", answer(20.0), round=1),
        row("kvstrata", answer(10.0), round=1),
        row("kvstrata", answer(0.1), round=2),  # nobody to compare it with
    ]
    _, figures = Results(rows, [], 1.0).figures("chat", "chat")
    assert figures.to_cold == 0.5


def test_a_round_in_which_one_was_another_hit_than_meant_is_in_no_ratio() -> None:
    rows = [
        row("none", answer(2.0), name="miss, 9 tokens", tier="none"),
        row("none", answer(2.0), name="miss, 9 tokens", tier="none", round=1),
        row("kvstrata", answer(1.0), name="host hit, 9 tokens", tier="host"),
        row(
            "kvstrata", answer(8.0), round=1, name="host hit, 9 tokens", tier="host", as_meant=False
        ),
    ]
    (figures,) = Results(rows, [], 1.0).figures("single", "host hit, 9 tokens")
    assert figures.to_cold == 0.5


def test_best_peer_is_the_soonest_that_is_not_ours() -> None:
    rows = [
        row(name, answer(seconds))
        for name, seconds in {"none": 0.1, "roomy": 0.2, "kvstrata": 2.0, "native": 4.0}.items()
    ] + [row("lmcache", answer(5.0)), row("kvstrata-disk", answer(0.5))]
    figures = {f.contender: f for f in Results(rows, [], 1.0).figures("chat", "chat")}
    assert (figures["kvstrata"].best_peer, figures["kvstrata"].to_best_peer) == ("native", 0.5)
    assert figures["native"].to_best_peer is None
    assert (figures["kvstrata"].limit, figures["kvstrata"].to_limit) == ("roomy", 10.0)


@pytest.mark.parametrize("contender", ["kvstrata", "native"])
def test_limit_of_a_hit_is_a_device_hit_and_its_bytes(contender: str) -> None:
    rows = [
        row("none", answer(1.0, 1000), name="device hit, 1000 tokens", tier="device"),
        row(contender, answer(4.5, 8), name="host hit, 1000 tokens", tier="host"),
    ]
    rates = [Rates("single", 0, {"host": 2.0})]
    (figures,) = Results(rows, rates, 1.0, token_bytes=3).figures("single", "host hit, 1000 tokens")
    assert figures.to_limit == pytest.approx(4.5 / (1.0 + 8 * 3 / 2.0))
    (unknown,) = Results(rows, rates, 1.0).figures("single", "host hit, 1000 tokens")
    assert unknown.to_limit is None


def test_what_was_another_hit_than_meant_counts_nowhere() -> None:
    rows = [
        row("kvstrata", answer(1.0), name="host hit, 9 tokens", tier="host"),
        row(
            "kvstrata", answer(9.0), round=1, name="host hit, 9 tokens", tier="host", as_meant=False
        ),
    ]
    (figures,) = Results(rows, [], 1.0).figures("single", "host hit, 9 tokens")
    assert (figures.first_token_most, figures.not_as_meant, figures.answers) == (1.0, 1, 1)


def test_an_engine_that_gave_no_answer_has_no_figures() -> None:
    (figures,) = Results([row("lmcache", answer(0.0, failure="dead"))], [], 1.0).figures(
        "chat", "chat"
    )
    assert figures.failures == 1
    assert figures.first_token_median is None
    assert figures.reused_share is None


def test_answers_that_are_other_tokens_than_without_a_connector_are_told() -> None:
    rows = [
        row("none", answer(2.0, tokens_hash=7), name="miss, 9 tokens", tier="none"),
        row("none", answer(2.0, tokens_hash=8), name="miss, 9 tokens", tier="none", round=1),
        row("native", answer(1.0, tokens_hash=7), name="host hit, 9 tokens", tier="host"),
        row("native", answer(1.0, tokens_hash=9), name="host hit, 9 tokens", tier="host", round=1),
        row("native", answer(1.0, tokens_hash=5), name="host hit, 9 tokens", tier="host", round=2),
    ]
    results = Results(rows, [], 1.0)
    (none,) = results.figures("single", "miss, 9 tokens")
    (native,) = results.figures("single", "host hit, 9 tokens")
    assert (none.differing, native.differing) == (0, 1)  # nobody else was asked in the last round


def test_each_of_several_misses_is_compared_with_the_same_prompt() -> None:
    name = "miss, 9 tokens"
    rows = [
        row(contender, answer(2.0, tokens_hash=found), name=name, tier="none", step=step)
        for contender, answers in (("none", (7, 8)), ("native", (7, 9)))
        for step, found in enumerate(answers)
    ]
    rows += [
        row("native", answer(1.0, tokens_hash=8), name="host hit, 9 tokens", tier="host", step=2)
    ]
    results = Results(rows, [], 1.0)
    assert [figures.differing for figures in results.figures("single", name)] == [0, 1]
    assert [f.differing for f in results.figures("single", "host hit, 9 tokens")] == [0]


def test_what_a_killed_server_or_a_dead_engine_has_used_is_not_shown_as_nothing() -> None:
    killed, dead = row("kvstrata", answer(1.0)), row("lmcache", answer(0.0, failure="dead"))
    del killed.used["server"]
    dead.used.clear()
    kvstrata, lmcache = Results([killed, dead], [], 1.0).figures("chat", "chat")
    assert kvstrata.cpu_seconds == {"client": 0.1, "engine": 1.0, "worker": 0.5}
    assert lmcache.cpu_seconds == {}
    assert (kvstrata.memory_bytes, lmcache.memory_bytes) == (None, None)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.1, 100))
def test_percentile_is_a_value_that_so_many_do_not_exceed(
    values: list[float], percent: float
) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= len(values) * percent / 100 - 1e-9
    below = [value for value in values if value < found]
    assert len(below) < len(values) * percent / 100
