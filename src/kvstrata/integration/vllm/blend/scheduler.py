"""The scheduler half that blends: which reused KV a prompt takes beyond its exact prefix."""

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from kvstrata.blend.audit import Audit, Auditor
from kvstrata.blend.payoff import Payoff
from kvstrata.blend.plan import BlendPlan, Economy, ReusedRuns
from kvstrata.blend.runs import Runs
from kvstrata.core.config import Config
from kvstrata.integration.vllm.blend.learning import Learning
from kvstrata.integration.vllm.blend.lookups import RunLookup, RunSlots
from kvstrata.integration.vllm.blend.metadata import BlendConnectorMeta, BlendRequestMeta
from kvstrata.integration.vllm.blend.room import Room
from kvstrata.integration.vllm.blend.rules import layers_to_score, rule_of
from kvstrata.integration.vllm.blend.wishes import Wish, salt_of, wish_of
from kvstrata.integration.vllm.blocks import BlockIds
from kvstrata.integration.vllm.compat import CacheHitSource
from kvstrata.integration.vllm.engine_metrics import KVStrataStats
from kvstrata.integration.vllm.link import CacheLink
from kvstrata.integration.vllm.loads import STALE_SECONDS
from kvstrata.integration.vllm.metadata import StepPlan, WorkerReport, all_workers
from kvstrata.integration.vllm.scheduler import SchedulerHalf, Tracked
from kvstrata.integration.vllm.setup import EngineIdentity
from kvstrata.observe import metrics
from kvstrata.server import protocol as p

_log = logging.getLogger(__name__)

_OWN_SHARE: Final = 4  # where other prompts fill a step, blending runs this part of it besides
_FEW_TOKENS: Final = 64  # of a step that does little but decode
_PATIENCE: Final = 16  # times as long: who is asked again may wait for a step of other prompts


@dataclass(slots=True, eq=False)
class _Candidate:
    """A request beyond whose exact prefix known tokens stand."""

    wish: Wish
    first_token: int  # behind the exact prefix, as of vLLM's last question
    result: str  # a value of metrics.BLEND_REQUESTS: why it is not blended, so far
    runs: Runs | None = None  # to be asked for when it has its turn
    lookup: RunLookup | None = None  # None if blending it does not pay
    found: RunSlots | None = None
    plan: BlendPlan | None = None
    spared_tokens: float = 0.0  # of prefill, by the plan
    offered_tokens: int = 0  # to vLLM by its last question, exact ones too; 0: none to be blended

    def is_fresh(self, first_token: int, link: CacheLink, config: Config) -> bool:
        """Whether what was found still counts: it is of this server, and its leases last."""
        if self.lookup is None:
            return self.first_token == first_token
        return (
            self.first_token == first_token
            and self.lookup.connection == link.number
            and self.lookup.age_seconds <= STALE_SECONDS + config.load_timeout_seconds
        )


@dataclass(slots=True, eq=False)
class _Running:
    """A request that the workers are blending."""

    request_id: str
    task_ids: list[int]
    connection: int
    workers_left: int  # as bits
    blocks: list[KVCacheBlock]  # that it has beyond vLLM's until then
    reused_tokens: int
    spared_tokens: float  # of prefill, by the plan
    prefill_tokens: int  # that would be computed without blending
    salt: str = field(repr=False)  # a secret
    is_alone: bool  # all that its workers do meanwhile is done for it
    began_at: float  # of time.monotonic
    failed: bool = False
    audit: Audit | None = None
    is_of_before: bool = False  # the cache has been reset since


@dataclass(slots=True)
class _Stretch:
    """Blocks of a blended request with nothing reused in them, behind reused ones."""

    first: int
    end: int
    offered: int  # where the next offer begins


