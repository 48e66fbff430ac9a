"""``KVStrataConnector``: what vLLM sees. Each hook goes to the half that its process has."""

from kvstrata.integration.vllm.compat import check_vllm

check_vllm()  # before anything is imported that this vLLM may lack

import logging
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError, InvariantViolated, KVStrataError
from kvstrata.core.load import load_config
from kvstrata.integration.vllm.attached_worker import AttachedWorker
from kvstrata.integration.vllm.blocks import BlockIds
from kvstrata.integration.vllm.compat import CacheHitSource
from kvstrata.integration.vllm.engine_metrics import KVStrataPromMetrics, KVStrataStats
from kvstrata.integration.vllm.metadata import StepPlan, WorkerReport
from kvstrata.integration.vllm.page_order import wanted_page_order
from kvstrata.integration.vllm.scheduler import SchedulerHalf

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["KVStrataConnector"]


class KVStrataConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the KV cache below the device and gives it back for equal prefixes."""

    _blends: ClassVar = False

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises ``ConfigError``, before serving starts, for whatever cannot work."""
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm_does()
        config = load_config(self._kv_transfer_config.kv_connector_extra_config)
        self._config = config
        self._refuse_idle_settings()
        self._scheduler: SchedulerHalf | None = None
        self._worker: AttachedWorker | None = None
        altered_by = self._set_up_hook(config, vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = self._scheduler_half(config, vllm_config, kv_cache_config, altered_by)
        else:
            self._worker = AttachedWorker(config, vllm_config, kv_cache_config)

    def _refuse_idle_settings(self) -> None:
        idle = self._config.blend_settings
        if idle and not self._blends:
            raise ConfigError(
                f"{', '.join(idle)} is set, and {type(self).__name__} does not blend",
                hint=f"set kv_connector to BlendConnector, or take {', '.join(idle)} away",
            )

    def _scheduler_half(
        self,
        config: Config,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        altered_by: str | None,
    ) -> SchedulerHalf:
        return SchedulerHalf(config, vllm_config, kv_cache_config, altered_by=altered_by)

    def _set_up_hook(self, config: Config, vllm_config: VllmConfig) -> str | None:
        """What a hook makes of this engine's blocks, if it makes others of them."""
        if config.attention_hook is None:
            return None
        raise ConfigError(
            f"attention_hook is {config.attention_hook!r}, and KVStrataConnector runs no hooks",
            hint="set kv_connector to DirectConnector, or take attention_hook away",
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache is best effort: a preempted request may finish whatever became of its saves."""
        return False

    # -- scheduler process -------------------------------------------------------------------

    @property
    def _decides(self) -> SchedulerHalf:
        if self._scheduler is None:
            raise InvariantViolated("a scheduler hook is called in a worker")
        return self._scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._decides.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: "Request") -> None:
        self._decides.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._decides.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        self._decides.allocated(request, blocks.get_block_ids, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        return self._decides.hit_sources(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if not scheduler_output.total_num_scheduled_tokens:
            self._decides.give_way()
        return self._decides.plan(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        if connector_output.invalid_block_ids:
            self._decides.not_loaded(connector_output.invalid_block_ids)
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._decides.worker_report(report)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request, block_ids)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Called by ``MultiConnector`` where another of its connectors knows one group only."""
        return self._finished(request, (block_ids,))

    def _finished(
        self, request: "Request", block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        self._decides.finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._decides.busy

    def has_pending_block_frees(self) -> bool:
        return self._decides.holds_blocks

    def take_events(self) -> "Iterable[KVCacheEvent]":
        return self._decides.take_events()

    def reset_cache(self) -> bool:
        self._decides.reset()
        return True

    # -- worker processes --------------------------------------------------------------------

    @property
    def _copies(self) -> AttachedWorker:
        if self._worker is None:
            raise InvariantViolated("a worker hook is called in the scheduler")
        return self._worker

    @property
    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._copies.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._copies.half.begin_step(self._plan)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        self._copies.half.start_load(self._plan)

    def has_connector_metadata(self) -> bool:
        """vLLM asks before it calls the two hooks of a layer, which do nothing but layer by layer."""
        return self._config.load_mode == "layerwise" and super().has_connector_metadata()

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._copies.half.wait_for_layer(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,
    ) -> None:
        self._copies.half.save_layer(self._plan, layer_name)

    def wait_for_save(self) -> None:
        self._copies.half.start_save(self._plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        received, failed = self._copies.half.collect()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._copies.half.take_invalid_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._copies.half.report()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """In a recorded graph vLLM would call none of the hooks that come layer by layer."""
        try:
            return load_config(extra_config).load_mode == "layerwise"
        except (
            ConfigError
        ) as e:  # pydantic asks: in a ValueError it would put words of its own last
            raise KVStrataError(str(e.args[0]), hint=e.hint) from None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """A wish. Beside other connectors there is none: ``MultiConnector`` takes it for a need.

        It refuses to start where two need different orders, and tells nobody who asks but by
        calling from its own method of this name.
        """
        asking = sys._getframe(1).f_code.co_name
        is_alone = asking != cls.get_required_kvcache_layout.__name__
        return wanted_page_order(vllm_config) if is_alone else None

    # -- both --------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return None if self._scheduler is None else self._scheduler.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return KVStrataStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVStrataPromMetrics:
        return KVStrataPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.shutdown()


def _log_as_vllm_does() -> None:
    """vLLM sets up its own logger only: without handlers our warnings come bare, the rest never."""
    ours, theirs = logging.getLogger("kvstrata"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate
