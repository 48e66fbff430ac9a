"""The worker half: copies what the plan says between paged tensors and host slots, and reports.

It never talks to the index and never decides. Every doubt about a copy is a failed task, which
costs the engine a recompute and never wrong bytes.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvstrata.core.errors import ConfigError, InvariantViolated, KVStrataError, ServerUnavailable
from kvstrata.integration.vllm.geometry import (
    DeviceGeometry,
    geometry_from_config,
    pages_from_tensors,
)
from kvstrata.integration.vllm.metadata import Load, Save, StepPlan, WorkerReport
from kvstrata.storage.mapping import HostMapping
from kvstrata.transfer.cpu import CpuPageCopier
from kvstrata.transfer.device import DeviceCopier
from kvstrata.transfer.guarded import Copied, RankSlots, Run, load_job, save_job, split_runs
from kvstrata.transfer.lanes import Handle, Lane, Lanes, Outcome

__all__ = ["WorkerHalf", "WorkerSettings"]

_log = logging.getLogger(__name__)

_IDLE_WAIT_SECONDS: Final = 0.002  # vLLM would sleep 1 ms before its next empty step
_SHUTDOWN_SECONDS: Final = 5.0
_SAVE_PIECE_BYTES: Final = 16 << 20  # a load waits for one piece of a save at most
_COPY_HERE_BYTES: Final = 16 << 20  # of loads in an idle step; takes no longer than the idle wait


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What the worker half needs of the configuration."""

    rank: int  # this worker's region in every slot
    world_size: int
    tokens_per_block: int
    load_timeout_seconds: float = 10.0


@dataclass(slots=True)
class _Task:
    """A load or save in flight: one job, or for a large save several."""

    task_id: int
    request_id: str | None  # None for a save
    deadline: float  # of the clock; only loads have one
    jobs: list[Handle[Copied]] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # of each job
    pending: int = 0  # jobs that may still run
    failed: bool = False

    @property
    def is_save(self) -> bool:
        return self.request_id is None

    @property
    def whole_blocks(self) -> int:
        """The leading blocks whose copies have ended as they should."""
        whole = 0
        for handle, blocks in zip(self.jobs, self.blocks, strict=True):
            if _problem(handle) is not None:
                break
            whole += blocks
        return whole


