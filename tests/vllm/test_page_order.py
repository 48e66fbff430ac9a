"""The order of the KV cache that vLLM is asked for, and what vLLM makes of it."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvstrata.integration.vllm.connector import KVStrataConnector

CONFIG: Any = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_layout=None))
OLDER: Any = SimpleNamespace(cache_config=SimpleNamespace())


def test_beside_a_connector_that_needs_an_order_there_is_no_wish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)

    class Needs(KVStrataConnector):
        @classmethod
        def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
            return "LBHNC"

    both = [(Needs, CONFIG), (KVStrataConnector, CONFIG)]
    monkeypatch.setattr(
        MultiConnector, "_get_connector_classes_and_configs", classmethod(lambda *_: both)
    )
    config: Any = SimpleNamespace(kv_transfer_config=object())
    assert MultiConnector.get_required_kvcache_layout(config) == "LBHNC"


def test_a_cpu_has_one_order_only() -> None:
    assert KVStrataConnector.get_required_kvcache_layout(CONFIG) is None


@pytest.mark.parametrize(
    ("capability", "order"),
    [
        (None, KVCacheLayout.BLNHC),
        (DeviceCapability(9, 0), KVCacheLayout.BLNHC),
        (DeviceCapability(10, 0), KVCacheLayout.BLHNC),
    ],
)
def test_blocks_are_outermost_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capability: DeviceCapability | None, order: KVCacheLayout
) -> None:
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(current_platform, "get_device_capability", lambda: capability)
    asked = KVStrataConnector.get_required_kvcache_layout(CONFIG)
    assert asked == order.name
    assert order.is_block_outermost
    assert KVStrataConnector.get_required_kvcache_layout(OLDER) is None
