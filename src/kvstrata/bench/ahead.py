"""In what, at a step, peers are ahead of KVStrata: by a twentieth, in every round."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from kvstrata.bench.contenders import CONTENDERS
from kvstrata.bench.figures import percentile
from kvstrata.bench.processes import ROLES
from kvstrata.bench.record import Measured
from kvstrata.core.units import human_bytes

__all__ = ["Lead", "leads"]

_MARGIN: Final = 1.05
_FEWEST_OF_A_PERCENTILE: Final = 100

ByRound = Mapping[int, Sequence[Measured]]


@dataclass(frozen=True, slots=True)
class Lead:
    """A figure of *contender*, one of KVStrata's, in which *peers* are ahead, best first."""

    contender: str
    figure: str
    own: str
    peers: tuple[tuple[str, str], ...]  # title and figure of each

    def __str__(self) -> str:
        peers = ", ".join(f"{title} {figure}" for title, figure in self.peers)
        return f"{self.figure} {self.own} ({peers})"


@dataclass(frozen=True, slots=True)
class _Figure:
    title: str
    of: Callable[[Sequence[Measured]], float | None]  # rows of one contender in one round
    show: Callable[[float], str]
    more_is_better: bool = False


def leads(at_step: Mapping[str, ByRound], in_time_seconds: float) -> Iterator[Lead]:
    """Of *at_step*, what each contender did at one step.

    Peers are the contenders that are not KVStrata's and that gave all answers; no connector is one
    of them where nothing can be reused.
    """
    peers = [name for name in at_step if _is_peer(name, at_step[name])]
    for name in at_step:
        if not name.startswith("kvstrata"):
            continue
        for figure in _figures(in_time_seconds):
            own = _of_rounds(figure, at_step[name])
            ahead = []
            for peer in peers:
                theirs = _of_rounds(figure, at_step[peer])
                if _is_ahead(figure, own, theirs):
                    ahead.append((statistics.median(theirs.values()), peer))
            if ahead:
                ahead.sort(key=itemgetter(0), reverse=figure.more_is_better)
                yield Lead(
                    name,
                    figure.title,
                    figure.show(statistics.median(own.values())),
                    tuple((CONTENDERS[p].title, figure.show(value)) for value, p in ahead),
                )


def _is_peer(name: str, rounds: ByRound) -> bool:
    rows = [row for each in rounds.values() for row in each]
    if name == "roomy" or name.startswith("kvstrata"):
        return False
    if name == "none" and not any(row.tier == "none" for row in rows):
        return False
    return all(answer.failure is None for row in rows for answer in row.answers)


def _of_rounds(figure: _Figure, rounds: ByRound) -> dict[int, float]:
    found = {number: figure.of(rows) for number, rows in rounds.items()}
    return {number: value for number, value in found.items() if value is not None}


def _is_ahead(figure: _Figure, own: Mapping[int, float], theirs: Mapping[int, float]) -> bool:
    pairs = [(own[number], theirs[number]) for number in own.keys() & theirs.keys()]
    if figure.more_is_better:
        pairs = [(theirs, own) for own, theirs in pairs]
    ratios = [worse / better for worse, better in pairs if better > 0]
    return bool(ratios) and min(ratios) > 1 and statistics.median(ratios) > _MARGIN


def _figures(in_time_seconds: float) -> tuple[_Figure, ...]:
    def in_time(rows: Sequence[Measured]) -> float | None:
        return _rate(rows, sum(first <= in_time_seconds for first in _firsts(rows)))

    return (
        _Figure("first token", _median(_firsts), _ms),
        _Figure("first token p99", _p99(_firsts), _ms),
        _Figure("next token", _median(_gaps), _ms),
        _Figure("next token p99", _p99(_gaps), _ms),
        _Figure("tokens/s", lambda rows: _rate(rows, _tokens(rows)), "{:.0f}".format, True),
        _Figure("in time/s", in_time, "{:.2f}".format, True),
        _Figure("CPU a request", _cpu_seconds, _ms),
        _Figure("memory", _memory_bytes, lambda value: human_bytes(int(value))),
    )


def _median(of: Callable[[Sequence[Measured]], list[float]]) -> Callable[..., float | None]:
    def median(rows: Sequence[Measured]) -> float | None:
        values = of(rows)
        return statistics.median(values) if values else None

    return median


def _p99(of: Callable[[Sequence[Measured]], list[float]]) -> Callable[..., float | None]:
    """None of few: the longest of them is chance."""

    def p99(rows: Sequence[Measured]) -> float | None:
        values = of(rows)
        return percentile(values, 99) if len(values) >= _FEWEST_OF_A_PERCENTILE else None

    return p99


def _firsts(rows: Sequence[Measured]) -> list[float]:
    return [answer.first_token_seconds for row in rows for answer in row.answers]


def _gaps(rows: Sequence[Measured]) -> list[float]:
    return [gap for row in rows for answer in row.answers for gap in answer.gap_seconds]


def _tokens(rows: Sequence[Measured]) -> int:
    return sum(a.prompt_tokens + a.answer_tokens for row in rows for a in row.answers)


def _rate(rows: Sequence[Measured], count: int) -> float | None:
    """A second; None of prompts that were asked one by one."""
    seconds = sum(row.seconds for row in rows if row.tier is None)
    return count / seconds if seconds else None


def _cpu_seconds(rows: Sequence[Measured]) -> float | None:
    """Of all processes."""
    known = [row for row in rows if row.used.keys() == set(ROLES)]
    asked = sum(len(row.answers) for row in known)
    spent = sum(use.cpu_seconds for row in known for use in row.used.values())
    return spent / asked if asked else None


def _memory_bytes(rows: Sequence[Measured]) -> float | None:
    """The most, all processes together."""
    known = [row for row in rows if row.used.keys() == set(ROLES)]
    return max((sum(use.memory_bytes for use in row.used.values()) for row in known), default=None)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
