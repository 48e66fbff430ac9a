"""In what, at a step, peers are ahead of KVStrata: by a twentieth, in every round."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from kvstrata.bench.contenders import CONTENDERS
from kvstrata.bench.figures import Figures, is_ours, is_peer
from kvstrata.bench.processes import ROLES

__all__ = ["Lead", "leads"]

_MARGIN: Final = 1.05
_FEWEST: Final = 100  # of which one in a hundred is not chance

Round = Mapping[str, Figures]
"""Of one step in one round: contender → its figures."""


@dataclass(frozen=True, slots=True)
class Lead:
    """A figure of *contender*, one of KVStrata's, in which *peers* are ahead, best first."""

    contender: str
    figure: str
    own: str
    peers: tuple[tuple[str, str, float], ...]  # title, figure and by how much, as rounds have it

    def __str__(self) -> str:
        peers = ", ".join(f"{title} {figure}: {ratio:.2f}" for title, figure, ratio in self.peers)
        return f"{self.figure} {self.own} ({peers})"


@dataclass(frozen=True, slots=True)
class _Compared:
    title: str
    of: Callable[[Figures], float | None]
    show: Callable[[float], str]
    more_is_better: bool = False


def leads(rounds: Sequence[Round]) -> Iterator[Lead]:
    """Of all *rounds* of one step.

    Peers are the contenders that are not KVStrata's and that gave all answers, no connector too.
    """
    names = dict.fromkeys(name for each in rounds for name in each)
    for own in filter(is_ours, names):
        peers = [
            name
            for name in names
            if (is_peer(name) or name == "none")
            and not any(each[name].failures for each in rounds if name in each)
        ]
        for compared in _COMPARED:
            if lead := _lead(compared, rounds, own, peers):
                yield lead


def _lead(
    compared: _Compared, rounds: Sequence[Round], own: str, peers: Sequence[str]
) -> Lead | None:
    ours = _by_round(compared, rounds, own)
    ahead = []
    for peer in peers:
        theirs = _by_round(compared, rounds, peer)
        if ratio := _is_ahead_by(compared, ours, theirs):
            ahead.append((statistics.median(theirs.values()), peer, ratio))
    if not ahead:
        return None
    ahead.sort(key=itemgetter(0), reverse=compared.more_is_better)
    figure = compared.show(statistics.median(ours.values()))
    named = ((CONTENDERS[peer].title, compared.show(value), ratio) for value, peer, ratio in ahead)
    return Lead(own, compared.title, figure, tuple(named))


def _by_round(compared: _Compared, rounds: Sequence[Round], name: str) -> dict[int, float]:
    found = {n: compared.of(each[name]) for n, each in enumerate(rounds) if name in each}
    return {n: value for n, value in found.items() if value is not None}


def _is_ahead_by(
    compared: _Compared, own: Mapping[int, float], theirs: Mapping[int, float]
) -> float | None:
    """The median of the ratios within rounds, worse to better; None where they are not ahead."""
    pairs = [(own[number], theirs[number]) for number in own.keys() & theirs.keys()]
    if compared.more_is_better:
        pairs = [(theirs, own) for own, theirs in pairs]
    ratios = [worse / better for worse, better in pairs if better > 0]
    if not ratios or min(ratios) <= 1 or statistics.median(ratios) <= _MARGIN:
        return None
    return statistics.median(ratios)


def _cpu_seconds(figures: Figures) -> float | None:
    known = figures.cpu_seconds
    return sum(known.values()) if known.keys() == set(ROLES) else None


def _gib(count: float) -> str:
    """Two that differ by a twentieth do not look alike, as they would in tenths."""
    return f"{count / (1 << 30):.2f} GiB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


_COMPARED: Final = (
    _Compared("first token", lambda f: f.first_token_median, _ms),
    _Compared(
        "first token p99", lambda f: f.first_token_p99 if f.answers >= _FEWEST else None, _ms
    ),
    _Compared("next token", lambda f: f.gap_median, _ms),
    _Compared("next token p99", lambda f: f.gap_p99 if f.gaps >= _FEWEST else None, _ms),
    _Compared("tokens/s", lambda f: f.tokens_per_second, "{:.0f}".format, more_is_better=True),
    _Compared("in time/s", lambda f: f.goodput, "{:.2f}".format, more_is_better=True),
    _Compared("CPU a request", _cpu_seconds, _ms),
    _Compared("memory", lambda f: f.memory_bytes, _gib),
)
