"""Why a lookup takes what it takes, for ``inspect --explain`` and for the metrics."""

import time

from kvstrata.manager.decisions import Decision
from kvstrata.manager.desk import Desk
from kvstrata.manager.planner import Plan
from kvstrata.manager.tasks import GetTask, Lookup
from kvstrata.observe import metrics

__all__ = ["explain"]


def explain(
    desk: Desk, counters: metrics.Counters, task: GetTask, lookup: Lookup, found: int, plan: Plan
) -> None:
    """Of *found* blocks that follow those that *task* had, *plan* takes the leading ones.

    Of traffic alone: nobody asks why something was warmed.
    """
    if not task.is_traffic:
        return
    counters.add(metrics.DECLINED_BLOCKS, found - plan.blocks, plan.reason.value)
    taken = task.blocks
    end = taken - plan.blocks + found
    desk.decisions.add(
        Decision(
            time.time(),
            "get",
            lookup.request,
            lookup.namespace.hex(),
            task.task_id,
            len(lookup.keys),
            host_blocks=taken - task.disk_blocks - task.remote_blocks,
            disk_blocks=task.disk_blocks,
            remote_blocks=task.remote_blocks,
            taken_blocks=taken,
            reason=plan.reason.value,
            load_seconds=plan.load_seconds,
            recompute_seconds=plan.recompute_seconds,
            last_block=lookup.keys[end - 1].tobytes().hex() if end else "",
        )
    )
