"""``DirectConnector``: the connector with an attention hook in it, for people who build their own."""

from kvstrata.integration.vllm.compat import HOOKING, SUPPORTED, check_vllm

check_vllm(HOOKING)  # before anything is imported that this vLLM may lack

import inspect
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import vllm
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.model_executor.layers.attention import Attention
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.connector import KVStrataConnector
from kvstrata.integration.vllm.hooks import AttentionHook, HookedLayers, load_hook
from kvstrata.integration.vllm.metadata import HookStep, StepPlan, WorkerReport

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput

__all__ = ["DirectConnector"]

_log = logging.getLogger(__name__)


class DirectConnector(KVStrataConnector):
    """``KVStrataConnector`` with the hook that ``attention_hook`` names; without one, the same.

    Blocks that were computed under a hook that alters attention are in a namespace of that hook.
    When such a hook fails, in whichever process, the engine goes on in a namespace of its own.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises ``ConfigError``, before serving starts, for a hook that could not work here."""
        self._hook: AttentionHook | None = None
        self._layers: HookedLayers | None = None
        self._failure_is_told = False
        super().__init__(vllm_config, role, kv_cache_config)

    def _set_up_hook(self, config: Config, vllm_config: VllmConfig) -> str | None:
        kind = self.hook_class(config)
        if kind is None:
            return None
        _refuse_other_calls()
        _refuse_compiled(vllm_config)
        if config.load_mode == "layerwise":
            raise ConfigError(
                f"load_mode is 'layerwise' and {kind.__qualname__} is at work in the layers: if it "
                "fails in one, what was copied of those before it could not be taken back",
                hint="take load_mode away, or the hook",
            )
        self._hook = kind()
        return kind.alters

    def hook_class(self, config: Config) -> type[AttentionHook] | None:
        """The hook's class. A connector that has a hook of its own overrides this."""
        return None if config.attention_hook is None else load_hook(config.attention_hook)

    # -- scheduler process -------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        step = self._hook_step(scheduler_output)
        plan = super().build_connector_meta(scheduler_output)
        assert isinstance(plan, StepPlan)
        plan.hook = step
        return plan

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        super().update_connector_output(connector_output)
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport) and report.hook_failed:
            self._leave_hook()

    def _hook_step(self, scheduler_output: SchedulerOutput) -> HookStep | None:
        if self._hook is None:
            return None
        if scheduler_output.total_num_scheduled_tokens == 0:
            return HookStep()
        try:
            return HookStep(self._hook.get_sparse_meta(scheduler_output))
        except Exception as e:  # noqa: BLE001 - plugin: its failure must not end the engine
            name = type(self._hook).__qualname__
            _log.error("the attention hook %s is switched off for good", name, exc_info=e)
            self._leave_hook()
            return None

    def _leave_hook(self) -> None:
        """Go on without the hook; what runs now is neither with it nor without it."""
        if self._hook is not None and self._hook.alters is not None:
            self._decides.reset()
        self._hook = None

    # -- worker processes --------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        if self._hook is not None:
            layers = get_layers_from_vllm_config(self._vllm_config, Attention)
            _refuse_other_layers(kv_caches, layers)
            self._layers = HookedLayers(self._hook, layers)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        plan = self._plan
        if self._layers is not None and plan.hook is not None and not plan.idle:
            self._layers.begin(plan.hook.sparse_meta)

    def wait_for_save(self) -> None:
        plan = self._plan
        if self._layers is not None:
            self._layers.end()
            # Those of an idle step run already; what they save is void once the failure is known.
            if self._layers.spoils and plan.hook is not None and not plan.idle:
                self._copies.half.refuse_saves(plan, "the attention hook has failed")
                return
        super().wait_for_save()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = super().build_connector_worker_meta()
        if self._layers is None or not self._layers.failed or self._failure_is_told:
            return report
        self._failure_is_told = True
        told = report if isinstance(report, WorkerReport) else WorkerReport()
        return replace(told, hook_failed=True)

    def shutdown(self) -> None:
        if self._layers is not None:
            self._layers.remove()
        super().shutdown()


def _refuse_other_calls() -> None:
    """Attention layers must be called as the hooks expect."""
    names = tuple(inspect.signature(Attention.forward).parameters)
    if names != ("self", "query", "key", "value", "output_shape", "output_dtype"):
        raise ConfigError(
            f"vLLM {vllm.__version__} calls its attention layers with {', '.join(names[1:])}",
            hint=f"install vLLM {SUPPORTED}, or take attention_hook away",
        )


def _refuse_compiled(vllm_config: VllmConfig) -> None:
    compilation = vllm_config.compilation_config
    if (compilation.mode, compilation.cudagraph_mode) != (CompilationMode.NONE, CUDAGraphMode.NONE):
        raise ConfigError(
            "attention_hook is set and vLLM compiles the model or records it as a graph: the hook "
            "would not be called",
            hint="start vLLM with --enforce-eager, or take attention_hook away",
        )


def _refuse_other_layers(
    kv_caches: dict[str, torch.Tensor], layers: dict[str, torch.nn.Module]
) -> None:
    """Every layer must take a query, a key and a value: those of MLA and Mamba do not."""
    strange = sorted(kv_caches.keys() - layers.keys())
    strange += sorted(
        n for n, layer in layers.items() if type(layer).forward is not Attention.forward
    )
    if strange:
        raise ConfigError(
            f"attention_hook is set and {strange[0]} is no layer with a plain query, key and value",
            hint="take attention_hook away for this model",
        )
