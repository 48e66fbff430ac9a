"""Many replays of one trace, on several cores."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from kvstrata.core.errors import ConfigError
from kvstrata.replay.belady import find_optimum
from kvstrata.replay.cost import Costs
from kvstrata.replay.outcome import OPTIMUM, Outcome
from kvstrata.replay.reuse import Reuse
from kvstrata.replay.savings import most_saved_seconds
from kvstrata.replay.simulator import CachePlan, simulate
from kvstrata.replay.sizes import Sizes
from kvstrata.replay.spool import Spool

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import SynchronizedArray

    Counts = SynchronizedArray[int]

__all__ = ["Run", "Study", "run_all"]

_POLL_SECONDS: Final = 0.2

Run = CachePlan | Sizes
"""A cache to try, or sizes to find the optimum for."""


@dataclass(frozen=True, slots=True)
class Study:
    """A trace, and what its blocks cost."""

    spool: Spool
    reuse: Reuse
    costs: Costs


def run_all(
    study: Study, runs: Sequence[Run], *, jobs: int, on_event: Callable[[int], None] | None = None
) -> list[Outcome]:
    """The outcome of each run, *jobs* of them at a time, each in a process of its own.

    *on_event* is told, now and then, how many events are done in all runs together.
    """
    told = on_event or (lambda _: None)
    if jobs == 1 or len(runs) == 1:
        return _run_here(study, runs, told)
    context = multiprocessing.get_context("spawn")
    done = context.Array("Q", len(runs))
    pool = ProcessPoolExecutor(jobs, context, initializer=_share, initargs=(done,))
    try:
        futures = [pool.submit(_run_there, study, run, i) for i, run in enumerate(runs)]
        left: set[Future[Outcome]] = set(futures)
        while left:
            left = wait(left, timeout=_POLL_SECONDS).not_done
            told(sum(done[:]))
        return [future.result() for future in futures]
    except BrokenProcessPool as e:
        raise ConfigError(
            "a replay was killed, probably for want of memory", hint="give --jobs 1"
        ) from e
    finally:
        pool.shutdown(cancel_futures=True)


def _run_here(study: Study, runs: Sequence[Run], told: Callable[[int], None]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for run in runs:
        before = len(outcomes) * study.spool.events
        outcomes.append(_run(study, run, partial(_tell_after, told, before)))
    told(len(runs) * study.spool.events)
    return outcomes


def _tell_after(told: Callable[[int], None], before: int, done: int) -> None:
    told(before + done)


def _run(study: Study, run: Run, on_event: Callable[[int], None]) -> Outcome:
    if isinstance(run, CachePlan):
        most_blocks = study.reuse.distinct_blocks
        return simulate(study.spool, study.costs, run, most_blocks=most_blocks, on_event=on_event)
    block_bytes = study.costs.block_bytes
    capacity = run.host_bytes // block_bytes + run.disk_bytes // block_bytes
    found = find_optimum(study.spool, study.reuse, capacity, study.costs.prefill_seconds, on_event)
    saved = most_saved_seconds(study.spool, study.reuse, capacity, study.costs.prefill_seconds)
    return Outcome(OPTIMUM, run, found.hit_blocks, 0, prefill_seconds=saved)


_shared: "list[Counts]" = []  # in a process of a pool: events done, a run each


def _share(done: "Counts") -> None:
    _shared.append(done)


def _run_there(study: Study, run: Run, number: int) -> Outcome:
    def tell(done: int) -> None:
        _shared[0][number] = done

    outcome = _run(study, run, tell)
    tell(study.spool.events)
    return outcome
