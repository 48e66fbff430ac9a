"""vLLM's own schedulers with the connector, a real server, real copies and a fake forward."""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import gcd, lcm
from pathlib import Path
from typing import Any

from tests.caches import PATIENCE_SECONDS, eventually
from tests.vllm.fake_runner import (
    DEVICE_TOKENS,
    LAYERS,
    TOKENS,
    Context,
    FakeRunner,
    Rank,
    continuation,
)
from tests.vllm.plans import full, group, plan, tensors
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvstrata.core.load import load_config
from kvstrata.integration.vllm.connector import KVStrataConnector
from kvstrata.integration.vllm.geometry import pages_from_tensors
from kvstrata.integration.vllm.ranks import Region
from kvstrata.integration.vllm.recurrent import is_recurrent
from kvstrata.integration.vllm.scheduler import SchedulerHalf
from kvstrata.integration.vllm.setup import EngineIdentity
from kvstrata.integration.vllm.worker import WorkerHalf, WorkerSettings
from kvstrata.manager.manager import KVManager
from kvstrata.server.attach import Attachment, Patience


def context_of(kind: Mapping[str, Any]) -> Context:
    """What the KV of a request with these fields depends on beside its tokens.

    Its salt too, which keeps tenants apart.
    """
    adapter = kind.get("lora_request")
    first = f"{kind.get('cache_salt')} {adapter and adapter.lora_name}"
    others = {} if first == "None None" else {0: first.encode()}
    for feature in kind.get("mm_features", ()):
        place = feature.mm_position
        for offset in range(place.length):
            others[place.offset + offset] = f"{feature.identifier} {offset}".encode()
    return tuple(others.items())


@dataclass
class Frontier:
    """How far a step offered a request's blocks, and how far a naive sum would have gone."""

    offered_tokens: int
    naive_tokens: int
    known_tokens: int


def _rank(region: Region, config: VllmConfig, planned: KVCacheConfig, *, layerwise: bool) -> Rank:
    """A worker whose share of every block is *region*, with tensors of its own."""
    settings = WorkerSettings(
        region, TOKENS, load_timeout_seconds=PATIENCE_SECONDS, layerwise=layerwise
    )
    half, caches = WorkerHalf(settings, config, planned), tensors(planned)
    half.register_kv_caches(caches)
    pages = pages_from_tensors(caches, half.geometry, planned)
    return Rank(half, [[page.numpy() for page in each] for each in pages])