class WorkerHalf:
    """One worker's share of every step. Its hooks are called by the engine's thread alone.

    * Every load of a plan is reported exactly once, whatever happens; at the latest when its
      deadline has passed and its copy has certainly stopped.
    * A hook never raises on account of a copy and never waits, but in an idle step: ``start_load``
      copies up to 16 MiB itself, ``collect`` waits up to 2 ms.
    * ``mapping`` may be set by another thread at any time; a task keeps the one it began with.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ``ConfigError`` for a model or block size that is not supported."""
        self.mapping: HostMapping | None = None
        self.geometry: DeviceGeometry = geometry_from_config(vllm_config, kv_cache_config)
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self._per_slot = self.geometry.device_blocks_per_block(settings.tokens_per_block)
        self._rank_bytes = self.geometry.rank_bytes(settings.tokens_per_block)
        self._clock = clock
        self._copier: DeviceCopier | None = None
        self._lanes = Lanes[Copied](threads=1)
        self._loads: dict[int, _Task] = {}  # by task id, oldest first
        self._task_of: dict[Handle[Copied], _Task] = {}
        self._received: set[str] = set()
        self._not_received: set[str] = set()
        self._report = WorkerReport()
        self._idle = False
        self._copy_here = False  # the loads of this step are few, and nothing else is to be done

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's paged tensors; ``ConfigError`` if they are not as planned."""
        pages = pages_from_tensors(kv_caches, self.geometry, self._kv_cache_config)
        device = pages[0].device.type
        if device != "cpu":
            raise ConfigError(
                f"KV cache on {device!r}: this version of KVStrata copies on 'cpu' only",
                hint="run vLLM without the connector (drop --kv-transfer-config)",
            )
        self._copier = CpuPageCopier([page.numpy() for page in pages])

    def start_load(self, plan: StepPlan) -> None:
        """Begin the plan's loads (vLLM ``start_load_kv``)."""
        self._idle = plan.idle
        deadline = self._clock() + self._settings.load_timeout_seconds
        slots = sum(len(load.slots) for load in plan.loads)
        self._copy_here = plan.idle and slots * self._rank_bytes <= _COPY_HERE_BYTES
        for load in plan.loads:
            task = _Task(load.task_id, load.request_id, deadline)
            self._loads[load.task_id] = task
            self._start(task, plan.server_id, partial(self._runs_of_load, load))

    def start_save(self, plan: StepPlan) -> None:
        """Begin the plan's saves (vLLM ``wait_for_save``): this step's forward has written."""
        for save in plan.saves:
            task = _Task(save.task_id, None, deadline=float("inf"))
            self._start(task, plan.server_id, partial(self._runs_of_save, save))

    def collect(self) -> tuple[set[str], set[str]]:
        """Requests whose load ended since the last call, and those of them whose load failed.

        In an idle step with a load running it waits up to 2 ms for one to end.
        """
        give_up = self._clock() + _IDLE_WAIT_SECONDS
        self._reap()
        while self._idle and self._loads and not self._received:
            if (left := give_up - self._clock()) <= 0 or not self._lanes.wait(left):
                break
            self._reap()
        received, self._received = self._received, set()
        failed, self._not_received = self._not_received, set()
        return received, failed

    def report(self) -> WorkerReport | None:
        """Tasks that ended up to the last ``collect``; None if there is nothing to say."""
        report, self._report = self._report, WorkerReport()
        return report if report.saved or report.load_done else None

    def shutdown(self) -> None:
        """Stop copying; waits up to 5 s for a copy that runs."""
        if not self._lanes.close(_SHUTDOWN_SECONDS):
            _log.warning("a copy still runs %s s after shutdown", _SHUTDOWN_SECONDS)

    def _start(self, task: _Task, server_id: bytes, split: Callable[[], list[list[Run]]]) -> None:
        """Submit *task*; if that is impossible it has failed, and is reported as any other."""
        make_job, lane = (save_job, Lane.SAVE) if task.is_save else (load_job, Lane.LOAD)
        here = self._copy_here and not task.is_save
        begin = self._lanes.run if here else self._lanes.submit
        try:
            copier, slots = self._ends_of_copies(server_id)
            for runs in split():
                handle = begin(make_job(copier, slots, runs), lane)
                if handle.outcome is Outcome.REFUSED:
                    self._fail(task, "too many copies are waiting", len(task.jobs))
                    break
                task.jobs.append(handle)
                task.blocks.append(len(runs))
                self._task_of[handle] = task
        except KVStrataError as e:
            self._fail(task, e)
        task.pending = len(task.jobs)
        if task.pending == 0:
            self._finish(task)

    def _ends_of_copies(self, server_id: bytes) -> tuple[DeviceCopier, RankSlots]:
        mapping = self.mapping
        if self._copier is None:
            raise InvariantViolated("a plan came before the KV caches were registered")
        if mapping is None or mapping.server_id != server_id:
            raise ServerUnavailable("the host tier of the plan is not mapped here")
        if mapping.slot_bytes < self._rank_bytes * self._settings.world_size:
            raise InvariantViolated(
                f"slots of {mapping.slot_bytes} bytes for {self._settings.world_size} ranks "
                f"of {self._rank_bytes} bytes"
            )
        start_bytes = self._settings.rank * self._rank_bytes
        return self._copier, RankSlots(mapping, start_bytes, self._rank_bytes)

    def _reap(self) -> None:
        """Stop loads that missed their deadline, and take in what has ended."""
        now = self._clock()
        for task in self._loads.values():
            if now < task.deadline:
                break
            for handle in task.jobs:
                self._lanes.cancel(handle)
        for handle in self._lanes.poll():
            task = self._task_of.pop(handle)
            task.pending -= 1
            if (problem := _problem(handle)) is not None:
                self._fail(task, problem, task.jobs.index(handle))
            if task.pending == 0:
                self._finish(task)

    def _fail(self, task: _Task, problem: object, first: int = 0) -> None:
        """Mark *task* failed, say so once, and spare the copies that have not begun.

        Those of a save before job *first* go on: what they copy can be kept.
        """
        if task.failed:
            return
        task.failed = True
        kind = "save" if task.is_save else f"load of request {task.request_id}"
        _log.warning("%s (task %d) failed: %s", kind, task.task_id, problem)
        for handle in task.jobs[first if task.is_save else 0 :]:
            self._lanes.cancel(handle)

    def _finish(self, task: _Task) -> None:
        """Put an ended task into the next report."""
        if task.request_id is None:
            self._report.saved[task.task_id] = 1
            if task.failed:
                self._report.save_failed[task.task_id] = task.whole_blocks
            return
        del self._loads[task.task_id]
        self._received.add(task.request_id)
        self._report.load_done[task.task_id] = 1
        if task.failed:
            self._not_received.add(task.request_id)
            self._report.load_failed.add(task.task_id)

    def _runs_of_load(self, load: Load) -> list[list[Run]]:
        slots = list(zip(load.slots, load.generations, strict=False))
        return [
            split_runs(
                load.device_blocks, slots, first_offset=load.first_offset, per_slot=self._per_slot
            )
        ]

    def _runs_of_save(self, save: Save) -> list[list[Run]]:
        """In pieces, so that a load need not wait for all of a large save."""
        slots = list(zip(save.slots, save.generations, strict=False))
        runs = split_runs(save.device_blocks, slots, first_offset=0, per_slot=self._per_slot)
        if len(save.device_blocks) % self._per_slot:
            raise InvariantViolated(
                f"save of {len(save.device_blocks)} device blocks: no whole block"
            )
        step = max(1, _SAVE_PIECE_BYTES // self._rank_bytes)
        return [runs[i : i + step] for i in range(0, len(runs), step)]


def _problem(handle: Handle[Copied]) -> object | None:
    """Why the job's copy must not be believed; None if it is whole."""
    if handle.error is not None:
        return handle.error
    if handle.result is Copied.WHOLE:
        return None
    return Copied.STALE.value if handle.result is Copied.STALE else Copied.STOPPED.value
