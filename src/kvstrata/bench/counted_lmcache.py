"""LMCache's connector to its daemon, with the bytes counted that it asks its worker to move.

All that it does is LMCache's. Its daemon counts chunks that it has locked, be it that the device had
them already, so they are counted here. Used with ``"kv_connector_module_path":
"kvstrata.bench.counted_lmcache"`` and, beside its own settings, ``token_bytes`` (of KV) and a
``counts_path`` (``counts.Counts``).
"""

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector import LMCacheMPConnector
from vllm.forward_context import ForwardContext
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvstrata.bench.counts import Counts


class CountedLMCacheConnector(LMCacheMPConnector):  # type: ignore[misc]  # vLLM's types are Any
    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.WORKER:
            settings = self._kv_transfer_config.kv_connector_extra_config
            self._token_bytes = int(settings["token_bytes"])
            self._counts = Counts(settings["counts_path"])

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        self._counts.loaded(self._bytes("RETRIEVE"))

    def wait_for_save(self) -> None:
        super().wait_for_save()
        self._counts.stored(self._bytes("STORE"))

    def _bytes(self, direction: str) -> int:
        """Of all that this step is to move in *direction*, without what the device has already."""
        moves = (r.op for r in self._get_connector_metadata().requests if r.direction == direction)
        tokens: int = sum(move.end - move.start - move.skip_first_n_tokens for move in moves)
        return tokens * self._token_bytes
