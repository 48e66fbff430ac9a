"""The worker half: copies what the plan says between paged tensors and host slots, and reports.

It never talks to the index and never decides. Every doubt about a copy is a failed task, which
costs the engine a recompute and never wrong bytes.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvstrata.core.errors import InvariantViolated, KVStrataError, ServerUnavailable
from kvstrata.integration.vllm.blend.slots import SlotPages
from kvstrata.integration.vllm.geometry import (
    DeviceGeometry,
    geometry_from_config,
    pages_from_tensors,
)
from kvstrata.integration.vllm.layerwise import LayerJobs
from kvstrata.integration.vllm.metadata import NULL_BLOCK, Load, Save, StepPlan, WorkerReport
from kvstrata.integration.vllm.ranks import Region
from kvstrata.storage.mapping import HostMapping
from kvstrata.transfer.devices import PagedDevice, PagewiseDevice, open_device
from kvstrata.transfer.driver import Event
from kvstrata.transfer.guarded import Copied, RankSlots, Run, split_runs
from kvstrata.transfer.lanes import Handle, Lane, Lanes, Outcome

__all__ = ["WorkerHalf", "WorkerSettings"]

_log = logging.getLogger(__name__)

_IDLE_WAIT_SECONDS: Final = 0.002  # vLLM would sleep 1 ms before its next empty step
_SHUTDOWN_SECONDS: Final = 5.0
_SAVE_PIECE_BYTES: Final = 16 << 20  # a load waits for one piece of a save at most
_COPY_HERE_BYTES: Final = 16 << 20  # of loads in an idle step; takes no longer than the idle wait
_NO_DEVICE: Final = PagewiseDevice([])  # before the caches are registered


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What the worker half needs of the configuration."""

    region: Region
    tokens_per_block: int
    load_timeout_seconds: float = 10.0
    layerwise: bool = False


class _Piece(NamedTuple):
    """What one job copies."""

    runs: list[Run]
    blocks: int


@dataclass(slots=True)
class _Task:
    """A load or save in flight: one job, or for a large save several."""

    task_id: int
    request_id: str | None  # None for a save
    deadline: float  # of the clock; only loads have one
    device_blocks: list[int]
    jobs: list[Handle[Copied]] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # of each job
    pending: int = 0  # jobs that have not ended
    failed: bool = False
    is_shared: bool = False  # its jobs copy other tasks too, and note their doubts here
    doubt: object = None

    @property
    def is_save(self) -> bool:
        return self.request_id is None

    @property
    def whole_blocks(self) -> int:
        """The leading blocks whose copies have ended as they should.

        Of a save layer by layer none: some layer is missing in all of them.
        """
        if self.is_shared:
            return 0
        whole = 0
        for handle, blocks in zip(self.jobs, self.blocks, strict=True):
            if _problem(handle) is not None:
                break
            whole += blocks
        return whole


_Begin = tuple[_Task, Callable[[], list[_Piece]]]  # a task, and what splits it
_Copy = tuple[_Task, RankSlots, list[Run]]  # a part of a task
_MakeJob = Callable[..., Callable[[Handle[Copied]], Copied]]  # of a ``PagedDevice``


