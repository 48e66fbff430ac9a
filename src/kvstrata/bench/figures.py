"""From what was measured to figures: medians, tails, ratios within a round, cost per request."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvstrata.bench.contenders import CONTENDERS
from kvstrata.bench.processes import ROLES, Role
from kvstrata.bench.record import Measured, Rates
from kvstrata.bench.traffic import Answer
from kvstrata.bench.workloads.workload import Tier

__all__ = ["Figures", "Results", "is_ours", "is_peer", "percentile"]

_NO_PEERS = ("none", "roomy")


def is_ours(contender: str) -> bool:
    """Whether it is one of KVStrata's."""
    return contender.startswith("kvstrata")


def is_peer(contender: str) -> bool:
    return contender not in _NO_PEERS and not is_ours(contender)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least *percent* of *values* do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)]


@dataclass(frozen=True, slots=True)
class Figures:
    """One contender in one row of a table. Times are in seconds; None is not known."""

    contender: str
    answers: int
    failures: int
    differing: int  # answers that are other tokens than those of no connector in the same round
    not_as_meant: int  # steps that were another hit than they should be: they count nowhere else
    first_token_median: float | None
    first_token_least: float | None
    first_token_p99: float | None
    first_token_most: float | None
    silent_most: float | None  # from the end of a restarted engine to the next first token
    gap_median: float | None  # between outputs of tokens
    gap_p99: float | None
    gaps: int
    tokens_per_second: float | None  # of prompts and answers; not of prompts one by one
    goodput: float | None  # answers a second whose first token came in time
    reused_share: float | None  # of the tokens of prompts
    cpu_seconds: dict[Role, float]  # per request; without those of whom it is not known
    moved_bytes: dict[str, float]  # per request
    disk_bytes: float  # per request, read and written, as the kernel counts
    memory_bytes: int | None  # the most, all processes together
    to_cold: float | None  # ratios are medians of ratios within one round
    to_best_peer: float | None
    best_peer: str
    to_limit: float | None
    limit: str


