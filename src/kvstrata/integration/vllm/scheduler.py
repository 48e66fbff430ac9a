"""The scheduler half: decides what is loaded and saved, and never copies."""

import logging
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from blake3 import blake3
from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus

from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError, ServerUnavailable
from kvstrata.core.types import EXACT, NAMESPACE_ID_BYTES, BlockFormat, NamespaceId
from kvstrata.integration.vllm.at_once import blocks_at_once
from kvstrata.integration.vllm.blocks import BlockIds, HeldBlocks
from kvstrata.integration.vllm.compat import CacheHitSource, placeholders
from kvstrata.integration.vllm.due import DueRequests
from kvstrata.integration.vllm.engine_metrics import KVStrataStats
from kvstrata.integration.vllm.events import kv_events
from kvstrata.integration.vllm.fingerprint import NamespaceFingerprint, namespace_id
from kvstrata.integration.vllm.layerwise import Admitted, standing_on, take_back
from kvstrata.integration.vllm.link import CacheLink
from kvstrata.integration.vllm.loads import Loads
from kvstrata.integration.vllm.metadata import StepPlan, WorkerReport
from kvstrata.integration.vllm.meter import Meter
from kvstrata.integration.vllm.prefill_rate import PrefillRate
from kvstrata.integration.vllm.recurrent import states_of_step
from kvstrata.integration.vllm.saves import Saves, name_of_state
from kvstrata.integration.vllm.setup import EngineIdentity
from kvstrata.integration.vllm.spans import spans_of
from kvstrata.integration.vllm.taint import TaintChain
from kvstrata.server import protocol as p
from kvstrata.server.embedded import EmbeddedServer

_log = logging.getLogger(__name__)

_GIVE_WAY_SECONDS: Final = 0.001  # as long as vLLM after a step that computes nothing
_ALONE: Final = 4  # times as long: a step that runs nothing takes 2 to 3 ms
_NOBODY: Final[Sequence[Admitted]] = ()


@dataclass(slots=True)
class Tracked:
    """A request between ``on_new_request`` and its end."""

    request: Request
    offered_blocks: int = 0  # leading blocks that are offered, loaded from us, or in the cache