class WorkerHalf:
    """One worker's share of every step. Its hooks are called by the engine's thread alone.

    * Every load of a plan is reported exactly once, whatever happens; at the latest when its
      deadline has passed and its copy has certainly stopped.
    * A hook never raises on account of a copy and never waits, but in an idle step: ``start_load``
      copies up to 16 MiB itself, ``collect`` waits up to 2 ms.
    * Layerwise the step that has a load ends only when the load has: ``wait_for_layer`` and
      ``collect`` wait for it, up to its deadline.
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
        groups, tokens = self.geometry.groups, settings.tokens_per_block
        self._per_slot = tuple(tokens // group.block_size for group in groups)
        self._group_bytes = tuple(group.rank_bytes(tokens) for group in groups)
        self._rank_bytes = self.geometry.rank_bytes(settings.tokens_per_block)
        self._clock = clock
        self._device: PagedDevice = _NO_DEVICE
        self._lanes = Lanes[Copied](threads=0)  # none is needed before there is a device
        self._fence: Event | None = None  # of what was launched before this step, once needed
        self._loads: dict[int, _Task] = {}  # by task id, oldest first
        self._tasks_of: dict[Handle[Copied], list[_Task]] = {}
        self._layer_loads: LayerJobs | None = None  # of this step
        self._layer_saves: LayerJobs | None = None  # of this step
        self._invalid: set[int] = set()  # device blocks of layerwise loads that have failed
        self._received: set[str] = set()
        self._not_received: set[str] = set()
        self._report = WorkerReport()
        self._idle = False
        self._copy_here = False  # the loads of this step are few, and nothing else is to be done

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's paged tensors; ``ConfigError`` if they are not as planned."""
        pages = pages_from_tensors(kv_caches, self.geometry, self._kv_cache_config)
        self._device = open_device(pages)
        self._lanes = Lanes[Copied](threads=self._device.copy_threads)

    def begin_step(self, plan: StepPlan) -> None:
        """Before the forward of *plan* is launched: its loads need not wait for that."""
        is_needed = plan.loads or (plan.saves and self._settings.layerwise)
        self._fence = self._device.fence() if is_needed else None

    def start_load(self, plan: StepPlan) -> None:
        """Begin the plan's loads (vLLM ``start_load_kv``), and in an idle step its saves.

        Before 0.31 vLLM calls no ``wait_for_save`` in a step without a forward.
        """
        self._idle = plan.idle
        deadline = self._clock() + self._settings.load_timeout_seconds
        slots = sum(len(load.slots) for load in plan.loads)
        is_small = slots * self._rank_bytes <= _COPY_HERE_BYTES
        self._copy_here = plan.idle and is_small and self._device.copies_at_once
        loads: list[_Begin] = []
        for load in plan.loads:
            task = _Task(load.task_id, load.request_id, deadline, load.device_blocks)
            self._loads[load.task_id] = task
            loads.append((task, partial(self._load_pieces, load)))
        if loads and self._settings.layerwise:
            self._layer_loads = self._layer_jobs(loads, plan.server_id)
            self._layer_loads.start_all()
        else:
            for task, pieces in loads:
                self._start(task, plan.server_id, pieces, self._before_step)
        if plan.idle:
            self._start_saves(plan)

    def wait_for_layer(self, layer: str) -> None:
        """Block until this step's loads have filled *layer* (vLLM ``wait_for_layer_load``)."""
        if self._loads and (jobs := self._layer_loads) is not None:
            self._wait_for(jobs.of(layer))

    def save_layer(self, plan: StepPlan, layer: str) -> None:
        """Begin the plan's saves of *layer*, whose attention has run (vLLM ``save_kv_layer``).

        What they copy was computed by earlier steps, and this one leaves it alone.
        """
        if not plan.saves or not self._settings.layerwise:
            return
        if self._layer_saves is None:
            self._layer_saves = self._layer_jobs(list(self._saves_of(plan)), plan.server_id)
        self._layer_saves.start(layer)

    def start_save(self, plan: StepPlan) -> None:
        """Begin the plan's saves (vLLM ``wait_for_save``): this step's forward has written."""
        jobs, self._layer_saves, self._fence = self._layer_saves, None, None
        if jobs is not None:
            jobs.start_all()
        elif not plan.idle:
            self._start_saves(plan)

    def _start_saves(self, plan: StepPlan) -> None:
        if not plan.saves:
            return
        launched = self._device.fence()  # with the forward of this step
        for task, pieces in self._saves_of(plan):
            self._start(task, plan.server_id, pieces, launched)

    @property
    def _before_step(self) -> Event:
        """What was launched before this step's forward, or up to now if nobody asked then."""
        if self._fence is None:
            self._fence = self._device.fence()
        return self._fence

    def _saves_of(self, plan: StepPlan) -> Iterator[_Begin]:
        for save in plan.saves:
            task = _Task(save.task_id, None, float("inf"), save.device_blocks)
            yield task, partial(self._save_pieces, save)

    def refuse_saves(self, plan: StepPlan, why: str) -> None:
        """Report the plan's saves as failed: its blocks are not what they are named after."""
        for task, _ in self._saves_of(plan):
            self._fail(task, why)
            self._finish(task)

    def collect(self) -> tuple[set[str], set[str]]:
        """Requests whose load ended since the last call, and those of them whose load failed.

        In an idle step with a load running it waits up to 2 ms for one to end.
        """
        give_up = self._clock() + _IDLE_WAIT_SECONDS
        if (jobs := self._layer_loads) is not None:
            self._wait_for(jobs.all())
            self._layer_loads = None
        self._reap()
        while self._idle and self._loads and not self._received:
            if (left := give_up - self._clock()) <= 0 or not self._lanes.wait(left):
                break
            self._reap()
        received, self._received = self._received, set()
        failed, self._not_received = self._not_received, set()
        return received, failed

    def take_invalid_blocks(self) -> set[int]:
        """Device blocks of layerwise loads that have failed in this step, whole or in part."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def report(self) -> WorkerReport | None:
        """Tasks that ended up to the last ``collect``; None if there is nothing to say."""
        report, self._report = self._report, WorkerReport()
        return report if report.saved or report.load_done else None

    def shutdown(self) -> None:
        """Stop copying; waits up to 5 s for a copy that runs."""
        if not self._lanes.close(_SHUTDOWN_SECONDS):
            _log.warning("a copy still runs %s s after shutdown", _SHUTDOWN_SECONDS)

    def pin(self, mapping: HostMapping, is_over: Callable[[], bool]) -> None:
        """Make *mapping* fast to copy from and to: takes seconds, on a thread that has them."""
        self._device.pin(mapping, is_over)

    def let_go(self) -> None:
        """No mapping is in use any more: what was pinned of it is to be unpinned."""
        self._device.let_go()

    def slot_pages(self) -> SlotPages:
        """How the pages of this worker lie in a slot, of a model with one KV cache group."""
        (group,), (per_slot,) = self.geometry.groups, self._per_slot
        return SlotPages(self._settings.region.start_bytes, group.page_bytes, per_slot)

    def _start(
        self, task: _Task, server_id: bytes, split: Callable[[], list[_Piece]], after: Event
    ) -> None:
        """Submit *task*; if that is impossible it has failed, and is reported as any other."""
        make_job, lane = self._maker(is_save=task.is_save)
        here = self._copy_here and not task.is_save
        begin = self._lanes.run if here else self._lanes.submit
        try:
            slots = self._host_side(server_id)
            for piece in split():
                handle = begin(make_job(slots, piece.runs, after), lane)
                if handle.outcome is Outcome.REFUSED:
                    self._fail(task, "too many copies are waiting", len(task.jobs))
                    break
                task.jobs.append(handle)
                task.blocks.append(piece.blocks)
                self._tasks_of[handle] = [task]
        except KVStrataError as e:
            self._fail(task, e)
        task.pending = len(task.jobs)
        if task.pending == 0:
            self._finish(task)

    def _maker(self, *, is_save: bool) -> tuple[_MakeJob, Lane]:
        device = self._device
        return (device.save_job, Lane.SAVE) if is_save else (device.load_job, Lane.LOAD)

    def _layer_jobs(self, tasks: list[_Begin], server_id: bytes) -> LayerJobs:
        """Jobs for all layers of *tasks*, which are all loads or all saves.

        A task with nothing to copy, or that cannot be copied, has ended at once.
        """
        layers = self.geometry.layers
        after = self._before_step
        copies: list[_Copy] = []
        for task, split in tasks:
            task.is_shared = True
            try:
                slots = self._host_side(server_id)
                copies += [(task, slots, piece.runs) for piece in split()]
            except KVStrataError as e:
                self._fail(task, e)
        # A layer of so many pieces of saves is not more than one piece, behind which a load waits.
        size = len(layers) if tasks and tasks[0][0].is_save else max(1, len(copies))
        batches = [copies[i : i + size] for i in range(0, len(copies), size)]
        for task, _ in tasks:
            task.pending = len(layers) * sum(any(task is t for t, *_ in b) for b in batches)
            if task.pending == 0:
                self._finish(task)
        return LayerJobs(
            layers, lambda layer: [self._submit_layer(layer, batch, after) for batch in batches]
        )

    def _submit_layer(self, layer: int, batch: "list[_Copy]", after: Event) -> Handle[Copied]:
        make_job, lane = self._maker(is_save=batch[0][0].is_save)

        def job(handle: Handle[Copied]) -> Copied:
            for task, slots, runs in batch:
                if task.doubt is not None:
                    continue
                try:
                    copied = make_job(slots, runs, after, layer)(handle)
                except Exception as e:  # noqa: BLE001 - thread top: that of one task of several
                    task.doubt = e
                else:
                    if copied is not Copied.WHOLE:  # another layer's doubt is to stay
                        task.doubt = copied.value
            return Copied.WHOLE

        handle = self._lanes.submit(job, lane)
        tasks = list({task.task_id: task for task, *_ in batch}.values())
        self._tasks_of[handle] = tasks
        for task in tasks:
            task.jobs.append(handle)
        if handle.outcome is Outcome.REFUSED:
            self._end_job(handle)
        return handle

    def _wait_for(self, handles: list[Handle[Copied]]) -> None:
        """Until *handles* have ended; those that have not by the loads' deadline are stopped."""
        deadline = min((task.deadline for task in self._loads.values()), default=0.0)
        for handle in handles:
            if self._lanes.wait_for(handle, max(0.0, deadline - self._clock())):
                continue
            self._lanes.cancel(handle)
            self._lanes.wait_for(handle)  # it copies a page at a time and looks whether to stop

    def _host_side(self, server_id: bytes) -> RankSlots:
        mapping = self.mapping
        if self._device is _NO_DEVICE:
            raise InvariantViolated("a plan came before the KV caches were registered")
        if mapping is None or mapping.server_id != server_id:
            raise ServerUnavailable("the host tier of the plan is not mapped here")
        region = self._settings.region
        if mapping.slot_bytes < region.block_bytes:
            raise InvariantViolated(
                f"slots of {mapping.slot_bytes} bytes for blocks of {region.block_bytes}"
            )
        return RankSlots(mapping, region.start_bytes, self._group_bytes)

    def _reap(self) -> None:
        """Stop loads that missed their deadline, and take in what has ended."""
        now = self._clock()
        for task in self._loads.values():
            if now < task.deadline:
                break
            for handle in task.jobs:
                self._lanes.cancel(handle)
        for handle in self._lanes.poll():
            self._end_job(handle)

    def _end_job(self, handle: Handle[Copied]) -> None:
        for task in self._tasks_of.pop(handle):
            task.pending -= 1
            problem = _problem(handle) if task.doubt is None else task.doubt
            if problem is not None:
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
        if not task.is_shared:
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
        self._report.load_done[task.task_id] = 1
        if task.failed:
            self._report.load_failed.add(task.task_id)
        if self._settings.layerwise:  # vLLM waits for no word of it, and asks for bad blocks alone
            if task.failed:
                self._invalid |= {*task.device_blocks} - {NULL_BLOCK}
            return
        self._received.add(task.request_id)
        if task.failed:
            self._not_received.add(task.request_id)

    def _load_pieces(self, load: Load) -> list[_Piece]:
        return [self._piece(load, 0, len(load.slots))]

    def _save_pieces(self, save: Save) -> list[_Piece]:
        """In pieces, so that a load need not wait for all of a large save.

        None where another rank saves the same bytes: this one's share has ended at once.
        """
        if not self._settings.region.saves:
            return []
        if NULL_BLOCK in save.device_blocks:
            raise InvariantViolated(f"save of a device block that is none: {save.device_blocks}")
        step = max(1, _SAVE_PIECE_BYTES // self._rank_bytes)
        return [self._piece(save, i, i + step) for i in range(0, max(1, len(save.slots)), step)]

    def _piece(self, task: Load | Save, first: int, end: int) -> _Piece:
        """Slots *first* to *end* of *task*."""
        slots = list(zip(task.slots, task.generations, strict=False))[first:end]
        per_slot = sum(self._per_slot)
        last = end * per_slot if end < len(task.slots) else None  # too many are noticed
        blocks = task.device_blocks[first * per_slot : last]
        runs = split_runs(blocks, slots, per_slot=self._per_slot, absent=NULL_BLOCK)
        return _Piece(runs, len(slots))


def _problem(handle: Handle[Copied]) -> object | None:
    """Why the job's copy must not be believed; None if it is whole."""
    if handle.error is not None:
        return handle.error
    if handle.result is Copied.WHOLE:
        return None
    return Copied.STALE.value if handle.result is Copied.STALE else Copied.STOPPED.value
