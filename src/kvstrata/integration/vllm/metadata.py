"""What the two halves of the connector say to each other, inside vLLM's own messages.

Task ids are the scheduler half's; the same id reaches every worker, and each reports it once.
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

__all__ = ["Load", "Save", "StepPlan", "WorkerReport"]


@dataclass(slots=True)
class Load:
    """Host → device for one request: consecutive device blocks of its prompt.

    ``device_blocks[0]`` is device block number ``first_offset`` of ``slots[0]``; the others
    follow through the slots in order. The last slot may be used in part.
    """

    request_id: str
    task_id: int
    device_blocks: list[int]
    slots: list[int]
    generations: list[int]  # (slots,) what each slot's generation must be
    first_offset: int  # in device blocks


@dataclass(slots=True)
class Save:
    """Device → host: ``device_blocks`` fill ``slots``, whole blocks, in order."""

    task_id: int
    device_blocks: list[int]  # (slots * device_blocks_per_block,)
    slots: list[int]
    generations: list[int]  # (slots,)


@dataclass
class StepPlan(KVConnectorMetadata):
    """Everything the workers do for KVStrata in one engine step."""

    server_id: bytes  # whose slots these are; a worker that maps another's fails every task
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    idle: bool = False  # no tokens are scheduled in this step


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Tasks that ended since the last report, over all workers once aggregated.

    A task is over when ``saved`` or ``load_done`` counts every worker: only then does nobody
    read or write its device blocks and slots any more. It failed if any worker says so; of a
    failed save the leading blocks that all workers have copied can be kept.
    """

    saved: dict[int, int] = field(default_factory=dict)  # task id -> workers done, ok or not
    save_failed: dict[int, int] = field(default_factory=dict)  # task id -> leading blocks copied
    load_done: dict[int, int] = field(default_factory=dict)  # task id -> workers done, ok or not
    load_failed: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        """A new report: counts added, failures united (vLLM ``KVOutputAggregator``)."""
        if not isinstance(other, WorkerReport):
            raise TypeError(f"cannot aggregate a {type(other).__name__} with a WorkerReport")
        return WorkerReport(
            saved=_add(self.saved, other.saved),
            save_failed=_least(self.save_failed, other.save_failed),
            load_done=_add(self.load_done, other.load_done),
            load_failed=self.load_failed | other.load_failed,
        )


def _add(left: dict[int, int], right: dict[int, int]) -> dict[int, int]:
    return {task: left.get(task, 0) + right.get(task, 0) for task in left.keys() | right.keys()}


def _least(left: dict[int, int], right: dict[int, int]) -> dict[int, int]:
    least = left | right
    for task in left.keys() & right.keys():
        least[task] = min(left[task], right[task])
    return least
