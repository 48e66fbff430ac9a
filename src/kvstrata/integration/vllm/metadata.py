"""What the two halves of the connector say to each other, inside vLLM's own messages.

Task ids are the scheduler half's; the same id reaches every worker, and each reports it once.
"""

from dataclasses import dataclass, field
from typing import Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstrata.blend.audit import Audit
from kvstrata.integration.vllm.blend.metadata import BlendConnectorMeta

__all__ = ["NULL_BLOCK", "HookStep", "Load", "Save", "StepPlan", "WorkerReport", "all_workers"]

NULL_BLOCK: Final = 0  # vLLM's id for "no device block" in a block table; nobody's KV


@dataclass(slots=True)
class Load:
    """Host → device for one request: what ``device_blocks`` names of ``slots``.

    A slot holds the device blocks of a block by KV cache group, or that of a recurrent group alone.
    ``NULL_BLOCK`` stands for those that are not loaded: the device has them, or does not need them.
    """

    request_id: str
    task_id: int
    device_blocks: list[int]  # (slots * device_blocks_per_block,)
    slots: list[int]
    generations: list[int]  # (slots,) what each slot's generation must be
    at_once: bool = False  # the request runs in this very step


@dataclass(slots=True)
class Save:
    """Device → host: ``device_blocks`` fill ``slots``, whole blocks or states, in order."""

    task_id: int
    device_blocks: list[int]  # (slots * device_blocks_per_block,)
    slots: list[int]
    generations: list[int]  # (slots,)


@dataclass(slots=True)
class HookStep:
    """The attention hook is wanted in this step, and is to be given ``sparse_meta``."""

    sparse_meta: object = None


@dataclass
class StepPlan(KVConnectorMetadata):
    """Everything the workers do for KVStrata in one engine step."""

    server_id: bytes  # whose slots these are; a worker that maps another's fails every task
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    idle: bool = False  # no tokens are scheduled in this step
    hook: HookStep | None = None
    blend: BlendConnectorMeta | None = None


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Tasks that ended since the last report, over all workers once aggregated.

    A task is over when ``saved`` or ``load_done`` has the bit of every worker: only then does
    nobody read or write its device blocks and slots any more. A report that comes twice stands for
    no other worker. It failed if any worker says so; of a failed save the leading blocks that all
    workers have copied can be kept. A load that was given up, and has failed nowhere, puts nothing
    that it was to read in doubt.
    """

    saved: dict[int, int] = field(default_factory=dict)  # task id -> bits of workers, ok or not
    save_failed: dict[int, int] = field(default_factory=dict)  # task id -> leading blocks copied
    load_done: dict[int, int] = field(default_factory=dict)  # task id -> bits of workers, ok or not
    load_failed: set[int] = field(default_factory=set)
    load_given_up: set[int] = field(default_factory=set)  # it was late, or found no room
    hook_failed: bool = False
    audits: dict[int, Audit] = field(default_factory=dict)  # of blended requests, by task id

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        """A new report: workers and failures united (vLLM ``KVOutputAggregator``)."""
        if not isinstance(other, WorkerReport):
            raise TypeError(f"cannot aggregate a {type(other).__name__} with a WorkerReport")
        return WorkerReport(
            saved=_united(self.saved, other.saved),
            save_failed=_least(self.save_failed, other.save_failed),
            load_done=_united(self.load_done, other.load_done),
            load_failed=self.load_failed | other.load_failed,
            load_given_up=self.load_given_up | other.load_given_up,
            hook_failed=self.hook_failed or other.hook_failed,
            audits=self.audits | other.audits,
        )


def all_workers(count: int) -> int:
    """The bits of *count* workers."""
    return (1 << count) - 1


def _united(left: dict[int, int], right: dict[int, int]) -> dict[int, int]:
    return {task: left.get(task, 0) | right.get(task, 0) for task in left.keys() | right.keys()}


def _least(left: dict[int, int], right: dict[int, int]) -> dict[int, int]:
    least = left | right
    for task in left.keys() & right.keys():
        least[task] = min(left[task], right[task])
    return least
