"""``BlendConnector``: the connector that also reuses KV of tokens that stand elsewhere."""

from kvstrata.integration.vllm.compat import BLENDING, check_vllm

check_vllm(BLENDING)  # before anything is imported that this vLLM may lack

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvstrata.core.config import Config
from kvstrata.integration.vllm.blend.adapters import check_adapters
from kvstrata.integration.vllm.blend.gate import check_model
from kvstrata.integration.vllm.blend.gathered import GatheredAttention
from kvstrata.integration.vllm.blend.layers import token_pages
from kvstrata.integration.vllm.blend.model import calling_model
from kvstrata.integration.vllm.blend.nested import NestedForward
from kvstrata.integration.vllm.blend.ropes import check_ropes, correctors
from kvstrata.integration.vllm.blend.rules import not_followed, rule_of
from kvstrata.integration.vllm.blend.scheduler import BlendScheduler
from kvstrata.integration.vllm.blend.scorer import StepRunner
from kvstrata.integration.vllm.blend.supported import refuse_engine
from kvstrata.integration.vllm.blend.taps import AttentionTaps
from kvstrata.integration.vllm.blend.worker import BlendWorker, Ended
from kvstrata.integration.vllm.blocks import BlockIds
from kvstrata.integration.vllm.connector import KVStrataConnector
from kvstrata.integration.vllm.geometry import pages_from_tensors
from kvstrata.integration.vllm.metadata import NULL_BLOCK, WorkerReport
from kvstrata.integration.vllm.request_params import TAINT_FROM
from kvstrata.integration.vllm.scheduler import SchedulerHalf

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.request import Request

__all__ = ["BlendConnector"]

_log = logging.getLogger(__name__)


class BlendConnector(KVStrataConnector):
    """``KVStrataConnector`` that blends the requests that ask for it."""

    _blends: ClassVar = True

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises ``ConfigError``, before serving starts, for whatever cannot work."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._blending: BlendWorker | None = None
        self._ended: list[Ended] = []

    def _scheduler_half(
        self,
        config: Config,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        altered_by: str | None,
    ) -> SchedulerHalf:
        refuse_engine(config, vllm_config, kv_cache_config)
        for said in not_followed(config):
            _log.warning("%s", said)
        return BlendScheduler(config, vllm_config, kv_cache_config, altered_by=altered_by)

    # -- scheduler process -------------------------------------------------------------------

    def _finished(
        self, request: "Request", block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        """Tells in ``kv_transfer_params`` from which token on the KV is approximate, if it is."""
        assert isinstance(self._decides, BlendScheduler)
        first = self._decides.tainted_from(request)
        held, _ = super()._finished(request, block_ids)
        return held, None if first is None else {TAINT_FROM: first}

    # -- worker processes --------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._blending = self._set_up(kv_caches)
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        plan = self._plan
        if plan.blend is not None and self._blending is not None:
            for request in plan.blend.requests:
                self._blending.begin(request, plan.server_id)
            mapping = self._copies.half.mapping
            self._ended += self._blending.advance(
                mapping, plan.blend.most_moved, plan.blend.most_run
            )

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        received, failed = results.finished_recving or set(), results.failed_recving or set()
        if self._blending is not None:
            held = {r for r in received if self._blending.loaded(r, whole=r not in failed)}
            received, failed = received - held, failed - held
            self._blending.finished(finished_req_ids)
        received |= {each.request_id for each in self._ended}
        failed |= {each.request_id for each in self._ended if not each.whole}
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = super().build_connector_worker_meta()
        ended, self._ended = self._ended, []
        if not ended:
            return report
        ours = WorkerReport(
            load_done={each.task_ids[0]: self._copies.half.bit for each in ended},
            load_failed={each.task_ids[0] for each in ended if not each.whole},
            audits={each.task_ids[0]: each.audit for each in ended if each.audit is not None},
        )
        return ours if report is None else ours.aggregate(report)

    def _set_up(self, kv_caches: dict[str, torch.Tensor]) -> BlendWorker:
        refuse_engine(self._config, self._vllm_config, self._kv_cache_config)
        half = self._copies.half
        (group,) = half.geometry.groups
        (pages,) = pages_from_tensors(kv_caches, half.geometry, self._kv_cache_config)
        context = self._vllm_config.compilation_config.static_forward_context
        attention: dict[str, Attention] = {name: context[name] for name in group.layers}
        model = calling_model(attention)
        check_adapters(model, self._vllm_config)
        layers = {
            name: token_pages(layer, page, NULL_BLOCK, group.block_size)
            for (name, layer), page in zip(attention.items(), pages, strict=True)
        }
        taps = AttentionTaps(list(attention.values()))
        device = pages[0].device
        gathers = self._config.blend_attention == "gathered" or device.type != "cpu"
        nested = NestedForward(
            model,
            self._vllm_config,
            self._kv_cache_config,
            device,
            GatheredAttention(list(attention.values()), list(layers.values()), taps)
            if gathers
            else None,
        )
        check_ropes(model, self._config, next(iter(attention.values())).head_size)
        moves = correctors(model, attention)
        check_model(
            nested,
            layers,
            moves,
            taps,
            vocabulary=self._vllm_config.model_config.get_vocab_size(),
            positions=self._vllm_config.model_config.max_model_len,
        )
        ranks = get_tp_group()
        windows = {layer.sliding_window for layer in attention.values()}
        runner = StepRunner(
            nested,
            list(layers.values()),
            list(attention.values()),
            taps,
            ranks,
        )
        return BlendWorker(
            list(layers.values()),
            moves,
            half.slot_pages(),
            runner,
            partial(rule_of, self._config, layers=len(layers), reaches_differ=len(windows) > 1),
            ranks,
        )