class Results:
    """All rounds of all workloads."""

    def __init__(
        self,
        measured: Iterable[Measured],
        rates: Iterable[Rates],
        in_time_seconds: float,
        token_bytes: int = 0,
    ) -> None:
        """*token_bytes* of KV; without them no hit outside the device has a limit."""
        self._rows: dict[tuple[str, str], dict[str, list[Measured]]] = {}
        for row in measured:
            group = self._rows.setdefault((row.workload, row.name), {})
            group.setdefault(row.contender, []).append(row)
        self._rates: dict[tuple[str, int], dict[Tier, float]] = {
            (each.workload, each.round): each.bytes_per_second for each in rates
        }
        self._in_time_seconds = in_time_seconds
        self._token_bytes = token_bytes

    def workloads(self) -> list[str]:
        return list(dict.fromkeys(workload for workload, _ in self._rows))

    def steps(self, workload: str) -> list[str]:
        return [name for found, name in self._rows if found == workload]

    def every(self) -> Iterator[Figures]:
        for workload, step in self._rows:
            yield from self.figures(workload, step)

    def rounds(self, workload: str, step: str) -> list[dict[str, Figures]]:
        """Contender → what it did at *step*, round by round; ratios are of that round."""
        groups = self._rows[workload, step]
        numbers = sorted({row.round for rows in groups.values() for row in rows})
        return [
            {
                figures.contender: figures
                for figures in Results(
                    [row for rows in groups.values() for row in rows if row.round == number],
                    [],
                    self._in_time_seconds,
                ).figures(workload, step)
            }
            for number in numbers
        ]

    def figures(self, workload: str, step: str) -> list[Figures]:
        """Of each contender, in the order of ``CONTENDERS``."""
        group = self._rows[workload, step]
        return [self._of(workload, step, name) for name in CONTENDERS if name in group]

    def _of(self, workload: str, step: str, name: str) -> Figures:
        rows = self._rows[workload, step][name]
        valid = [row for row in rows if row.as_meant or row.tier is None]
        answers = [answer for row in valid for answer in row.answers if answer.failure is None]
        firsts = [answer.first_token_seconds for answer in answers]
        gaps = [gap for answer in answers for gap in answer.gap_seconds]
        seconds = sum(row.seconds for row in valid)
        prompt_tokens = sum(answer.prompt_tokens for answer in answers)
        all_tokens = prompt_tokens + sum(answer.answer_tokens for answer in answers)
        one_by_one = rows[0].tier is not None
        in_time = sum(first <= self._in_time_seconds for first in firsts)
        asked = max(1, sum(len(row.answers) for row in valid))
        peer, to_peer = self._best_peer(workload, step, name)
        limit, to_limit = self._limit(workload, step, name)
        return Figures(
            contender=name,
            answers=len(answers),
            failures=sum(a.failure is not None for row in valid for a in row.answers),
            differing=sum(self._differing(row) for row in valid),
            not_as_meant=len(rows) - len(valid),
            first_token_median=_of_some(statistics.median, firsts),
            first_token_least=_of_some(min, firsts),
            first_token_p99=_of_some(lambda values: percentile(values, 99), firsts),
            first_token_most=_of_some(max, firsts),
            silent_most=_of_some(max, [s for r in valid if (s := r.silent_seconds) is not None]),
            gap_median=_of_some(statistics.median, gaps),
            gap_p99=_of_some(lambda values: percentile(values, 99), gaps),
            gaps=len(gaps),
            tokens_per_second=None if one_by_one else _share(all_tokens, seconds),
            goodput=None if one_by_one else _share(in_time, seconds),
            reused_share=_share(sum(answer.cached_tokens for answer in answers), prompt_tokens),
            cpu_seconds=_cpu_seconds(valid),
            moved_bytes={
                what: sum(row.moved_bytes.get(what, 0) for row in valid) / asked
                for what in sorted({what for row in valid for what in row.moved_bytes})
            },
            disk_bytes=sum(
                use.read_bytes + use.written_bytes for row in valid for use in row.used.values()
            )
            / asked,
            memory_bytes=max(
                (
                    sum(use.memory_bytes for use in row.used.values())
                    for row in valid
                    if row.used.keys() == set(ROLES)
                ),
                default=None,
            ),
            to_cold=self._to_cold(workload, step, name),
            to_best_peer=to_peer,
            best_peer=peer,
            to_limit=to_limit,
            limit=limit,
        )

    def _differing(self, row: Measured) -> int:
        """Of what no connector was not asked there is nothing to compare with.

        Of several misses of one length each is another prompt, and the last is that of the hits.
        """
        name = _cold_step(row)
        cold = self._rows.get((row.workload, name), {}).get("none", ())
        meant = {
            (answer.conversation, answer.turn): answer.tokens_hash
            for other in cold
            if other.round == row.round and (row.name != name or row.step == other.step)
            for answer in _answered(other)
        }
        return sum(
            answer.tokens_hash != meant.get((answer.conversation, answer.turn), answer.tokens_hash)
            for answer in _answered(row)
        )

    def _to_cold(self, workload: str, step: str, name: str) -> float | None:
        """To the first token beside computing all of it, in the same round."""
        cold = _cold_step(self._rows[workload, step][name][0])
        return self._ratio(workload, (step, name), (cold, "none"))

    def _best_peer(self, workload: str, step: str, name: str) -> tuple[str, float | None]:
        """The peer that was soonest at this step, and how this contender compares to it."""
        medians = {
            other: value
            for other in filter(is_peer, self._rows[workload, step])
            if (value := self._median_of_rounds(workload, step, other)) is not None
        }
        if not medians or not is_ours(name):
            return "", None
        best = min(medians, key=medians.__getitem__)
        return best, self._ratio(workload, (step, name), (step, best))

    def _limit(self, workload: str, step: str, name: str) -> tuple[str, float | None]:
        """What cannot be undercut: a device cache with room for all; of a hit elsewhere, a device hit
        without a connector and its bytes at the rate that this machine moves bytes.
        """
        if name == "roomy":
            return "", None
        tier = self._rows[workload, step][name][0].tier
        if tier is None:
            return "roomy", self._ratio(workload, (step, name), (step, "roomy"))
        if tier not in {"host", "disk", "remote"} or not self._token_bytes:
            return "", None
        least = self._rounds(workload, step.replace(f"{tier} hit", "device hit"), "none")
        own = self._rounds(workload, step, name)
        kept_bytes = self._cached_tokens(workload, step, name) * self._token_bytes
        ratios = [
            own[number] / (least[number] + kept_bytes / rate)
            for number in own.keys() & least.keys()
            if (rate := self._rates.get((workload, number), {}).get(tier))
        ]
        return f"device hit + {tier}", _of_some(statistics.median, ratios)

    def _cached_tokens(self, workload: str, step: str, name: str) -> float:
        """Of a hit, which is as large in each round."""
        rows = [row for row in self._rows[workload, step][name] if row.as_meant]
        return max((a.cached_tokens for row in rows for a in _answered(row)), default=0)

    def _ratio(self, workload: str, one: tuple[str, str], other: tuple[str, str]) -> float | None:
        ours, theirs = self._rounds(workload, *one), self._rounds(workload, *other)
        return _of_some(
            statistics.median, [ours[n] / theirs[n] for n in sorted(ours.keys() & theirs.keys())]
        )

    def _median_of_rounds(self, workload: str, step: str, name: str) -> float | None:
        return _of_some(statistics.median, list(self._rounds(workload, step, name).values()))

    def _rounds(self, workload: str, step: str, name: str) -> dict[int, float]:
        """The median first token of each round, by the number of the round."""
        firsts: dict[int, list[float]] = {}
        for row in self._rows.get((workload, step), {}).get(name, []):
            if row.as_meant or row.tier is None:
                firsts.setdefault(row.round, []).extend(map(_first, _answered(row)))
        return {number: statistics.median(times) for number, times in firsts.items() if times}


def _cold_step(row: Measured) -> str:
    """In which the same was computed: of hits of one prompt its miss."""
    return row.name if row.tier is None else f"miss, {row.name.rpartition(', ')[2]}"


def _cpu_seconds(rows: list[Measured]) -> dict[Role, float]:
    """Per request, of the steps of which it is known."""
    spent: dict[Role, float] = {}
    for role in ROLES:
        known = [row for row in rows if role in row.used]
        asked = sum(len(row.answers) for row in known)
        if asked:
            spent[role] = sum(row.used[role].cpu_seconds for row in known) / asked
    return spent


def _answered(row: Measured) -> list[Answer]:
    return [answer for answer in row.answers if answer.failure is None]


def _first(answer: Answer) -> float:
    return answer.first_token_seconds


def _of_some(figure: Callable[[list[float]], float], values: list[float]) -> float | None:
    return figure(values) if values else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