class SchedulerHalf:
    """Hooks of vLLM's scheduler. None of them waits, but ``match`` for a moment, or raises."""

    def __init__(
        self,
        config: Config,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        *,
        altered_by: str | None = None,
    ) -> None:
        """Start or find the server; raises ``ConfigError`` if this engine cannot be served.

        ``altered_by`` says what makes of this model's blocks others; engines share them where it
        is equal.

        A server that is not there is no error: the engine runs without a cache until it comes.
        """
        identity = EngineIdentity.of(config, vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._config = config
        self._loads_wanted = transfer.is_kv_consumer
        self._saves_wanted = transfer.is_kv_producer
        self._world_size = identity.world_size
        self._math = identity.math
        fingerprint = namespace_id(
            vllm_config,
            kv_cache_config,
            identity.geometry,
            identity.tokens_per_block,
            config.weights_fingerprint,
        )
        if config.lasting_tiers and fingerprint.persistent_problem:
            refused = config.lasting_tiers[0].kind
            raise ConfigError(f"the {refused} tier is refused: {fingerprint.persistent_problem}")
        self._base, self._parts = _kept_apart(fingerprint, identity.block_format, altered_by)
        self._namespace = self._base
        self._requests: dict[str, Tracked] = {}
        self._taints = TaintChain(self._math)
        self._due = DueRequests()
        self._admitted: list[Admitted] = []  # to the step being scheduled
        ahead = _steps_ahead(vllm_config)
        self._is_ahead = ahead > 0
        self._in_steps = deque[Sequence[Admitted]](maxlen=1 + ahead)  # to those steps
        self._has_ended = False  # some request, since a step that computed nothing
        self._parked: set[str] = set()  # requests that wait for a load, of whatever connector
        self._rate = PrefillRate(ahead)
        self._rate_told_to = 0  # the connection
        self._spans = spans_of(config)
        self._link = _line_to_server(config, identity, persistent=fingerprint.persistent_ok)
        self._link.register(self._namespace, self._parts)
        self._events = kv_events(vllm_config, kv_cache_config, self._math, self._link)
        if self._events is not None:
            self._events.follow(self._namespace)
        self._meter = Meter(config, self._link)
        self._loads = Loads(
            config,
            identity,
            self._link,
            self._taints,
            blocks_at_once=self._blocks_at_once(config, vllm_config, identity),
            spans=self._spans,
        )
        try:
            self._link.connect(config.start_timeout_seconds)
        except ServerUnavailable as e:
            _log.warning("%s: going on without a cache until it is there", e)
        self._warn_of_policy(transfer.kv_load_failure_policy)

    def _blocks_at_once(
        self, config: Config, vllm_config: VllmConfig, identity: EngineIdentity
    ) -> int:
        return blocks_at_once(config, vllm_config, identity.geometry, identity.block_bytes)

    def bind_block_pool(self, pool: BlockPool) -> None:
        self._pool = pool
        self._saves = Saves(
            self._config,
            self._math,
            self._link,
            HeldBlocks(pool, max(self._config.max_saving_blocks, self._math.most_held_at_once)),
            world_size=self._world_size,
            spans=self._spans,
        )

    def on_new_request(self, request: Request) -> None:
        self._link.tick()
        self._requests[request.request_id] = Tracked(request)
        self._taints.receive(request)
        if self._loads_wanted:
            self._loads.expect(request, self._namespace, self._pool)

    def match(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """``get_num_new_matched_tokens``: loads are asynchronous, or of this step."""
        if not self._loads_wanted:
            return 0, False
        tokens = self._loads.match(
            request, self._namespace, computed_tokens, self._lookup_wait_seconds
        )
        return tokens, bool(tokens) and not self._loads.runs_at_once(request)

    @property
    def _lookup_wait_seconds(self) -> float:
        """What an answer is worth waiting for: less where other requests could run meanwhile."""
        return self._wait_seconds(_ALONE if len(self._requests) <= 1 else 1)

    def _wait_seconds(self, times: int) -> float:
        """So many *times* ``lookup_wait_seconds``, and never longer than an answer counts."""
        config = self._config
        return min(times * config.lookup_wait_seconds, config.lookup_timeout_seconds)

    def allocated(
        self, request: Request, block_ids: Callable[[], BlockIds], external_tokens: int
    ) -> None:
        """``update_state_after_alloc``."""
        self._admitted.append(Admitted(request, block_ids))
        if self._saves_wanted:
            self._due.look(request.request_id)
        self._saves.doubt(self._loads.not_found(request))
        keys = self._loads.plan(request, block_ids, external_tokens)
        if keys:
            self._saves.know(keys)
            if self._math.recurrent:
                self._saves.know([name_of_state(keys[-1])])

    def hit_sources(self, request: Request) -> dict[CacheHitSource, int]:
        return self._loads.take_sources(request.request_id)

    def give_way(self) -> None:
        """Before the ``plan`` of a step that computes nothing: let vLLM send the last tokens first.

        It sends them on a thread of its own, which needs the interpreter, and goes on stepping.
        """
        if self._has_ended and not self._requests:
            time.sleep(_GIVE_WAY_SECONDS)
        self._has_ended = False

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """``build_connector_meta``: what the workers copy in this step."""
        # What is planned so far names slots of this server; the next tick may bring another one.
        server_id, loads = self._link.server_id, self._loads.take_plans()
        self._in_steps.append(self._admitted or _NOBODY)
        if self._admitted or self._parked:
            self._see_admitted(output)
        self._link.glance()
        self._tell_rate(output, is_pure=not (loads and any(load.at_once for load in loads)))
        if self._saves_wanted:
            self._offer_completed(output)
            if self._math.recurrent and output.kv_connector_block_state is not None:
                self._offer_states(output.kv_connector_block_state)
        saves, idle = self._saves.take_plans(), output.total_num_scheduled_tokens == 0
        self._meter.step(is_idle=idle and not loads and not self._saves.busy)
        self._link.send_told()
        return StepPlan(server_id, loads, saves, idle=idle)

    def worker_report(self, report: WorkerReport) -> None:
        self._saves.doubt(self._loads.ended(report))
        saved = self._saves.ended(report.saved, report.save_failed)
        if self._events is not None:
            self._events.expect(saved)
        if not self._requests:
            # No step need follow but to tell, and another engine may be asked for this next.
            self._link.poll(0.0)

    def not_loaded(self, device_blocks: set[int]) -> None:
        """The last step's forward may have used *device_blocks*, which some load did not fill.

        Then nothing may stand on what it made of them. vLLM computes them again, and what comes
        after them, in place. Until then it would give them to others, and we would save them.
        """
        admitted = [each for step in self._in_steps for each in step]
        if not (standing := standing_on(admitted, device_blocks)):
            return
        self._pool.evict_blocks({block.block_id for block in self._pool.blocks})
        if self._is_ahead:
            # Not our load, which would have been waited for. Another step has been planned on it.
            self._saves.reset()
            for each in standing:
                self._never_save(each.request)
            return
        take_back(standing, self._math.groups[0].device_tokens)
        self._saves.withdraw_offers()
        for request_id, tracked in self._requests.items():
            if tracked.offered_blocks != sys.maxsize:
                tracked.offered_blocks = 0
                if self._saves_wanted:
                    self._due.look(request_id)

    def finished(self, request: Request, block_ids: BlockIds) -> None:
        """``request_finished``: offer what the last steps completed. Its blocks may be freed."""
        tracked = self._requests.pop(request.request_id, None)
        self._has_ended = True
        was_aborted = request.status is RequestStatus.FINISHED_ABORTED
        self._rate.ended(request.request_id, was_aborted=was_aborted)
        self._due.forget(request.request_id)
        # vLLM counts tokens as computed that a running load has yet to bring, and may have failed to.
        loading = self._loads.is_loading(request.request_id) or request.request_id in self._parked
        self._parked.discard(request.request_id)
        if tracked is not None and self._saves_wanted and not loading:
            computed = request.num_computed_tokens - request.num_in_flight_tokens
            # The last sampled token was never an input, so it has no KV.
            self._offer(tracked, min(computed, request.num_tokens - 1), lambda: block_ids)
        self._loads.finished(request.request_id)
        self._taints.forget(request.request_id)
        self._link.send_told()  # the next step may be long in coming

    @property
    def holds_blocks(self) -> bool:
        """Whether device blocks become free when their save ends, without any preemption."""
        return self._saves.frees_blocks

    @property
    def busy(self) -> bool:
        """Whether the engine must go on stepping, whatever its requests do."""
        has_events = self._events is not None and self._events.busy
        return self._saves.busy or has_events or self._meter.busy or self._link.has_untold

    def take_events(self) -> list[KVCacheEvent]:
        """What has become of blocks that this engine can load, if vLLM publishes KV events."""
        return self._events.take() if self._events is not None else []

    def take_stats(self) -> KVStrataStats | None:
        """What vLLM's metrics are to count of us."""
        return self._meter.take()

    def reset(self) -> None:
        """``reset_cache``: nothing from before is found again, neither by this engine nor later.

        The engine goes on in a namespace that nobody had before, whether or not the server is
        there to drop the old one.
        """
        self._loads.reset()
        self._saves.reset()
        for tracked in self._requests.values():
            # What a running request computes from here on stands on KV of before.
            self._never_save(tracked.request)
        old, epoch = self._namespace, secrets.token_bytes(16)
        self._namespace = _derived(self._base, epoch)
        self._link.reset(old)
        self._link.register(self._namespace, {**self._parts, "epoch": epoch.hex()})
        if self._events is not None:
            self._events.follow(self._namespace)

    def close(self) -> None:
        self._link.close()
        if self._spans is not None:
            self._spans.close()

    def _see_admitted(self, output: SchedulerOutput) -> None:
        """Take note of requests that this step admits, and of those among them that only wait."""
        ids = {each.request.request_id for each in self._admitted}
        self._parked = (self._parked | ids).difference(output.num_scheduled_tokens)
        self._admitted = []

    def _never_save(self, request: Request) -> None:
        """What *request* has computed, and will, may not be what its tokens say."""
        if (tracked := self._requests.get(request.request_id)) is not None:
            tracked.offered_blocks = sys.maxsize

    def _tell_rate(self, output: SchedulerOutput, *, is_pure: bool) -> None:
        self._rate.step(output, requests=len(self._requests), is_pure=is_pure)
        if self._rate_told_to != self._link.number:
            self._rate_told_to = self._link.number
            self._rate.tell_again()
        tokens_per_second = self._rate.news() if self._link.ready else None
        if tokens_per_second is not None:
            self._link.submit(p.Measured(tokens_per_second / self._math.tokens))

    def _offer_completed(self, output: SchedulerOutput) -> None:
        state, scheduled = output.kv_connector_block_state, output.num_scheduled_tokens
        for request_id in self._due.take(max(scheduled.values(), default=0)):
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.offered_blocks == sys.maxsize:
                continue
            tokens = 0 if state is None else scheduled.get(request_id, 0)
            missing = self._missing_tokens(tracked, tokens)
            if tokens and missing <= 0 and self._saves.is_open:
                # After this step's forward this many tokens have KV; those not known yet are
                # placeholders or drafts, and num_tokens leaves them out.
                request = tracked.request
                computed = request.num_computed_tokens + tokens - placeholders(output, request_id)
                computed = min(computed, request.num_tokens)
                self._offer(tracked, computed, partial(_block_ids, state, request_id))
                missing = self._missing_tokens(tracked, tokens)
                if missing <= 0 and self._ends_in_taint(tracked):
                    missing = self._math.tokens - computed % self._math.tokens
            self._due.look(request_id, max(missing, 1))

    def _missing_tokens(self, tracked: Tracked, tokens: int) -> int:
        """How many the next block that can be offered lacks after *tokens* more."""
        computed: int = tracked.request.num_computed_tokens
        return (tracked.offered_blocks + 1) * self._math.tokens - computed - tokens

    def _ends_in_taint(self, tracked: Tracked) -> bool:
        """Whether the next block of the request is approximate: none of its blocks is offered then."""
        first = self._taints.first_token(tracked.request.request_id)
        return first is not None and tracked.offered_blocks >= first // self._math.tokens

    def _offer(
        self, tracked: Tracked, computed_tokens: int, block_ids: Callable[[], BlockIds]
    ) -> None:
        end = min(computed_tokens // self._math.tokens, self._taints.exact_blocks(tracked.request))
        if end <= tracked.offered_blocks or not (ids := block_ids()):
            return
        first = tracked.offered_blocks
        tracked.offered_blocks = self._saves.offer(
            tracked.request, self._namespace, ids, first, end
        )
        if self._events is not None:
            self._events.describe(tracked.request, first, tracked.offered_blocks)

    def _offer_states(self, state: KVConnectorBlockState) -> None:
        """Offer the states that this step's forward, or one before, has left at the end of blocks."""
        for each in states_of_step(state):
            tracked = self._requests.get(each.request_id)
            if tracked is None or tracked.offered_blocks == sys.maxsize:
                continue
            blocks, rest = divmod(each.tokens, self._math.tokens)
            is_whole = not rest and len(each.device_blocks) == len(self._math.recurrent)
            if is_whole and blocks <= self._taints.exact_blocks(tracked.request):
                self._saves.offer_state(
                    tracked.request, self._namespace, blocks, each.device_blocks
                )

    def _warn_of_policy(self, policy: str) -> None:
        if policy == "fail" and self._loads_wanted:
            _log.warning(
                "kv_load_failure_policy is 'fail': a load that fails ends its request with an "
                "error; set it to 'recompute' in --kv-transfer-config to have it computed"
            )


def _steps_ahead(vllm_config: VllmConfig) -> int:
    """How many steps of unknown end vLLM has when it plans another: one for each further stage,
    and one with asynchronous scheduling.
    """
    further_stages: int = vllm_config.parallel_config.pipeline_parallel_size - 1
    return further_stages + bool(vllm_config.scheduler_config.async_scheduling)


def _kept_apart(
    fingerprint: NamespaceFingerprint, block_format: BlockFormat, altered_by: str | None
) -> tuple[NamespaceId, dict[str, str]]:
    """The namespace, and what went into it, of blocks that are not just what the model computes."""
    base, parts = fingerprint.id, dict(fingerprint.parts)
    if block_format != EXACT:
        base = _derived(base, block_format.encode())
        parts["block_format"] = block_format
    if altered_by is not None:
        base = _derived(base, b"altered by " + altered_by.encode())
        parts["altered_by"] = altered_by
    return base, parts


def _line_to_server(config: Config, identity: EngineIdentity, *, persistent: bool) -> CacheLink:
    """The line to the server that there is, or to one that is started for it."""
    hello = identity.hello("engine", persistent=persistent)
    server = None
    if config.server == "embedded":
        server = EmbeddedServer(
            config,
            identity.socket,
            block_bytes=identity.block_bytes,
            block_format=identity.block_format,
            shares_session=identity.world_size > 1,
        )
    return CacheLink(config, identity.socket, hello, server)


def _derived(base: NamespaceId, distinction: bytes) -> NamespaceId:
    """A namespace of its own for what *distinction* tells from the blocks of *base*."""
    return blake3(base + distinction).digest(length=NAMESPACE_ID_BYTES)


def _block_ids(state: KVConnectorBlockState, request_id: str) -> BlockIds:
    return state.get_block_ids(request_id) or ()
