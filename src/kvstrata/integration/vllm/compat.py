"""The surface of vLLM that KVStrata uses, checked when the connector starts."""

import inspect
from typing import Final

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvstrata.core.errors import ConfigError

SUPPORTED: Final = ">=0.32,<0.33"

_CONNECTOR_HOOKS: Final = (
    "bind_gpu_block_pool",
    "build_connector_worker_meta",
    "get_external_cache_hit_sources",
    "get_transfer_results",
    "has_pending_block_frees",
    "has_pending_push_work",
    "on_new_request",
    "reset_cache",
)


def check_vllm() -> None:
    """Raises ``ConfigError`` naming what this vLLM lacks."""
    missing = [h for h in _CONNECTOR_HOOKS if not hasattr(base.KVConnectorBase_V1, h)]
    missing += [f"BlockPool.{m}" for m in _lacking(BlockPool, "touch", "free_blocks")]
    missing += [f"BlockPool.{m}" for m in _lacking(BlockPool, "get_cached_block")]
    if "kv_connector_block_state" not in inspect.signature(SchedulerOutput).parameters:
        missing.append("SchedulerOutput.kv_connector_block_state")
    source = inspect.getsource(Request.__init__)
    missing += [
        f"Request.{name}"
        for name in ("num_in_flight_tokens", "block_hashes", "num_computed_tokens")
        if f"self.{name}" not in source
    ]
    if missing:
        raise ConfigError(
            f"vLLM {vllm.__version__} lacks {', '.join(missing)}",
            hint=f"install vLLM {SUPPORTED}",
        )


def _lacking(kind: type, *names: str) -> list[str]:
    return [name for name in names if not hasattr(kind, name)]