class Engine:
    def __init__(  # noqa: PLR0913  # all that engines of these tests differ in
        self,
        folder: Path,
        socket: Path,
        *,
        asynchronous: bool = False,
        drafts: int = 0,
        num_blocks: int = 200,
        ranks: int = 1,
        stages: int = 1,
        policy: str = "recompute",
        groups: Sequence[KVCacheGroupSpec] = (),
        retention: int | None = 0,
        hash_tokens: int | None = None,
        connector: type[KVStrataConnector] = KVStrataConnector,
        **extra: Any,
    ) -> None:
        self.asynchronous = asynchronous
        self.steps_ahead = stages - 1 + asynchronous
        self.drafts = drafts
        settings = {
            "server": "attached",
            "socket": str(socket),
            "tokens_per_block": TOKENS,
            "weights_fingerprint": "none",
            "load_mode": "blockwise",
            "lookup_timeout_seconds": PATIENCE_SECONDS,
            "lookup_wait_seconds": 1.0,
            "load_timeout_seconds": PATIENCE_SECONDS,
            "save_timeout_seconds": PATIENCE_SECONDS,
            "reconnect_seconds": 0.01,
            "prefault": False,
        } | extra
        init_none_hash(sha256)
        config = self._vllm_config(folder, connector, settings, policy, (stages, ranks))
        config.scheduler_config.async_scheduling = asynchronous  # which vLLM forbids on a CPU
        groups = groups or [group(full(block_size=DEVICE_TOKENS), layers=LAYERS)]
        if any(is_recurrent(each.kv_cache_spec) for each in groups):
            config.cache_config.mamba_cache_mode = "align"
        sizes = {each.kv_cache_spec.block_size for each in groups}
        layout = "LBHNC" if len(sizes) == 1 else "BLHNC"  # which takes pages of any size
        planned = plan(config, *groups, layout=layout, num_blocks=num_blocks)
        planned.hash_block_size = hash_tokens or gcd(*sizes)
        planned.prefix_cache_retention_interval = retention
        block_size = lcm(*sizes)
        config.cache_config.num_gpu_blocks = num_blocks
        config.cache_config.block_size = block_size
        identity = EngineIdentity.of(load_config(settings), config, planned)
        self.block_bytes = identity.block_bytes
        layerwise = extra.get("load_mode") == "layerwise"
        self.runner = FakeRunner(
            [
                _rank(identity.regions.of(stage, rank), config, planned, layerwise=layerwise)
                for stage in range(stages)
                for rank in range(ranks)
            ],
            seed=7,
        )
        self.runner.soil()
        self.attachments = [
            Attachment(
                identity.socket,
                identity.hello("worker", rank=number),
                partial(setattr, rank.half, "mapping"),
                patience=Patience(60.0),
                prefault=False,
            )
            for number, rank in enumerate(self.runner.ranks)
        ]
        kind = AsyncScheduler if asynchronous else Scheduler
        with ExitStack() as refused:
            for attachment in self.attachments:
                refused.callback(attachment.close)
            self.scheduler = kind(
                vllm_config=config,
                kv_cache_config=planned,
                log_stats=True,
                structured_output_manager=StructuredOutputManager(config),
                block_size=block_size,
                hash_block_size=planned.hash_block_size,
            )
            refused.pop_all()
        if drafts:
            self.scheduler.num_spec_tokens = drafts
            if asynchronous:
                self.scheduler._spec_token_placeholders = [-1] * drafts
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.all_free = self.pool.get_num_free_blocks()
        self.connector: Any = self.scheduler.connector
        self.half: SchedulerHalf = self.connector._scheduler
        self.in_flight: deque[SchedulerOutput] = deque()
        self.requests: dict[str, Request] = {}
        self.frontiers: list[Frontier] = []

    @staticmethod
    def _vllm_config(
        folder: Path,
        connector: type[KVStrataConnector],
        settings: dict[str, Any],
        policy: str,
        workers: tuple[int, int],
    ) -> VllmConfig:
        stages, ranks = workers
        return VllmConfig(
            model_config=ModelConfig(
                model=str(folder), skip_tokenizer_init=True, max_model_len=512
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=4,
                max_num_batched_tokens=32,
                max_model_len=512,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            cache_config=CacheConfig(block_size=32, enable_prefix_caching=True),
            device_config=DeviceConfig("cpu"),
            parallel_config=ParallelConfig(
                pipeline_parallel_size=stages,
                tensor_parallel_size=ranks,
                distributed_executor_backend="mp" if stages * ranks > 1 else None,
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector=connector.__name__,
                kv_connector_module_path=connector.__module__,
                kv_role="kv_both",
                kv_load_failure_policy=policy,
                kv_connector_extra_config=settings,
            ),
        )

    def ready(self, manager: KVManager) -> None:
        """The server counts scheduler and worker."""

        def counted() -> bool:
            self.half._link.tick()
            return self.half._link.ready and any(
                each["workers"] == list(range(len(self.runner.ranks)))
                for each in manager.stats().engines
            )

        eventually(counted, "scheduler and worker do not come")

    def add(
        self,
        name: str,
        prompt: list[int],
        tokens: int,
        transfer: dict[str, Any] | None = None,
        *,
        sampling: dict[str, Any] | None = None,
        **kind: Any,
    ) -> Request:
        """*transfer*: the request's ``kv_transfer_params``; *kind*: other fields of ``Request``."""
        extra = None if transfer is None else {"kv_transfer_params": transfer}
        params = SamplingParams(
            max_tokens=tokens, ignore_eos=True, extra_args=extra, **(sampling or {})
        )
        params.update_from_generation_config({}, 99_999)
        request = Request(
            name,
            prompt,
            params,
            None,
            block_hasher=get_request_block_hasher(self.half._math.hash_tokens, sha256),
            **kind,
        )
        self.runner.contexts[name] = context_of(kind)
        self.scheduler.add_request(request)
        self.requests[name] = request
        return request

    def step(self) -> None:
        output = self.scheduler.schedule()
        self.in_flight.append(output)
        if len(self.in_flight) > self.steps_ahead:
            self.finish_step()

    def finish_step(self) -> None:
        output = self.in_flight.popleft()
        result = self.runner.execute(output)
        self.scheduler.update_from_output(output, result)
        if self.drafts and not self.asynchronous:
            ids = list(output.num_scheduled_tokens)
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(ids, [[0] * self.drafts for _ in ids])
            )

    def run(self) -> None:
        """Until all requests are done and all that was held for copies is let go."""

        def idle() -> bool:
            if not self.scheduler.has_requests() and not self.in_flight:
                return True
            if self.scheduler.has_requests():
                self.step()
            else:
                self.finish_step()
            return False

        eventually(idle, "the engine does not come to rest")

    def serve(self, name: str, prompt: list[int], tokens: int) -> int:
        """Answer *prompt* rightly; how many of its tokens were loaded."""
        request = self.add(name, prompt, tokens)
        self.run()
        assert list(request.output_token_ids) == continuation(prompt, tokens)
        return self.runner.loaded_tokens.get(name, 0)

    def forget_device(self) -> None:
        assert self.try_to_forget_device()

    def try_to_forget_device(self, *, running: bool = False) -> bool:
        """Whether vLLM forgets it. With no step under way the pages that are free then hold nothing."""
        is_done: bool = self.scheduler.reset_prefix_cache(running)
        if is_done and not self.in_flight:
            self.runner.soil([block.block_id for block in self.pool.blocks if not block.ref_cnt])
        return is_done

    def is_at_rest(self) -> bool:
        """What the last step has left to be told leaves with the next tick."""
        self.half._link.tick()
        return self.pool.get_num_free_blocks() == self.all_free and not self.half.busy

    def leftovers(self) -> dict[str, Any]:
        """What our halves remember of requests and copies: nothing, once all have ended."""
        half, workers = self.half, [rank.half for rank in self.runner.ranks]
        loads, saves = half._loads, half._saves
        tables = {
            "requests": half._requests,
            "taints": half._taints._taints,
            "lookups": loads._lookups,
            "blocks of lookups": loads.ahead._blocks,
            "loads": loads._running,
            "blocks of loads": loads._loading_blocks,
            "refused": loads._refused,
            "planned": loads._planned,
            "sources": loads._sources,
            "awaits": loads._awaits._until,
            "offers": saves._offers,
            "saves": saves._running,
            "held blocks": saves._held.count,
            "writes": half._link._redial._writing,
            "copies": [task for each in workers for task in each._tasks_of],
            "loads of workers": [load for each in workers for load in each._loads],
            "references": [b for b in self.pool.blocks if b.ref_cnt and not b.is_null],
        }
        return {name: table for name, table in tables.items() if table}

    def holds_nothing(self, manager: KVManager) -> bool:
        """A task whose request was aborted before the answer came is cancelled at the next tick."""
        self.half._link.tick()
        return manager.stats().running_gets == 0

    def watch_frontiers(self) -> None:
        offer = self.half._offer_completed
        inner = self.half._offer
        scheduled: dict[str, int] = {}

        def offer_completed(output: SchedulerOutput) -> None:
            scheduled.update(output.num_scheduled_tokens)
            offer(output)
            scheduled.clear()

        def record(tracked: Any, computed_tokens: int, block_ids: Any) -> None:
            request = tracked.request
            count = scheduled.get(request.request_id)
            naive = computed_tokens if count is None else request.num_computed_tokens + count
            self.frontiers.append(Frontier(computed_tokens, naive, request.num_tokens))
            inner(tracked, computed_tokens, block_ids)

        self.half._offer_completed = offer_completed  # type: ignore[method-assign]  # a spy
        self.half._offer = record  # type: ignore[method-assign]  # a spy

    def close(self) -> None:
        while self.in_flight:
            self.finish_step()
        for rank in self.runner.ranks:
            rank.half.shutdown()
        for attachment in self.attachments:
            attachment.close()
        self.connector.shutdown()
