"""The worker half: copies what the plan says between paged tensors and host slots, and reports.

It never talks to the index and never decides. Every doubt about a copy is a failed task, which
costs the engine a recompute and never wrong bytes.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvstrata.core.errors import ConfigError, InvariantViolated, KVStrataError, ServerUnavailable
from kvstrata.integration.vllm.blend.slots import SlotPages
from kvstrata.integration.vllm.geometry import (
    DeviceGeometry,
    geometry_from_config,
    pages_from_tensors,
)
from kvstrata.integration.vllm.layerwise import LayerLoad, LayerSaves
from kvstrata.integration.vllm.metadata import NULL_BLOCK, Save, StepPlan, WorkerReport
from kvstrata.integration.vllm.pieces import Piece, Pieces
from kvstrata.integration.vllm.ranks import Region
from kvstrata.integration.vllm.worker_tasks import (
    Parts,
    WorkerTask,
    is_doubt,
    note_doubts,
    problem_of,
)
from kvstrata.observe.seldom import SeldomWarning
from kvstrata.storage.mapping import HostMapping
from kvstrata.storage.near import bring_near
from kvstrata.storage.numa import memory_nodes
from kvstrata.transfer.devices import PagedDevice, PagewiseDevice, open_device
from kvstrata.transfer.driver import Event
from kvstrata.transfer.guarded import Copied, RankSlots, Run
from kvstrata.transfer.lanes import Handle, Job, Lane, Lanes, Outcome
from kvstrata.transfer.layered import LayerGates, Part, copy_part

__all__ = ["WorkerHalf", "WorkerSettings"]

_log = logging.getLogger(__name__)

_IDLE_WAIT_SECONDS: Final = 0.002  # vLLM would sleep 1 ms before its next empty step
_SHUTDOWN_SECONDS: Final = 5.0
_STOP_SECONDS: Final = 5.0  # that a load which is to stop may take before somebody is told
_COPY_HERE_BYTES: Final = 16 << 20  # of loads in an idle step; takes no longer than the idle wait
_NO_DEVICE: Final = PagewiseDevice([])  # before the caches are registered


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What the worker half needs of the configuration."""

    region: Region
    tokens_per_block: int
    load_timeout_seconds: float = 10.0
    layerwise: bool = False


_Begin = tuple[WorkerTask, Callable[[], list[Piece]]]  # a task, and what splits it
_MakeJob = Callable[[RankSlots, list[Run], Event], Job[Copied]]  # of a ``PagedDevice``


