"""A worker's share of blending: reused KV moved to its new places, chosen tokens computed.

All ranks get the same requests in the same order and take the same steps, since each forward of
the model is a collective. Where one rank has a doubt, all give the request up together, before the
next forward. A forward that dies on one rank, within the model's collectives, is vLLM's: the others
wait in it, as they would in a step of the engine.
"""

import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from vllm.distributed.parallel_state import GroupCoordinator

from kvstrata.blend.audit import Audit, compare
from kvstrata.blend.position import PositionCorrector
from kvstrata.blend.selection import (
    Recompute,
    Rule,
    Scores,
    Selection,
    Step,
    one_step,
    same_kind,
    split,
)
from kvstrata.core.errors import InvariantViolated
from kvstrata.integration.vllm.blend.metadata import BlendRequestMeta
from kvstrata.integration.vllm.blend.moves import TokenMoves
from kvstrata.integration.vllm.blend.nested import slots_of
from kvstrata.integration.vllm.blend.pages import TokenPages
from kvstrata.integration.vllm.blend.scorer import Prompt, StepRunner
from kvstrata.integration.vllm.blend.slots import SlotPages, check_generations, current
from kvstrata.integration.vllm.metadata import NULL_BLOCK
from kvstrata.storage.mapping import HostMapping

__all__ = ["BlendWorker", "Ended"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ended:
    """A request whose blending is over; if not *whole*, it is to be computed."""

    request_id: str
    task_ids: list[int]
    whole: bool
    audit: Audit | None = None  # if it was audited, and this rank has the logits


class _Stage(enum.Enum):
    """What a request goes through; only an audited one has all of it."""

    EXACT = enum.auto()  # all of the prompt is computed, to compare with
    REUSE = enum.auto()  # reused KV is written over that, and some of it computed
    CHECK = enum.auto()  # the end of the prompt is computed with what is there now
    OVER = enum.auto()


@dataclass(slots=True, eq=False)
class _Job:
    request: BlendRequestMeta
    server_id: bytes
    prompt: Prompt
    is_loaded: bool  # its exact prefix, on this rank
    awaits_load: bool  # on any rank, when they last agreed
    awaits_step: bool  # until the step in which it came is over
    stage: _Stage
    moved_tokens: int = 0  # of its runs, the first ones
    selection: Selection | None = None  # what this stage runs, once it has begun
    scores: Scores | None = None  # of the part of a split step that has been run
    failed: bool = False
    exact: Scores | None = None  # logits of the first token
    audit: Audit | None = None

    @property
    def step(self) -> Step | None:
        return None if self.selection is None else self.selection.step

    @property
    def can_begin(self) -> bool:
        waits = self.awaits_load or self.awaits_step or self.failed or self.stage is _Stage.OVER
        return self.selection is None and not waits

    @property
    def is_over(self) -> bool:
        """Never while its exact prefix is being written: then its device blocks are not free."""
        return not self.awaits_load and (self.failed or self.stage is _Stage.OVER)

    def from_token(self, first: int) -> Selection:
        """The rest of the prompt, computed by all that is in place before it."""
        return one_step(Recompute(np.arange(first, len(self.prompt.tokens))))


class BlendWorker:
    """Runs the blended requests of this worker, oldest first. For the engine's thread alone."""

    def __init__(
        self,
        layers: Sequence[TokenPages],
        correctors: Sequence[PositionCorrector],
        source: SlotPages,
        runner: StepRunner,
        rule: Callable[[float], Rule],
        ranks: GroupCoordinator,
    ) -> None:
        """*layers* and *correctors*: of each attention layer; *rule*: of a ratio."""
        self._layers = layers
        self._correctors = correctors
        self._source = source
        self._runner = runner
        self._rule = rule
        self._ranks = ranks
        self._jobs: list[_Job] = []

    def begin(self, request: BlendRequestMeta, server_id: bytes) -> None:
        blocks = np.append(request.device_blocks, np.int32(NULL_BLOCK))
        prompt = Prompt(torch.from_numpy(request.tokens), torch.from_numpy(blocks))
        stage = _Stage.EXACT if request.is_audited else _Stage.REUSE
        awaits = request.awaits_load
        self._jobs.append(
            _Job(request, server_id, prompt, not awaits, awaits, request.awaits_step, stage)
        )

    def loaded(self, request_id: str, *, whole: bool) -> bool:
        """The exact prefix of the request is in place, or not; whether it is one to blend."""
        for job in self._jobs:
            if job.request.request_id == request_id:
                job.is_loaded = True
                job.failed = job.failed or not whole
                return True
        return False

    def finished(self, request_ids: set[str]) -> None:
        """vLLM has no use for these any more, and tells all ranks so in the same step."""
        for job in self._jobs:
            job.failed = job.failed or job.request.request_id in request_ids

    def advance(self, mapping: HostMapping | None, to_move: int, to_run: int) -> list[Ended]:
        """Move up to *to_move* tokens, and run up to *to_run*; what has ended by that.

        A token that is run up to a layer counts as the share of the layers that it goes through.
        """
        self._agree()
        for job in self._jobs:
            if job.can_begin:
                to_move -= self._begin_stage(job, mapping, to_move)
        self._agree()
        budget = to_run * self._runner.layers
        while budget >= self._runner.layers and (batch := self._batch(budget)):
            budget -= self._run(batch, budget)
            self._agree()
        for job in self._jobs:
            job.awaits_step = False  # the next call comes in the next step
        over = [job for job in self._jobs if job.is_over]
        self._jobs = [job for job in self._jobs if not job.is_over]
        return [
            Ended(j.request.request_id, j.request.task_ids, not j.failed, j.audit) for j in over
        ]

    def _agree(self) -> None:
        """A request waits while it waits on any rank, and has failed if it has on any."""
        if not self._jobs:
            return
        flags = torch.tensor([[not job.is_loaded, job.failed] for job in self._jobs]).int()
        if self._ranks.world_size > 1:
            torch.distributed.all_reduce(
                flags, torch.distributed.ReduceOp.MAX, group=self._ranks.cpu_group
            )
        for job, (awaits, failed) in zip(self._jobs, flags.bool().tolist(), strict=True):
            job.awaits_load, job.failed = awaits, failed

    def _begin_stage(self, job: _Job, mapping: HostMapping | None, budget_tokens: int) -> int:
        """Move what *job* reuses, then choose its first step; how many tokens were moved."""
        request = job.request
        if job.stage is _Stage.EXACT:
            job.selection = job.from_token(request.plan.exact_end)
            return 0
        first, all_tokens = job.moved_tokens, int(request.plan.runs.length.sum())
        job.moved_tokens = min(first + budget_tokens, all_tokens)
        try:
            if job.moved_tokens > first:
                mapped = current(mapping, job.server_id)
                check_generations(mapped, request.slots, request.generations)
                self._move(job, mapped, slice(first, job.moved_tokens))
                check_generations(mapped, request.slots, request.generations)
            if job.moved_tokens == all_tokens:
                rule = self._rule(request.ratio)
                job.selection = rule.select(request.plan, len(request.tokens))
        except Exception as e:  # noqa: BLE001 - whatever is wrong costs a recompute, not the engine
            self._give_up(job, e)
        self._end_stage(job)
        return job.moved_tokens - first

    def _end_stage(self, job: _Job) -> None:
        """Go on to the next stage, if nothing is left to be run in this one."""
        if job.selection is None or job.step is not None:
            return
        if job.stage is _Stage.EXACT:
            job.stage, job.selection = _Stage.REUSE, None
        elif job.stage is _Stage.REUSE and job.request.is_audited:
            job.stage, job.selection = _Stage.CHECK, job.from_token(job.request.plan.end)
        else:
            job.stage, job.selection = _Stage.OVER, None

    def _move(self, job: _Job, mapping: HostMapping, part: slice) -> None:
        """*part* of the tokens in runs, from their slots to their places in the cache."""
        request, block_tokens = job.request, self._layers[0].tokens
        start, length, delta, _ = request.plan.runs
        first_block = request.plan.exact_end // block_tokens
        if (request.device_blocks[first_block:] == NULL_BLOCK).any():
            raise InvariantViolated("a token to be blended has no place in the cache")
        targets = request.plan.runs.tokens()[part]
        sources = targets - np.repeat(delta, length)[part]
        rows = targets - np.repeat(start - request.first_row, length)[part]
        places = slots_of(torch.from_numpy(targets), job.prompt.device_blocks, block_tokens)
        per_slot, device = self._source.per_slot * block_tokens, self._layers[0].device
        at = rows // per_slot
        edges = np.unique(np.searchsorted(at, range(at[0], at[-1] + 1, self._source.most_slots)))
        for some in map(slice, edges, (*edges[1:], len(at))):
            slots = request.slots[at[some][0] : at[some][-1] + 1]
            chosen = rows[some] - at[some][0] * per_slot
            moves = TokenMoves(chosen, places[some], sources[some], targets[some], device)
            pages = self._source.layers(mapping, slots)
            for layer, corrector, each in zip(self._layers, self._correctors, pages, strict=True):
                layer.move(each, moves, corrector)

    def _batch(self, budget: int) -> list[tuple[_Job, Step]]:
        """The next steps that make the next forward.

        Of the oldest requests whose steps fill the *budget*, in tokens times layers, first those that have yet to
        choose: what they choose then goes through the model together.
        """
        due: list[tuple[_Job, Step]] = []
        work = 0
        for job in sorted(self._jobs, key=lambda job: job.scores is None):  # split steps go on
            if (step := job.step) is not None and not job.failed and work < budget:
                due.append((job, step))
                work += self._runner.layers_of(step) * len(step.positions)
        if due and due[0][0].scores is None:
            due.sort(key=lambda entry: isinstance(entry[1], Recompute))
        batch = due[:1]
        for entry in due[1:]:
            if self._can_join(batch, entry):
                batch.append(entry)
        return batch

    def _can_join(self, batch: Sequence[tuple[_Job, Step]], entry: tuple[_Job, Step]) -> bool:
        """All write what is behind their last device block into the same one: one at a time."""
        if any(job.stage is not _Stage.REUSE for job, _ in (*batch, entry)):
            return False
        if not same_kind(batch[0][1], entry[1]):
            return False
        return not (self._uses_scratch(entry) and any(map(self._uses_scratch, batch)))

    def _uses_scratch(self, entry: tuple[_Job, Step]) -> bool:
        job, step = entry
        allocated: int = len(job.request.device_blocks) * self._layers[0].tokens
        return int(step.positions[-1]) >= allocated

    def _run(self, batch: Sequence[tuple[_Job, Step]], budget: int) -> int:
        """Run the steps of *batch*, but what is too much for the *budget*; how much of it that took."""
        layers = self._runner.layers_of(batch[0][1])
        most = left = min(self._runner.most_tokens, budget // layers)
        jobs, halves = [], []
        for job, step in batch:
            if left:
                jobs.append(job)
                halves.append(split(step, left))
                left -= len(halves[-1][0].positions)
        try:
            (step, rest), *_ = halves
            if rest is None and jobs[0].stage is not _Stage.REUSE:
                self._predict(jobs[0], step)
            else:
                found = self._runner.run([job.prompt for job in jobs], [head for head, _ in halves])
                for job, scores, (_, rest) in zip(jobs, found, halves, strict=True):
                    self._take(job, scores, rest)
        except Exception as e:  # noqa: BLE001 - as in _begin_stage
            for job in jobs:
                self._give_up(job, e)
        else:
            for job in jobs:
                self._end_stage(job)
        return layers * (most - left)

    @staticmethod
    def _take(job: _Job, scores: Scores, rest: Step | None) -> None:
        """A step of *job* has been run, but for *rest*."""
        assert job.selection is not None
        if job.scores is not None:
            scores = np.maximum(scores, job.scores)
        if rest is None:
            job.scores = None
            job.selection.advance(scores)
        else:
            job.scores = scores
            job.selection.step = rest

    def _predict(self, job: _Job, step: Step) -> None:
        """Compute the end of the prompt, and look at what the model would say next."""
        assert job.selection is not None
        logits = self._runner.predict(job.prompt, step.positions)
        if job.stage is _Stage.EXACT:
            job.exact = logits
        elif logits is not None and job.exact is not None:
            job.audit = compare(job.exact, logits)
        job.scores = None
        job.selection.advance()

    def _give_up(self, job: _Job, problem: Exception) -> None:
        job.failed = True
        _log.warning("request %s is not blended: %s", job.request.request_id, problem)
