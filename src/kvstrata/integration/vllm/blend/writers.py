"""K and V of a layer, as its backend's own writer takes them, whatever its pages look like.

Of MLA (DeepSeek-V2, arXiv:2405.04434, section 2.1) a cache keeps a latent, from which the keys and values
of all heads are made, and a key that all heads share and that alone is turned: here that is K, and the
latent is V.
"""

from typing import TYPE_CHECKING, Protocol

import torch
from vllm.model_executor.layers.attention import MLAAttention

from kvstrata.core.errors import ConfigError

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

__all__ = ["Writer", "writer_of"]


class Writer(Protocol):
    key_shape: tuple[int, int]
    """Of a token: heads, and numbers of each."""

    value_shape: tuple[int, int]

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Both (tokens, heads, numbers), without gaps, to *slots*, int64 (tokens,)."""
        ...


class _OfHeads:
    def __init__(self, attention: "Attention") -> None:
        self._attention = attention
        self.key_shape = self.value_shape = (attention.num_kv_heads, attention.head_size)

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        layer = self._attention
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)


class _OfLatents:
    def __init__(self, attention: MLAAttention) -> None:
        self._attention = attention
        self.key_shape = (1, attention.qk_rope_head_dim)
        self.value_shape = (1, attention.kv_lora_rank)

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        layer = self._attention
        layer.impl.do_kv_cache_update(
            values.squeeze(1), keys, layer.kv_cache, slots, layer.kv_cache_dtype, layer._k_scale
        )


def writer_of(attention: "Attention | MLAAttention") -> Writer:
    """Raises ``ConfigError`` if the backend of *attention* has none that could be called."""
    if isinstance(attention, MLAAttention):
        return _OfLatents(attention)
    backend = attention.attn_backend
    if backend.forward_includes_kv_cache_update or not hasattr(
        attention.impl, "do_kv_cache_update"
    ):
        raise ConfigError(
            f"{backend.__name__} writes KV as a part of its attention, or in a way that KVStrata "
            "does not know",
            hint="choose another --attention-backend, or set kv_connector to KVStrataConnector",
        )
    return _OfHeads(attention)
