"""LMCache's connector to its daemon, with the bytes counted that it asks its worker to move.

All that it does is LMCache's. Its daemon counts chunks that it has locked, be it that the device had
them already, so they are counted here. Used with ``"kv_connector_module_path":
"kvstrata.bench.counted_lmcache"`` and, beside its own settings, ``token_bytes`` (of KV) and a
``counts_path`` (``counts.Counts``).
"""

from functools import cached_property
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector import LMCacheMPConnector
from vllm.forward_context import ForwardContext

from kvstrata.bench.counts import Counts


class CountedLMCacheConnector(LMCacheMPConnector):  # type: ignore[misc]  # vLLM's types are Any
    @cached_property
    def _counts(self) -> Counts:
        """The worker's: nobody else is asked to load or to store."""
        return Counts(self._kv_transfer_config.kv_connector_extra_config["counts_path"])

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
        token_bytes: int = self._kv_transfer_config.kv_connector_extra_config["token_bytes"]
        return tokens * token_bytes
