"""vLLM's ExampleConnector, with the bytes of its files counted.

All that it does is vLLM's; behind it the sizes of the files are looked up that it has loaded or
stored. Used with ``"kv_connector_module_path": "kvstrata.bench.counted_example"`` and, beside its own
settings, a ``counts_path`` (``counts.Counts``).
"""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector, ReqMeta
from vllm.forward_context import ForwardContext

from kvstrata.bench.counts import Counts


class CountedExampleConnector(ExampleConnector):  # type: ignore[misc]  # vLLM's types are Any
    @cached_property
    def _counts(self) -> Counts:
        """The worker's: nobody else is asked to load or to store."""
        return Counts(self._kv_transfer_config.kv_connector_extra_config["counts_path"])

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        if forward_context.attn_metadata is None:
            return
        layers = forward_context.no_compile_layers.items()
        cached = [name for name, layer in layers if hasattr(layer, "kv_cache")]
        for request in self._get_connector_metadata().requests:
            if not request.is_store:
                self._counts.loaded(self._file_bytes(request, cached))

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        for request in self._get_connector_metadata().requests:
            if request.is_store:
                self._counts.stored(self._file_bytes(request, [layer_name]))

    def _file_bytes(self, request: ReqMeta, layers: Iterable[str]) -> int:
        names = (
            self._generate_filename_debug(layer, request.token_ids, request.mm_hashes)
            for layer in layers
        )
        return sum(Path(name).stat().st_size for name in names)
