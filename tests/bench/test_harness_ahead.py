"""When a table says that a peer is ahead, and of what it does not say so."""

from collections.abc import Mapping, Sequence

import pytest

from kvstrata.bench.ahead import leads
from kvstrata.bench.figures import Results
from kvstrata.bench.processes import Usage
from kvstrata.bench.record import Measured
from kvstrata.bench.report import _where_a_peer_is_ahead
from kvstrata.bench.traffic import Answer

IN_TIME = 0.5
PAIR = {"kvstrata": 0.3, "native": 0.2}


def row(
    contender: str,
    number: int,
    firsts: Sequence[float],
    *,
    gap: float = 0.01,
    memory: int = 1 << 30,
    failure: str | None = None,
) -> Measured:
    answers = [
        Answer(i, 0, 1000, 500, first, [gap, gap], 3, failure) for i, first in enumerate(firsts)
    ]
    used = {role: Usage(0.1, memory) for role in ("client", "engine", "worker", "server")}
    return Measured("chat", number, 0, "chat", contender, 10.0, answers, used, {})  # type: ignore[arg-type]


def told(*rows: Measured) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for lead in leads(Results(rows, [], IN_TIME).rounds("chat", "chat")):
        found.setdefault(lead.contender, []).append(str(lead))
    return found


def test_a_peer_that_is_sooner_in_every_round_is_ahead() -> None:
    rows = [
        *(row("kvstrata", n, [0.3]) for n in range(3)),
        *(row("native", n, [first]) for n, first in enumerate((0.2, 0.29, 0.25))),
        *(row("lmcache", n, [first]) for n, first in enumerate((0.1, 0.31, 0.1))),  # not in one
        *(row("roomy", n, [0.01]) for n in range(3)),  # is a limit
        *(row("kvstrata-disk", n, [0.2]) for n in range(3)),
    ]
    assert told(*rows) == {"kvstrata": ["first token 300.0 ms (vLLM tiering 250.0 ms: 1.20)"]}


@pytest.mark.parametrize(
    ("rounds", "said"), [(1, "In 1 round,"), (2, "In 2 rounds,"), (3, "In every round,")]
)
def test_every_round_is_said_of_three_and_more(rounds: int, said: str) -> None:
    rows = [row(name, n, [t]) for name, t in PAIR.items() for n in range(rounds)]
    title, *_ = _where_a_peer_is_ahead(Results(rows, [], IN_TIME), "chat")
    assert title.startswith(f"{said} and by more than 5 %.")


def test_by_how_much_is_the_median_of_the_ratios_of_rounds_and_not_that_of_medians() -> None:
    rows = [row("kvstrata", n, [first]) for n, first in enumerate((0.11, 0.2, 0.3))]
    rows += [row("native", n, [first]) for n, first in enumerate((0.1, 0.15, 0.19))]
    assert told(*rows) == {"kvstrata": ["first token 200.0 ms (vLLM tiering 150.0 ms: 1.33)"]}
    rows = [row("kvstrata", n, [first]) for n, first in enumerate((0.1, 0.12, 0.3))]
    rows += [row("native", n, [first]) for n, first in enumerate((0.09, 0.119, 0.2))]
    assert told(*rows) == {"kvstrata": ["first token 120.0 ms (vLLM tiering 119.0 ms: 1.11)"]}


def test_by_less_than_a_twentieth_it_is_not() -> None:
    rows = [*(row("kvstrata", n, [0.104]) for n in range(3))]
    rows += [row("native", n, [0.1]) for n in range(3)]
    assert told(*rows) == {}


def test_a_round_that_only_one_of_them_has_is_not_compared() -> None:
    rows = [row("kvstrata", 0, [0.2]), row("kvstrata", 1, [0.2]), row("native", 0, [0.1])]
    assert told(*rows) == {"kvstrata": ["first token 200.0 ms (vLLM tiering 100.0 ms: 2.00)"]}
    assert told(row("kvstrata", 0, [0.2]), row("native", 1, [0.1])) == {}


def test_no_connector_is_a_peer() -> None:
    ours, none = row("kvstrata", 0, [0.2]), row("none", 0, [0.1])
    assert told(ours, none) == {"kvstrata": ["first token 200.0 ms (no connector 100.0 ms: 2.00)"]}


def test_a_peer_whose_answers_failed_is_none() -> None:
    assert told(row("kvstrata", 0, [0.2]), row("lmcache", 0, [0.1], failure="dead")) == {}


@pytest.mark.parametrize(("answers", "said"), [(99, False), (100, True)])
def test_a_percentile_is_one_of_a_hundred_at_least(answers: int, said: bool) -> None:
    slow = [0.1] * (answers - 2) + [0.4, 0.4]
    rows = [row("kvstrata", 0, slow), row("native", 0, [0.1] * answers)]
    expected = (
        {"kvstrata": ["first token p99 400.0 ms (vLLM tiering 100.0 ms: 4.00)"]} if said else {}
    )
    assert told(*rows) == expected


def test_all_other_figures_are_compared_and_the_best_peer_comes_first() -> None:
    rows = [
        row("kvstrata", 0, [0.2, 0.2], gap=0.02, memory=2 << 30),
        row("native", 0, [0.2, 0.2, 0.2], gap=0.01),
        row("lmcache", 0, [0.2, 0.2], gap=0.005),
    ]
    assert told(*rows)["kvstrata"] == [
        "next token 20.0 ms (LMCache 5.0 ms: 4.00, vLLM tiering 10.0 ms: 2.00)",
        "tokens/s 201 (vLLM tiering 301: 1.50)",
        "in time/s 0.20 (vLLM tiering 0.30: 1.50)",
        "CPU a request 200.0 ms (vLLM tiering 133.3 ms: 1.50)",
        "memory 8.00 GiB (vLLM tiering 4.00 GiB: 2.00, LMCache 4.00 GiB: 2.00)",
    ]


def test_memory_that_differs_by_a_twentieth_does_not_look_alike() -> None:
    rows = [
        row("kvstrata", 0, [0.2], memory=int(1.54 * 2**30 / 4)),
        row("native", 0, [0.2], memory=int(1.46 * 2**30 / 4)),
    ]
    assert told(*rows) == {"kvstrata": ["memory 1.54 GiB (vLLM tiering 1.46 GiB: 1.05)"]}
