"""Which attention backends' pages blending can read and write."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.blend.pages import learn_page_map

pytestmark = pytest.mark.vllm


def test_a_backend_that_writes_kv_within_its_attention_is_refused() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    class WritesWithin(CPUAttentionBackend):
        forward_includes_kv_cache_update = True

    attention: Any = SimpleNamespace(attn_backend=WritesWithin)
    with pytest.raises(ConfigError, match="WritesWithin writes KV as a part of its attention"):
        learn_page_map(attention, torch.zeros(1, 1, dtype=torch.uint8), 0, 32)


def test_a_backend_without_a_writer_of_the_name_that_is_known_is_refused() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    attention: Any = SimpleNamespace(attn_backend=CPUAttentionBackend, impl=object())
    with pytest.raises(ConfigError, match="or in a way that KVStrata does not know"):
        learn_page_map(attention, torch.zeros(1, 1, dtype=torch.uint8), 0, 32)
