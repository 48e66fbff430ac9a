"""The tables of a run, as text and as JSON."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from kvstrata.bench.ahead import leads
from kvstrata.bench.contenders import CONTENDERS
from kvstrata.bench.figures import Figures, Results
from kvstrata.bench.record import About, RunFolder
from kvstrata.bench.workloads import workloads
from kvstrata.bench.workloads.workload import COLD_TOKENS
from kvstrata.core.units import human_bytes

__all__ = ["as_plain", "markdown", "results_of"]

_MANY_ROUNDS = 3  # in fewer, who is ahead may be so by chance
_IN_TIME = 2.0  # a first token is in time within so many times a cold prompt alone


def results_of(folder: RunFolder) -> Results:
    about = folder.about()
    in_time = _IN_TIME * about.cold_seconds if about else 0.0
    token_bytes = about.token_bytes if about else 0
    return Results(folder.measured(), folder.rates(), in_time, token_bytes)


def as_plain(folder: RunFolder) -> dict[str, Any]:
    results = results_of(folder)
    about = folder.about()
    return {
        "about": None if about is None else msgspec.to_builtins(about),
        "workloads": {
            workload: {
                step: [asdict(figures) for figures in results.figures(workload, step)]
                for step in results.steps(workload)
            }
            for workload in results.workloads()
        },
    }


def markdown(folder: RunFolder) -> str:
    """Everything that was measured; empty if nothing was."""
    results, about = results_of(folder), folder.about()
    lines = [] if about is None else [*_commands(about), _head(about), ""]
    for workload in results.workloads():
        lines += [f"## {workload}", "", workloads()[workload].title, ""]
        rows = [
            (step, f) for step in results.steps(workload) for f in results.figures(workload, step)
        ]
        lines += [*_table(_TIME_TITLES, rows, _times), ""]
        lines += [*_table(_COST_TITLES, rows, _costs), ""]
        lines += [*_remarks([f for _, f in rows]), ""]
        lines += _where_a_peer_is_ahead(results, workload)
    return "\n".join(lines)


_TIME_TITLES = (
    *("answers", "failed", "differ", "first token: median ms", "least", "p99", "longest"),
    *("/ cold", "/ best peer", "/ limit", "silent s"),
)
_COST_TITLES = (
    *("next token: median ms", "p99", "tokens/s", "in time/s", "reused"),
    *("CPU ms a request: engine", "worker", "client", "server"),
    *("moved a request", "files a request", "memory"),
)


def _table(
    titles: Sequence[str],
    rows: list[tuple[str, Figures]],
    cells: Callable[[Figures], list[str]],
) -> Iterator[str]:
    """Without the columns that are empty in all *rows*."""
    filled = [cells(f) for _, f in rows]
    kept = [i for i in range(len(titles)) if any(row[i] for row in filled)]
    yield _line(["step", "engine", *(titles[i] for i in kept)])
    yield _line(["---", "---", *("---:" for _ in kept)])
    for (step, f), row in zip(rows, filled, strict=True):
        yield _line([step, CONTENDERS[f.contender].title, *(row[i] for i in kept)])


def _commands(about: About) -> Iterator[str]:
    """Which commands measured it, when, and of which source."""
    for begun in about.begun:
        commit = f", commit {begun.commit}" if begun.commit else ""
        yield f"    {begun.command}    # {begun.at}{commit}"
    if about.begun:
        yield ""


def _head(about: About) -> str:
    machine = about.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return (
        f"{machine.cores} cores of {machine.processor}, {human_bytes(machine.memory_bytes)}, "
        f"{machine.device}, files on {machine.files}; {machine.system}; {versions}. {about.model}. "
        f"Threads bound to cores {machine.threads_bind} for all. A prompt of {COLD_TOKENS} new tokens takes "
        f"{about.cold_seconds * 1e3:.0f} ms with {CONTENDERS[about.cold_contender].title}; a first "
        f"token is in time within {_IN_TIME:g} times that."
    )


def _times(f: Figures) -> list[str]:
    firsts = (f.first_token_median, f.first_token_least, f.first_token_p99, f.first_token_most)
    title = CONTENDERS[f.best_peer].title if f.best_peer else ""
    peer = "" if f.to_best_peer is None else f"{f.to_best_peer:.2f} ({title})"
    counts = [str(f.answers), *(str(count or "") for count in (f.failures, f.differing))]
    silent = "" if f.silent_most is None else f"{f.silent_most:.1f}"
    return [*counts, *map(_ms, firsts), _ratio(f.to_cold), peer, _ratio(f.to_limit), silent]


def _costs(f: Figures) -> list[str]:
    rate = "" if f.tokens_per_second is None else f"{f.tokens_per_second:.0f}"
    goodput = "" if f.goodput is None else f"{f.goodput:.2f}"
    reused = "" if f.reused_share is None else f"{f.reused_share:.0%}"
    moved = ", ".join(f"{what} {human_bytes(int(b))}" for what, b in f.moved_bytes.items() if b)
    files = human_bytes(int(f.disk_bytes)) if f.disk_bytes else ""
    return [
        *(_ms(f.gap_median), _ms(f.gap_p99), rate, goodput, reused),
        *(_ms(f.cpu_seconds.get(role)) for role in ("engine", "worker", "client", "server")),
        *(moved, files, "" if f.memory_bytes is None else human_bytes(f.memory_bytes)),
    ]


def _where_a_peer_is_ahead(results: Results, workload: str) -> list[str]:
    rows, most = [], 0
    for step in results.steps(workload):
        found: dict[str, list[str]] = {}
        rounds = results.rounds(workload, step)
        most = max(most, len(rounds))
        for lead in leads(rounds):
            found.setdefault(lead.contender, []).append(str(lead))
        rows += [_line([step, CONTENDERS[c].title, "; ".join(f)]) for c, f in found.items()]
    if not rows:
        return []
    titles = [_line(["step", "engine", "a peer is ahead in"]), _line(["---"] * 3)]
    where = "every round" if most >= _MANY_ROUNDS else f"{most} round{'s' if most > 1 else ''}"
    medians = (
        "Figures here are medians of the rounds, above of all answers; "
        "behind a peer's stands the median of the ratios to it"
    )
    return [f"In {where}, and by more than 5 %. {medians}:", "", *titles, *rows, ""]


def _remarks(shown: list[Figures]) -> Iterator[str]:
    for name in dict.fromkeys(f.contender for f in shown):
        if CONTENDERS[name].remark:
            yield f"* {CONTENDERS[name].title}: {CONTENDERS[name].remark}."
    missed = [f for f in shown if f.not_as_meant]
    for f in missed:
        yield (
            f"* {CONTENDERS[f.contender].title}: {f.not_as_meant} steps were not the hit or miss "
            "that they should be, and are not counted."
        )


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