class WorkerHalf:
    """One worker's share of every step. Its hooks are called by the engine's thread alone.

    * Every load of a plan is reported exactly once, whatever happens; at the latest when its
      deadline has passed and its copy has certainly stopped.
    * A hook never raises on account of a copy and never waits, but in an idle step: ``start_load``
      copies up to 16 MiB itself, ``collect`` waits up to 2 ms.
    * ``start_load`` itself copies the loads whose requests run in this step.
    * Layerwise the step that has a load ends only when the load has: ``collect`` waits for it, and
      ``wait_for_layer`` until the engine's stream, or the layer itself, can. At its deadline it is
      stopped; a copy that is under way then is waited for to its end, however long that takes.
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
        self._rank_bytes = self.geometry.rank_bytes(tokens)
        self._group_bytes = tuple(group.rank_bytes(tokens) for group in groups)
        self._group_starts = self.geometry.starts(tokens)
        self._pieces = Pieces(
            tuple(group.device_blocks(tokens) for group in groups),
            self._rank_bytes,
            has_states=self.geometry.states > 0,
        )
        self._clock = clock
        self._device: PagedDevice = _NO_DEVICE
        self._lanes = Lanes[Copied](threads=0)  # none is needed before there is a device
        self._fence: Event | None = None  # of what was launched before this step, once needed
        self._loads: dict[int, WorkerTask] = {}  # by task id, oldest first
        self._tasks_of: dict[Handle[Copied], list[WorkerTask]] = {}
        self._layer_load: LayerLoad | None = None  # of this step
        self._layer_saves: LayerSaves | None = None  # of this step
        self._unsaved: StepPlan | None = None  # of which no save has begun
        self._invalid: set[int] = set()  # device blocks of loads at once that have failed
        self._received: set[str] = set()
        self._not_received: set[str] = set()
        self._report = WorkerReport()
        self.bit: Final = 1 << settings.region.worker  # that stands for this worker in reports
        self._idle = False
        self._copy_here = False  # the loads of this step are few, and nothing else is to be done
        self.has_begun = False  # a step
        self._warn_of_load, self._warn_of_save = SeldomWarning(_log), SeldomWarning(_log)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's paged tensors; ``ConfigError`` if they are not as planned."""
        pages = pages_from_tensors(kv_caches, self.geometry, self._kv_cache_config)
        self._device = open_device(pages)
        threads, cpus = self._device.copy_threads, self._device.copy_cpus
        self._lanes = Lanes[Copied](threads=threads, cpus=cpus)

    def begin_step(self, plan: StepPlan) -> None:
        """Before the forward of *plan* is launched: its loads need not wait for that.

        Where vLLM's first model runner drafts, it calls ``wait_for_save`` in the last pipeline stage
        alone: in the others the saves of a step begin with the next.
        """
        self.has_begun = True
        if self._unsaved is not None:
            self.start_save(self._unsaved)
        self._unsaved = plan if plan.saves and not plan.idle else None
        if not plan.idle:
            self._device.step_begins()
        self._fence = self._device.fence() if plan.loads else None

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
            task = WorkerTask(
                load.task_id, load.request_id, deadline, load.device_blocks, at_once=load.at_once
            )
            self._loads[load.task_id] = task
            loads.append((task, partial(self._pieces.of_load, load)))
        if loads and self._settings.layerwise:
            self._layer_load = self._load_by_layer(loads, plan.server_id)
        else:
            for task, pieces in loads:
                self._start(task, plan.server_id, pieces, self._before_step)
        if plan.idle:
            self._start_saves(plan)

    def wait_for_layer(self, layer: str) -> None:
        """See to it that *layer* finds what this step loads (vLLM ``wait_for_layer_load``).

        What the device copies by itself its stream waits for, not this thread.
        """
        load = self._layer_load
        if not self._loads or load is None or load.handle is None:
            return
        index = load.index(layer)
        if not load.gates.wait(index, self._seconds_left()):
            self._wait_for(load.handle)
        elif (event := load.gates.event(index)) is not None:
            try:
                self._device.follow(event)
            except KVStrataError:  # the job has the same device, and will say so
                self._wait_for(load.handle)

    def save_layer(self, plan: StepPlan, layer: str) -> None:
        """Begin the plan's saves of *layer*, whose attention has run (vLLM ``save_kv_layer``).

        What they copy was computed by earlier steps, and this one leaves it alone: they run behind
        the layer so that not all of them begin at once.
        """
        if not plan.saves or not self._settings.layerwise:
            return
        if self._layer_saves is None:
            self._layer_saves = self._save_by_layer(list(self._saves_of(plan)), plan.server_id)
        self._layer_saves.start(layer)

    def start_save(self, plan: StepPlan) -> None:
        """Begin the plan's saves (vLLM ``wait_for_save``): this step's forward has written."""
        jobs, self._layer_saves, self._fence = self._layer_saves, None, None
        self._unsaved = None
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
            task = WorkerTask(save.task_id, None, float("inf"), save.device_blocks)
            yield task, partial(self._pieces_of, save)

    def refuse_saves(self, plan: StepPlan, why: str) -> None:
        """Report the plan's saves as failed: its blocks are not what they are named after."""
        self._unsaved = None
        for task, _ in self._saves_of(plan):
            self._fail(task, why)
            self._finish(task)

    def collect(self) -> tuple[set[str], set[str]]:
        """Requests whose load ended since the last call, and those of them whose load failed.

        In an idle step with a load running it waits up to 2 ms for one to end.
        """
        give_up = self._clock() + _IDLE_WAIT_SECONDS
        if (load := self._layer_load) is not None:
            if load.handle is not None:
                self._wait_for(load.handle)
            self._layer_load = None
        self._reap()
        while self._idle and self._loads and not self._received:
            if (left := give_up - self._clock()) <= 0 or not self._lanes.wait(left):
                break
            self._reap()
        received, self._received = self._received, set()
        failed, self._not_received = self._not_received, set()
        return received, failed

    def take_invalid_blocks(self) -> set[int]:
        """Device blocks of loads at once that have failed in this step, whole or in part."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def report(self) -> WorkerReport | None:
        """Tasks that ended up to the last ``collect``; None if there is nothing to say."""
        if not self._report.saved and not self._report.load_done:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def shutdown(self) -> None:
        """Stop copying; waits up to 5 s for a copy that runs."""
        if not self._lanes.close(_SHUTDOWN_SECONDS):
            _log.warning("a copy still runs %s s after shutdown", _SHUTDOWN_SECONDS)

    def bring_near(self, mapping: HostMapping) -> None:
        """Have this worker's share of *mapping* come from the NUMA node of its device.

        That is a wish: where it cannot be had memory comes from anywhere.
        """
        node, region = self._device.numa_node, self._settings.region
        if node is None or not region.saves or len(memory_nodes()) < 2:
            return
        try:
            if bring_near(mapping, region.start_bytes, self._rank_bytes, node):
                _log.info("host memory for this GPU is taken from its NUMA node, %d", node)
        except ConfigError as e:
            _log.info("host memory for this GPU is taken from any NUMA node: %s", e)

    def pin(self, mapping: HostMapping, is_over: Callable[[], bool]) -> bool:
        """Make *mapping* fast to copy from and to: takes seconds, on a thread that has them.

        Before the first step it does nothing, and returns False: while vLLM records CUDA graphs no
        thread of the process may ask the driver for memory.
        """
        if not self.has_begun:
            return False
        self._device.pin(mapping, is_over)
        return True

    def let_go(self) -> None:
        """No mapping is in use any more: what was pinned of it is to be unpinned."""
        self._device.let_go()

    def slot_pages(self) -> SlotPages:
        """How the pages of this worker lie in a slot, of a model with one KV cache group."""
        (group,), (per_slot,) = self.geometry.groups, self._pieces.per_slot
        return SlotPages(
            self._settings.region.start_bytes,
            group.page_bytes,
            per_slot,
            self._bring,
        )

    def _bring(self, rows: NDArray[np.uint8], chosen: NDArray[np.int64]) -> Any:
        """By the device that there is by then."""
        return self._device.bring(rows, chosen)

    def _start(
        self, task: WorkerTask, server_id: bytes, split: Callable[[], list[Piece]], after: Event
    ) -> None:
        """Submit *task*; if that is impossible it has failed, and is reported as any other."""
        make_job, lane = self._maker(is_save=task.is_save)
        here = task.at_once or (self._copy_here and not task.is_save)
        begin = self._lanes.run if here else self._lanes.submit
        try:
            slots = self._host_side(server_id)
            for piece in split():
                handle = begin(make_job(slots, piece.runs, after), lane)
                if handle.outcome is Outcome.REFUSED:
                    self._fail(task, problem_of(handle), len(task.jobs))
                    break
                task.jobs.append(handle)
                task.blocks.append(piece.blocks)
                self._tasks_of[handle] = [task]
        except KVStrataError as e:
            self._fail(task, e)
        task.pending = len(task.jobs)
        if task.pending == 0:
            self._finish(task)

    def _pieces_of(self, save: Save) -> list[Piece]:
        """None where another rank saves the same bytes: this one's share has ended at once."""
        return self._pieces.of_save(save) if self._settings.region.saves else []

    def _maker(self, *, is_save: bool) -> tuple[_MakeJob, Lane]:
        device = self._device
        return (device.save_job, Lane.SAVE) if is_save else (device.load_job, Lane.LOAD)

    def _load_by_layer(self, tasks: list[_Begin], server_id: bytes) -> LayerLoad:
        """One job for all layers of all *tasks*, so that no layer overtakes another."""
        layers = self.geometry.layers
        gates = LayerGates(len(layers))
        parts = self._parts(tasks, server_id)
        for task, _ in parts:
            task.pending = 1
        if not parts:
            return LayerLoad(layers, gates, None)
        load = self._device.load_layers_job([part for _, part in parts], self._before_step, gates)

        def job(handle: Handle[Copied]) -> Copied:
            try:
                return load(handle)
            finally:
                note_doubts(parts)
                gates.close()

        return LayerLoad(layers, gates, self._submit_shared(job, Lane.LOAD, parts))

    def _save_by_layer(self, tasks: list[_Begin], server_id: bytes) -> LayerSaves:
        """A job for each layer of all *tasks*, which runs behind what its layer has launched."""
        layers = self.geometry.layers
        parts = self._parts(tasks, server_id)
        # A layer of so many pieces is not more than one piece, behind which a load waits.
        batches = [parts[i : i + len(layers)] for i in range(0, len(parts), len(layers))]
        for task in {task.task_id: task for task, _ in parts}.values():
            task.pending = len(layers) * sum(any(task is t for t, _ in b) for b in batches)

        def submit(layer: int) -> None:
            launched = self._device.fence()
            for batch in batches:
                self._save_layer(layer, batch, launched)

        return LayerSaves(layers, submit)

    def _save_layer(self, layer: int, batch: Parts, after: Event) -> None:
        save = self._device.save_layer_job

        def job(handle: Handle[Copied]) -> Copied:
            for task, part in batch:
                if task.doubt is None:
                    copy_part(save(part, after, layer), part, handle)
            note_doubts(batch)
            return Copied.WHOLE

        self._submit_shared(job, Lane.SAVE, batch)

    def _parts(self, tasks: list[_Begin], server_id: bytes) -> Parts:
        """What *tasks*, which are to share jobs, copy of each layer.

        A task with nothing to copy, or that cannot be copied, has ended at once.
        """
        parts: Parts = []
        for task, split in tasks:
            task.is_shared = True
            own: Parts = []
            try:
                slots = self._host_side(server_id)
                own = [(task, Part(slots, piece.runs)) for piece in split()]
            except KVStrataError as e:
                self._fail(task, e)
            if not own:
                self._finish(task)
            parts += own
        return parts

    def _submit_shared(
        self, job: Callable[[Handle[Copied]], Copied], lane: Lane, parts: Parts
    ) -> Handle[Copied]:
        handle = self._lanes.submit(job, lane)
        tasks = list({task.task_id: task for task, _ in parts}.values())
        self._tasks_of[handle] = tasks
        for task in tasks:
            task.jobs.append(handle)
        if handle.outcome is Outcome.REFUSED:
            self._end_job(handle)
        return handle

    def _seconds_left(self) -> float:
        deadline = min((task.deadline for task in self._loads.values()), default=0.0)
        return max(0.0, deadline - self._clock())

    def _wait_for(self, handle: Handle[Copied]) -> None:
        """Until *handle* has ended; if it has not by the loads' deadline it is stopped.

        It stops between two pieces. What a device has been asked for by then nobody can take back,
        and vLLM computes into the blocks of a failed load: so the end of that, and of nothing else,
        is waited for without a deadline. A device that hangs is one for the engine, too.
        """
        if self._lanes.wait_for(handle, self._seconds_left()):
            return
        self._lanes.cancel(handle)
        if not self._lanes.wait_for(handle, _STOP_SECONDS):
            _log.warning(
                "a load still runs %s s after it was told to stop: the engine waits for it, because "
                "it would write into blocks that are computed anew",
                _STOP_SECONDS,
            )
            self._lanes.wait_for(handle)  # without a deadline: see above

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
        return RankSlots(mapping, region.start_bytes, self._group_bytes, self._group_starts)

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
            problem = problem_of(handle) if task.doubt is None else task.doubt
            if problem is not None:
                self._fail(task, problem, task.jobs.index(handle))
            if task.pending == 0:
                self._finish(task)

    def _fail(self, task: WorkerTask, problem: object, first: int = 0) -> None:
        """Mark *task* failed, once, and spare the copies that have not begun.

        Those of a save before job *first* go on: what they copy can be kept.
        """
        task.in_doubt = task.in_doubt or is_doubt(problem)
        if task.failed:
            return
        task.failed = True
        if task.is_save:
            self._warn_of_save("a save failed: %s", problem)
        else:
            self._warn_of_load("a load failed, its blocks are computed: %s", problem)
        _log.debug("task %d of request %s failed: %s", task.task_id, task.request_id, problem)
        if not task.is_shared:
            for handle in task.jobs[first if task.is_save else 0 :]:
                self._lanes.cancel(handle)

    def _finish(self, task: WorkerTask) -> None:
        """Put an ended task into the next report."""
        if task.request_id is None:
            self._report.saved[task.task_id] = self.bit
            if task.failed:
                self._report.save_failed[task.task_id] = task.whole_blocks
            return
        del self._loads[task.task_id]
        self._report.load_done[task.task_id] = self.bit
        if task.failed:
            report = self._report
            failed = report.load_failed if task.in_doubt else report.load_given_up
            failed.add(task.task_id)
        if task.at_once:  # vLLM waits for no word of it, and asks for bad blocks alone
            if task.failed:
                self._invalid |= {*task.device_blocks} - {NULL_BLOCK}
            return
        self._received.add(task.request_id)
        if task.failed:
            self._not_received.add(task.request_id)