class BlendScheduler(SchedulerHalf):
    """``SchedulerHalf``, which offers runs of known tokens as well as exact prefixes."""

    def __init__(
        self,
        config: Config,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        *,
        altered_by: str | None = None,
    ) -> None:
        self._layers = len(kv_cache_config.kv_cache_groups[0].layer_names)
        layers_to_score(config, self._layers)  # or says which there are
        super().__init__(config, vllm_config, kv_cache_config, altered_by=altered_by)
        if config.min_match_ratio is not None:
            _log.warning(
                "min_match_ratio %g changes nothing: tokens are reused where they are equal, and "
                "computed where they are not",
                config.min_match_ratio,
            )
        (group,) = self._math.groups
        self._device_tokens = group.device_tokens
        self._step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._economy = Economy(
            min_saved_tokens=config.blend_min_saved_tokens,
            min_saved_share=config.blend_min_saved_share,
        )
        self._learning = Learning(config, self._math)
        self._candidates: dict[str, _Candidate] = {}
        self._results: dict[str, str] = {}  # of requests: values of metrics.BLEND_REQUESTS
        self._told = {"blended", "not_asked", "not_understood"}  # results that need no telling
        self._behind: dict[str, list[_Stretch]] = {}  # by request id, if ``blend_again``
        self._counted = KVStrataStats()
        self._auditor = Auditor(config.blend_audit_share, config.blend_audit_limit)
        self._payoff = Payoff()
        self._tokens_before = 0  # of the last step
        self._patient_until: float | None = None  # in this step, once one of its lookups has waited
        self._planned: list[BlendRequestMeta] = []
        self._running: dict[int, _Running] = {}  # by the first of its tasks

    def bind_block_pool(self, pool: BlockPool) -> None:
        super().bind_block_pool(pool)
        self._room = Room(pool, self._math)

    def _blocks_at_once(
        self, config: Config, vllm_config: VllmConfig, identity: EngineIdentity
    ) -> int:
        """None: a request that is blended waits, for its exact prefix too."""
        return 0

    def tainted_from(self, request: Request) -> int | None:
        """The first token of *request*'s first approximate block, if it has one."""
        return self._taints.first_token(request.request_id)

    def match(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        first_tainted = self._taints.first_token(request.request_id)
        if first_tainted is not None and computed_tokens > first_tainted:
            return 0, False  # it was preempted, and found its own approximate blocks again
        exact, is_async = super().match(request, computed_tokens)
        if exact is None:
            return None, False
        tokens = self._match_runs(request, computed_tokens + exact)
        if tokens and not self._has_room(request, computed_tokens):
            tokens = 0
        self._candidates[request.request_id].offered_tokens = exact + tokens if tokens else 0
        if tokens == 0:
            return exact, is_async
        return (None, False) if tokens is None else (exact + tokens, True)

    def _match_runs(self, request: Request, first_token: int) -> int | None:
        """Tokens from *first_token* on that can be blended; None to be asked again."""
        candidate = self._candidates.get(request.request_id)
        if candidate is None or not candidate.is_fresh(first_token, self._link, self._config):
            self._drop(request)
            candidate = self._candidate(request, first_token)
            self._candidates[request.request_id] = candidate
        if candidate.runs is not None:
            if not self._loads.may_ask(len(candidate.runs.keys)):
                return None
            candidate.lookup = self._ask(request, candidate.runs)
            candidate.runs = None
        lookup = candidate.lookup
        if lookup is None:
            return 0
        if candidate.plan is None:
            self._link.hear(lambda: lookup.is_answered, self._wait_until(lookup))
            if not lookup.is_settled(self._config):
                self._loads.waits()
                return None
            if lookup.is_silent:
                self._link.too_slow()
            self._settle(request, candidate, lookup)
        return 0 if candidate.plan is None else candidate.plan.end - first_token

    def _wait_until(self, lookup: RunLookup) -> float:
        """When *lookup* is to be asked again: those of a step are waited for as long as one, and little more."""
        patience_seconds = self._wait_seconds(_PATIENCE)
        if self._patient_until is None:
            self._patient_until = time.monotonic() + patience_seconds
        longest = min(self._patient_until, lookup.sent_at + patience_seconds)
        return max(longest, lookup.sent_at + self._lookup_wait_seconds)

    def _has_room(self, request: Request, computed_tokens: int) -> bool:
        """Whether what *request*'s plan needs is reserved; if not, it is computed as ever."""
        candidate = self._candidates[request.request_id]
        assert candidate.plan is not None
        if self._room.reserve(request, candidate.plan, computed_tokens):
            return True
        self._drop(request)
        self._candidates[request.request_id] = _Candidate(
            candidate.wish, candidate.first_token, "no_room"
        )
        return False

    def _candidate(self, request: Request, first_token: int) -> _Candidate:
        wish = wish_of(request, self._config)
        obstacle = self._obstacle(request, wish, first_token)
        if obstacle is not None:
            return _Candidate(wish, first_token, obstacle)
        candidate = _Candidate(wish, first_token, "no_run")
        runs = self._learning.runs(request, self._namespace, first_token)
        reused = ReusedRuns(runs.start, runs.length, runs.delta, np.zeros(len(runs), np.bool_))
        if self._pays(candidate, self._plan(request, reused, first_token)):
            candidate.runs = runs
        return candidate

    def _ask(self, request: Request, runs: Runs) -> RunLookup:
        saving = self._saves.under_way()
        return RunLookup(
            self._link, self._loads.ahead, self._namespace, runs, request.request_id, saving
        )

    def _obstacle(self, request: Request, wish: Wish, first_token: int) -> str | None:
        """Why *request* is not blended, whatever is known of its tokens."""
        if wish.refused is not None:
            return wish.refused
        if self._taints.first_token(request.request_id) is not None:
            return "tainted"
        if self._results.get(request.request_id) == "failed":
            return "failed"
        if self._auditor.has_failed(salt_of(request)):
            return "switched_off"
        if first_token >= request.num_prompt_tokens - 1:
            return "no_run"
        prefill_tokens = request.num_prompt_tokens - first_token
        if self._economy.is_hopeless(prefill_tokens):
            return "few_tokens"
        if not self._config.blend_if_slower and self._payoff.refuses(prefill_tokens):
            return "slower"
        return None if self._link.ready else "no_server"

    def _settle(self, request: Request, candidate: _Candidate, lookup: RunLookup) -> None:
        found = lookup.found()
        self._learning.lost(found.missing)
        reused = ReusedRuns(
            found.start, found.length, found.delta, np.zeros(len(found.start), np.bool_)
        )
        plan = self._plan(request, reused, candidate.first_token)
        if not self._pays(candidate, plan):
            lookup.abandon()
            candidate.lookup = None
            return
        candidate.found, candidate.plan = found, plan
        if plan.taint_from is not None:
            self._taints.taint(request, plan.taint_from)

    def allocated(
        self, request: Request, block_ids: Callable[[], BlockIds], external_tokens: int
    ) -> None:
        candidate = self._candidates.get(request.request_id)
        plan = None if candidate is None else candidate.plan
        if (
            candidate is None
            or plan is None
            or not candidate.offered_tokens
            or external_tokens != candidate.offered_tokens
        ):
            if candidate is not None:
                self._results.setdefault(request.request_id, candidate.result)
            self._drop(request)
            super().allocated(request, block_ids, external_tokens)
            return
        exact = external_tokens - (plan.end - plan.exact_end)
        (theirs,) = block_ids()
        device_blocks, held = self._room.take(request.request_id, theirs)
        super().allocated(request, lambda: (device_blocks,), exact)
        del self._candidates[request.request_id]
        self._begin(request, candidate, plan, device_blocks, held, loaded_tokens=exact)

    def plan(self, output: SchedulerOutput) -> StepPlan:
        self._patient_until = None
        self._room.release()
        self._learning.catch_up()  # of the step before: what this one offers does not hold it up
        step = super().plan(output)
        requests, self._planned = self._planned, []
        if requests or self._running:
            left = self._step_tokens - output.total_num_scheduled_tokens
            most_run = max(1, self._step_tokens // _OWN_SHARE, left)
            step.blend = BlendConnectorMeta(requests, self._step_tokens, most_run)
        self._tokens_before = output.total_num_scheduled_tokens
        if len(self._running) > 1 or self._tokens_before > _FEW_TOKENS:
            for running in self._running.values():
                running.is_alone = False
        return step

    def _tell_rate(self, output: SchedulerOutput, *, is_pure: bool) -> None:
        """Of a step that blends, vLLM has not scheduled all that it computes."""
        super()._tell_rate(output, is_pure=is_pure and not self._running)

    def worker_report(self, report: WorkerReport) -> None:
        super().worker_report(report)
        for name, workers in report.load_done.items():
            running = self._running.get(name)
            if running is None:
                continue
            running.workers_left &= ~workers
            running.failed = running.failed or name in report.load_failed
            running.audit = report.audits.get(name, running.audit)
            if not running.workers_left:
                del self._running[name]
                self._end(running)

    def _end(self, running: _Running) -> None:
        """No worker blends the request any more."""
        self._room.give_back(running.blocks)
        tracked = self._requests.get(running.request_id)
        if running.connection == self._link.number:  # whatever failed, the blocks are good
            if running.failed and tracked is not None:  # and nobody has aborted it
                self._link.submit(p.Cancel(running.task_ids))
            self._link.submit(p.Complete(running.task_ids))
        if running.audit is not None and not running.is_of_before:
            self._judge(running, running.audit)
        if not running.failed:
            self._measure(running)
            spared = round(running.spared_tokens)
            self._counted.add_counter(metrics.BLEND_TOKENS, ("reused",), running.reused_tokens)
            self._counted.add_counter(metrics.BLEND_TOKENS, ("spared",), spared)
            return
        self._behind.pop(running.request_id, None)
        if tracked is not None:
            self._results[running.request_id] = "failed"
            self._taints.lift(tracked.request)

    def _measure(self, running: _Running) -> None:
        """Note what it took, if that and what a prefill would take are known."""
        rate = self._rate.tokens_per_second
        if rate is not None and running.is_alone and running.audit is None:
            seconds = time.monotonic() - running.began_at
            self._payoff.took(running.prefill_tokens, seconds, running.prefill_tokens / rate)

    def _judge(self, running: _Running, audit: Audit) -> None:
        self._counted.add_counter(metrics.BLEND_AUDITS, ("same" if audit.agrees else "other",), 1)
        self._counted.add_counter(metrics.BLEND_DIVERGENCE, (), audit.divergence)
        failure = self._auditor.add(running.salt, audit)
        self._counted.set_gauge(metrics.BLEND_OFF, (), self._auditor.failed_salts)
        if failure is None:
            return
        whose = (
            f"the cache_salt of request {running.request_id}" if running.salt else "no cache_salt"
        )
        _log.warning(
            "requests with %s are not blended any more: first tokens of those that were audited diverge "
            "by %.3g nats on average, blend_audit_limit is %g; compute more anew (recompute_ratio), and "
            "reset the cache or restart to blend them again",
            "a cache_salt that has had few audits" if failure.is_common else whose,
            failure.divergence,
            self._config.blend_audit_limit,
        )

    def finished(self, request: Request, block_ids: BlockIds) -> None:
        tracked = self._requests.get(request.request_id)
        is_running = any(e.request_id == request.request_id for e in self._running.values())
        if tracked is not None and is_running:
            # vLLM counts tokens as computed that the workers have yet to compute.
            tracked.offered_blocks = sys.maxsize
        super().finished(request, block_ids)
        self._learning.finished(request.request_id)
        self._behind.pop(request.request_id, None)
        self._drop(request)
        if (result := self._results.pop(request.request_id, None)) is not None:
            self._counted.add_counter(metrics.BLEND_REQUESTS, (result,), 1)
            self._tell(request, result)

    def _tell(self, request: Request, result: str) -> None:
        """Of those that asked in vain, the first for each reason, which may be all for the same."""
        if result in self._told:
            _log.debug("request %s: blending: %s", request.request_id, result)
            return
        self._told.add(result)
        _log.info(
            "request %s asked to be blended and was not: %s; more of them are told at level DEBUG "
            "and counted in %s",
            request.request_id,
            result,
            metrics.BLEND_REQUESTS.name,
        )

    def not_loaded(self, device_blocks: set[int]) -> None:
        self._behind.clear()  # what stands on blocks that were not loaded is not told from the rest
        super().not_loaded(device_blocks)

    @property
    def holds_blocks(self) -> bool:
        return super().holds_blocks or self._room.is_held

    @property
    def busy(self) -> bool:
        """vLLM takes what was counted at the end of a request in a later step."""
        return super().busy or not self._counted.is_empty()

    def take_stats(self) -> KVStrataStats | None:
        found = super().take_stats() or KVStrataStats()
        found.aggregate(self._counted)
        self._counted.reset()
        return None if found.is_empty() else found

    def reset(self) -> None:
        super().reset()
        self._learning.clear()
        self._auditor.begin_again()
        for running in self._running.values():
            running.is_of_before = True
        self._counted.set_gauge(metrics.BLEND_OFF, (), 0)
        for tracked in self._requests.values():
            self._drop(tracked.request)

    def _offer(
        self, tracked: Tracked, computed_tokens: int, block_ids: Callable[[], BlockIds]
    ) -> None:
        """Blocks are saved up to the first approximate one, and what is saved can be reused."""
        before = tracked.offered_blocks
        super()._offer(tracked, computed_tokens, block_ids)
        if before != sys.maxsize:
            request, end = tracked.request, tracked.offered_blocks
            self._learning.saved(request, self._namespace, before, end)
            self._offer_behind(request, computed_tokens, block_ids)

    def _offer_behind(
        self, request: Request, computed_tokens: int, block_ids: Callable[[], BlockIds]
    ) -> None:
        """Under the private names of *request*, which only later blended requests learn of.

        No KV event tells of them: they are not what their tokens say.
        """
        stretches = self._behind.get(request.request_id, [])
        known = min(computed_tokens // self._math.tokens, self._math.known_blocks(request))
        due = [each for each in stretches if each.offered < min(each.end, known)]
        if not due or not (ids := block_ids()):
            return
        for each in due:
            end = min(each.end, known)
            while each.offered < end and not self._math.has_all(ids, each.offered):
                each.first = each.offered = each.offered + 1  # out of a window by now
            before = each.offered
            each.offered = self._saves.offer(
                request, self._namespace, ids, before, end, begins=before == each.first
            )
            self._learning.saved(request, self._namespace, before, each.offered, each.first)

    def _plan(self, request: Request, runs: ReusedRuns, first_token: int) -> BlendPlan:
        return BlendPlan.of_runs(
            runs,
            prompt_tokens=request.num_prompt_tokens,
            block_tokens=self._device_tokens,
            exact_end=first_token,
        )

    def _pays(self, candidate: _Candidate, plan: BlendPlan) -> bool:
        rule = rule_of(self._config, candidate.wish.ratio, self._layers)
        decision = self._economy.decide(plan, rule.work_tokens(plan))
        candidate.result = "failed" if decision.blend else decision.reason.value
        candidate.spared_tokens = decision.saved_tokens
        return decision.blend

    def _begin(
        self,
        request: Request,
        candidate: _Candidate,
        plan: BlendPlan,
        device_blocks: list[int],
        held: list[KVCacheBlock],
        *,
        loaded_tokens: int,
    ) -> None:
        """*loaded_tokens* of the exact prefix are loaded, and those before them are on the device."""
        found, lookup = candidate.found, candidate.lookup
        assert found is not None
        assert lookup is not None
        lookup.abandon(but=found.task_ids)
        self._link.submit(p.Launch(found.task_ids))
        on_device = device_blocks[: (plan.exact_end - loaded_tokens) // self._device_tokens]
        clipped = plan.runs.start - found.start[plan.origin]
        # vLLM gives out blocks that another request computes in the step that it plans.
        awaits_step = self._room.is_shared(on_device)
        self._planned.append(
            BlendRequestMeta(
                request.request_id,
                found.task_ids,
                np.array(request.prompt_token_ids, np.int32),
                np.array(device_blocks[: plan.end // self._device_tokens], np.int32),
                plan,
                found.slots,
                found.generations,
                found.first_row[plan.origin] + clipped,
                candidate.wish.ratio,
                self._auditor.wants_next(),
                awaits_load=loaded_tokens > 0,
                awaits_step=awaits_step,
            )
        )
        reused = int(plan.runs.length.sum())
        self._running[found.task_ids[0]] = _Running(
            request.request_id,
            found.task_ids,
            self._link.number,
            all_workers(self._world_size),
            held,
            reused,
            candidate.spared_tokens,
            plan.end - plan.exact_end,
            salt_of(request),
            not awaits_step and self._is_alone(plan, loaded_tokens),
            time.monotonic(),
        )
        self._results[request.request_id] = "blended"
        if self._config.blend_again:
            self._behind[request.request_id] = self._stretches(plan)
        self._loads.add_source(request, CacheHitSource.HOST, plan.end - plan.exact_end)
        _log.debug(
            "request %s: blending %d tokens in %d runs, up to %d",
            request.request_id,
            reused,
            len(plan.runs.start),
            plan.end,
        )

    def _stretches(self, plan: BlendPlan) -> list[_Stretch]:
        """What is new between the runs of *plan*, if it can be found again, and all behind them."""
        tokens = self._math.tokens
        whole = [(-(-start // tokens), end // tokens) for start, end in plan.gaps_between]
        whole = [(first, end) for first, end in whole if self._learning.can_find(end - first)]
        whole.append((-(-plan.asking_from // tokens), sys.maxsize))
        return [_Stretch(first, end, first) for first, end in whole]

    def _is_alone(self, plan: BlendPlan, loaded_tokens: int) -> bool:
        """Whether what begins now waits for little else before it is blended."""
        # To load as many tokens takes far less time than to compute them.
        is_little = loaded_tokens <= plan.end - plan.exact_end
        return is_little and self._tokens_before <= _FEW_TOKENS

    def _drop(self, request: Request) -> None:
        """*request* is not blended as was planned, if anything was."""
        candidate = self._candidates.pop(request.request_id, None)
        if candidate is None:
            return
        if candidate.lookup is not None:
            candidate.lookup.abandon()
        if candidate.plan is not None:
            self._taints.lift(request)
